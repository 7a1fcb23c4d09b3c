"""Records the launches of Triton kernels instead of making them, on a machine that need not have a GPU.

with fake_cuda() as device, WorkspacePool():
    ...  # make a state and a model on `device`
    with record_launches() as launches:
        step.fn(state)

Inside, every op of this package runs its CUDA implementation, argument checks included, on tensors without data; only
`kernel[grid](...)` itself is replaced. So `launches` holds what a device would have been asked for, in order.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .registration import CUDA_IMPLEMENTATIONS, NAMESPACE
from .triton_support import Kernel, recording

_ALIGNED = "D"
"""Triton's own mark of an argument that is a multiple of 16 or a pointer to one."""


@dataclass(frozen=True)
class Pointer:
    """A tensor as far as a kernel is specialised on it. It has the methods by which Triton asks a tensor."""

    dtype: torch.dtype
    offset: int
    """Bytes from the beginning of the memory, which allocators align to 16 or more."""
    extent: int
    """Bytes of the memory."""

    def data_ptr(self) -> int:
        """An address with the tensor's alignment."""
        return self.offset

    def ptr_range(self) -> int:
        """Bytes that the pointer may reach; below 2**31 AMD's kernels use other loads."""
        return self.extent


@dataclass(frozen=True)
class Specialization:
    """What Triton compiles one kernel for: equal ones share machine code."""

    kernel: str
    """`module:name` of the jitted function."""
    signature: tuple[tuple[str, str, str], ...]
    """Name, type and marks of every parameter: `*bf16` or `i32`, `constexpr` for the constants; `D` marks multiples
    of 16, and on AMD `S` a pointer into less than 2 GiB."""
    constants: tuple[tuple[str, Any], ...]
    """The `constexpr` parameters, and those that are None or 1."""
    options: tuple[tuple[str, Any], ...]
    """num_warps, num_stages, maxnreg, enable_fp_fusion: those that the launch gave."""


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel."""

    op: str
    """The op that asked for it."""
    kernel: Any
    """The jitted function."""
    arguments: Mapping[str, Any]
    """Every parameter by name; a `Pointer` for a tensor."""
    options: Mapping[str, Any]
    """What the launch gave beside the parameters."""
    grid: tuple[int, ...]
    """Programs along each axis."""
    amd: bool
    """Whether it is for an AMD device."""

    @property
    def name(self) -> str:
        """The kernel's name without its module."""
        return str(self.kernel.fn.__name__)

    @functools.cached_property
    def specialization(self) -> Specialization:
        """What has to be compiled for this launch, as Triton itself derives it from the arguments."""
        bound, kinds, _ = _binder(self.kernel, self.amd)(**self.arguments)
        names = [
            (name, kind, mark if isinstance(mark, str) else "") for name, (kind, mark) in zip(bound, kinds, strict=True)
        ]
        return Specialization(
            kernel=f"{self.kernel.fn.__module__}:{self.name}",
            signature=tuple((name, kind, "" if kind == "constexpr" else mark) for name, kind, mark in names),
            constants=tuple((name, bound[name]) for name, kind, _ in names if kind == "constexpr"),
            options=tuple(sorted(self.options.items())),
        )

    @property
    def signature(self) -> dict[str, str]:
        """Types of the parameters that are no constants, `:16` appended to multiples of 16."""
        return {
            name: f"{kind}:16" if _ALIGNED in mark else kind
            for name, kind, mark in self.specialization.signature
            if kind != "constexpr"
        }

    @property
    def constants(self) -> dict[str, Any]:
        """The `constexpr` parameters, and those that are None or 1, which Triton makes constants too."""
        return dict(self.specialization.constants)


@functools.cache
def _binder(kernel: Any, amd: bool) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    # Only the kind of device matters here, not which one.
    backend = make_backend(GPUTarget("hip", "gfx942", 64) if amd else GPUTarget("cuda", 90, 32))
    return create_function_from_signature(kernel.signature, kernel.params, backend)


class _Recorder(TorchFunctionMode):
    # Not a dispatch mode: those run with every function mode off, `fake_cuda`'s among them, which the launches' own
    # indexing needs.

    def __init__(self, launches: list[Launch], amd: bool) -> None:
        super().__init__()
        self.amd = amd
        self._launches, self._op = launches, ""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an op of this package by its CUDA implementation, any other as usual."""
        if not isinstance(func, torch._ops.OpOverload) or func.namespace != NAMESPACE:
            return func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if name not in CUDA_IMPLEMENTATIONS:
            return func(*args, **(kwargs or {}))
        outer, self._op = self._op, name
        try:
            return CUDA_IMPLEMENTATIONS[name](*args, **(kwargs or {}))
        finally:
            self._op = outer

    def add(self, kernel: Any, grid: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
        """Records one launch.

        Raises:
            TypeError: an argument of the kernel is missing, given twice or unknown.
        """
        given = {name: value for name, value in options.items() if name in kernel.arg_names}
        bound = inspect.Signature.bind(kernel.signature, *arguments, **given)
        bound.apply_defaults()
        known = {name: value for name, value in options.items() if name not in given}
        launch = Launch(
            op=self._op,
            kernel=kernel,
            arguments={name: _as_argument(value) for name, value in bound.arguments.items()},
            options=known,
            grid=tuple(grid),
            amd=self.amd,
        )
        self._launches.append(launch)


def _as_argument(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    offset = int(value.storage_offset()) * value.element_size()
    return Pointer(value.dtype, offset, int(value.untyped_storage().nbytes()))


@contextmanager
def record_launches(*, amd: bool = False) -> Iterator[list[Launch]]:
    """Inside, the ops of this package launch nothing, and the list grows by what they would have launched.

    Enter it inside `graphs.capture_guard.fake_cuda`, and inside a `WorkspacePool`; pass it only fake CUDA tensors.
    What is not an op of this package is not recorded.

    Args:
        amd: record what would be launched on an AMD device; on an NVIDIA one otherwise.

    Raises:
        RuntimeError: Triton is absent, or interprets kernels in this process, so that there is nothing to launch.
    """
    if Kernel is None:
        raise RuntimeError("launches cannot be recorded: Triton is absent, or TRITON_INTERPRET is set")
    launches: list[Launch] = []
    recorder = _Recorder(launches, amd)
    token = recording.set(recorder)
    try:
        with recorder:
            yield launches
    finally:
        recording.reset(token)
