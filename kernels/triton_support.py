"""What every Triton kernel of this package shares: the guarded import, argument checks, compile specs.

An op's file stays importable where Triton has no build: `triton` and `tl` are then None, and `jit` leaves the function
as it is. So a kernel's body may name `tl` freely, and nothing else at the top level of a file may.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

INTERPRETED: bool = triton is not None and bool(triton.knobs.runtime.interpret)
"""Whether kernels run under `TRITON_INTERPRET=1`: on CPU tensors, one program after another, in NumPy."""


class Recording(Protocol):
    """What takes the launches of this thread in place of the device; see `launch_recorder`."""

    amd: bool
    """Whether launches are those of an AMD device."""

    def add(self, kernel: Any, grid: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
        """Takes one launch: what stands in the brackets and in the parentheses of `kernel[grid](...)`."""


recording: ContextVar[Recording | None] = ContextVar("draftgraph_recording", default=None)
"""Of this thread; None to launch."""

MAX_REGISTERS = 255
"""Of a thread, an option of every launch on NVIDIA: without it ptxas may spill in order to fit more blocks on a
multiprocessor."""
Kernel: Any = None
"""The class of jitted functions; None where there are none, and under the interpreter."""

if triton is not None and not INTERPRETED:

    class _Kernel(triton.JITFunction):
        """A jitted function whose launches a `Recording` may take."""

        def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            """Launches, or records."""
            if not on_amd():
                kwargs.setdefault("maxnreg", MAX_REGISTERS)
            taker = recording.get()
            if taker is None:
                return super().run(*args, grid=grid, warmup=warmup, **kwargs)
            return taker.add(self, grid, args, kwargs)

    Kernel = _Kernel


def jit(function: Any = None, *, unspecialized: Sequence[str] = ()) -> Any:
    """`triton.jit`, or nothing where Triton is absent.

    Args:
        function: to compile.
        unspecialized: integer parameters whose value Triton shall not look at. Of any other it compiles the kernel
            again for 1, for multiples of 16 and for the rest.
    """
    if function is None:
        return functools.partial(jit, unspecialized=unspecialized)
    if triton is None:
        return function
    if Kernel is None:
        return triton.jit(function, do_not_specialize=unspecialized)
    return Kernel(function, do_not_specialize=unspecialized)


def on_amd() -> bool:
    """Whether a launch is for an AMD device: that of this build of torch, or of the recording under way."""
    taker = recording.get()
    return torch.version.hip is not None if taker is None else taker.amd


@jit
def _round_compiled(x, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    return x.to(kind)


@jit
def _round_interpreted(x, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    if kind == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, nearest, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(kind)


round_to = _round_interpreted if INTERPRETED else _round_compiled
"""`round_to(x, kind)`: float32 to the float type `kind`, to nearest, ties to even. The interpreter's own conversion to
bfloat16 truncates."""


UNFUSED: dict[str, bool] = {"enable_fp_fusion": False}
"""Options of a launch whose kernel calls `elementary_triton` or `philox_triton`: no multiply-add is fused."""


def next_power_of_2(size: int) -> int:
    """The smallest power of two that is at least `size`, and at least 1: the length of a kernel's range."""
    return 1 << max(size - 1, 0).bit_length()


def row_range(rows: int) -> int:
    """The length of a kernel's range over the rows of a bucket.

    For one row 1, and for any small number the same: a kernel for each bucket would only be compiled longer.
    """
    return 1 if rows == 1 else max(16, next_power_of_2(rows))


def draft_range(num_drafts: int) -> int:
    """The length of a kernel's range over a row's drafts and one more token: the same for up to 7 drafts."""
    return max(8, next_power_of_2(num_drafts + 1))


def constants_of(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Of a launch's sizes those in capitals, which are `constexpr`; the others are ordinary integers."""
    return {name: size for name, size in sizes.items() if name.isupper()}


def short_range(size: int) -> int:
    """The length of a kernel's range over what may be few or many: the same for up to 16."""
    return max(16, next_power_of_2(size))


def check_some(name: str, what: str, count: int) -> None:
    """Refuses an argument of a launch that has none of what the kernel reads in any case.

    Raises:
        ValueError: names the argument and what it lacks.
    """
    if count < 1:
        raise ValueError(f"{name} has no {what}; accepted: at least 1")


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    *,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | None],
    device: torch.device | None = None,
    contiguous: bool = True,
) -> None:
    """Refuses an argument of a launch that its kernel could not take.

    Args:
        name: of the argument, for the message.
        tensor: the argument.
        dtypes: the types accepted.
        shape: the sizes accepted; None accepts any.
        device: where the op's other arguments are; None for the first one.
        contiguous: require it; otherwise only that the last dimension has stride 1.

    Raises:
        ValueError: names the argument, what it is and what is accepted.
    """
    kind = "cpu" if INTERPRETED else "cuda"
    if tensor.device.type != kind:
        under = " under TRITON_INTERPRET" if INTERPRETED else ""
        raise ValueError(f"{name} is on {tensor.device}: the Triton kernels{under} take {kind} tensors")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, the other arguments are on {device}")
    if tensor.dtype not in dtypes:
        accepted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} has dtype {str(tensor.dtype).removeprefix('torch.')}; accepted: {accepted}")
    if len(shape) != tensor.dim() or any(
        want is not None and want != have for want, have in zip(shape, tensor.shape, strict=True)
    ):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} has shape {list(tensor.shape)}; accepted: [{wanted}]")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}; accepted: contiguous")
    if not contiguous and tensor.numel() and tensor.stride(-1) != 1:
        raise ValueError(f"{name} has strides {tensor.stride()}; accepted: 1 in the last dimension")


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """One specialisation of a kernel that the engine can ask for: what `compile_report` compiles.

    An op's file lists its own in a function `kernel_specs() -> list[KernelSpec]`, and `compile_report.OP_FILES` lists
    the files.
    """

    op: str
    """The op's name."""
    variant: str
    """What tells this specialisation from the op's others; unique within the op."""
    kernel: Any
    """The jitted function."""
    arguments: Mapping[str, str]
    """Triton type of each argument that is not a constant: `*bf16`, `*i32`, `fp32`, `i32`. A launch aligns pointers to
    16 bytes; append `:16` to an integer that it passes as a multiple of 16."""
    constants: Mapping[str, Any]
    """The `constexpr` arguments, and those that are None or 1 at launch."""
    num_warps: int = 4
    hip_num_warps: int | None = None
    """On AMD, if others."""
    num_stages: int = 2
    maxnreg: int = MAX_REGISTERS
    """Of a thread on NVIDIA."""
    enable_fp_fusion: bool = True
    """False for kernels that are launched with `UNFUSED`."""
    shape: str
    """The shape that `bytes_moved` is for, in words."""
    bytes_moved: int
    """The bytes that one launch must read and write at that shape."""
    max_registers: int = 255
    """The budget of one thread, on every target."""
    max_shared: int = 64 * 1024
    """The budget of one block in bytes, on every target: by default the smallest limit of any, gfx942's."""
