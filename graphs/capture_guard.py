"""Refuses a step that a CUDA graph could not hold, by name, on a machine that need not have a GPU.

A step is run on fake CUDA tensors (no data, no driver) under a dispatch mode that sees every op. What would wait
for the device, copy to or from the host, or give a result whose shape depends on data is a `CaptureError`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .program import Program, Step
from .state import DecodeState

_SYNCS = {"_local_scalar_dense", "is_nonzero", "item", "equal", "is_pinned", "_pin_memory"}
_DATA_DEPENDENT = {
    "nonzero",
    "nonzero_static",
    "masked_select",
    "unique_dim",
    "_unique",
    "_unique2",
    "unique_consecutive",
    "bincount",
    "histc",
    "argwhere",
}
_COPIES = {"_to_copy", "copy_", "copy", "_copy_from", "to", "lift_fresh", "set_"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}


class CaptureError(RuntimeError):
    """A step is not capture-safe: names the step, the op and why."""

    def __init__(self, step: str, op: str, reason: str, where: str = "") -> None:
        super().__init__(f"step {step!r} cannot be captured: {op} {reason}{where}")
        self.step, self.op, self.reason = step, op, reason


class _RefusedError(Exception):
    def __init__(self, op: str, reason: str) -> None:
        super().__init__(f"{op} {reason}")
        self.op, self.reason = op, reason


class CaptureGuard(TorchDispatchMode):
    """Sees every op that runs inside it and refuses those that a graph could not hold."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Checks one op, then runs it."""
        kwargs = kwargs or {}
        name = func._schema.name.rsplit("::", 1)[-1]
        self._check(name, func, args, kwargs)
        return func(*args, **kwargs)

    def _check(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name in _SYNCS:
            raise _RefusedError(str(func), "reads a value on the host, which waits for the device")
        if name in _DATA_DEPENDENT:
            raise _RefusedError(str(func), "gives a result whose shape depends on data")
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            raise _RefusedError(str(func), "gives a result whose shape depends on data (pass output_size)")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if name in _INDEXING and any(t.dtype in (torch.bool, torch.uint8) for t in _indices(args)):
            raise _RefusedError(str(func), "indexes with a boolean mask, whose number of hits depends on data")
        if name in _COPIES:
            devices = {t.device.type for t in tensors}
            target = kwargs.get("device")
            if target is not None:
                devices.add(torch.device(target).type)
            if len(devices) > 1:
                raise _RefusedError(str(func), f"copies between {' and '.join(sorted(devices))}")


def _indices(args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The index tensors of an indexing op: its second argument."""
    return [leaf for leaf in tree_leaves(args[1]) if isinstance(leaf, torch.Tensor)] if len(args) > 1 else []


class _IndexingWithoutDriver(TorchFunctionMode):
    """Spells `x[...]`, `x[...] = y`, `~x` and `x.copy_(y)` as ops.

    The Python methods ask for a device guard first, which a torch build without CUDA does not have; the ops behind
    them need none.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.__getitem__:
            return _get(args[0], args[1])
        if func is torch.Tensor.__setitem__:
            return _set(args[0], args[1], args[2])
        if func is torch.Tensor.__invert__:
            return torch.ops.aten.bitwise_not.default(*args)
        if func is torch.Tensor.copy_:
            return torch.ops.aten.copy_.default(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _get(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    view, picks = _basic(tensor, index)
    return torch.ops.aten.index.Tensor(view, picks) if picks else view


def _set(tensor: torch.Tensor, index: Any, value: Any) -> None:
    view, picks = _basic(tensor, index)
    if not isinstance(value, torch.Tensor):
        value = torch.full((), value, dtype=tensor.dtype, device=tensor.device)
    if picks:
        torch.ops.aten.index_put_.default(view, picks, value.to(tensor.dtype))
    else:
        torch.ops.aten.copy_.default(view, value)


def _basic(tensor: torch.Tensor, index: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Applies the slices, integers, None and ... of an index; returns the view and the tensors left to pick with."""
    items = index if isinstance(index, tuple) else (index,)
    picks: list[torch.Tensor | None] = []
    dim = 0
    for number, item in enumerate(items):
        if item is Ellipsis:
            later = [i for i in items[number + 1 :] if i is not None]
            skipped = tensor.ndim - dim - sum(i.ndim if _is_mask(i) else 1 for i in later)
            dim += skipped
            picks += [None] * skipped
        elif item is None:
            tensor = tensor.unsqueeze(dim)
            dim += 1
            picks.append(None)
        elif isinstance(item, slice):
            start, stop, step = item.indices(tensor.shape[dim])
            tensor = torch.ops.aten.slice.Tensor(tensor, dim, start, max(start, stop), step)
            dim += 1
            picks.append(None)
        elif isinstance(item, torch.Tensor):
            picks.append(item)
            dim += item.ndim if _is_mask(item) else 1
        elif isinstance(item, int):
            tensor = torch.ops.aten.select.int(tensor, dim, item)
        else:
            raise TypeError(f"cannot index with {type(item).__name__}")
    return tensor, picks if any(p is not None for p in picks) else []


def _is_mask(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8)


@contextmanager
def fake_cuda() -> Iterator[torch.device]:
    """Inside, `torch.zeros(..., device=device)` and everything else gives CUDA tensors without data or driver."""
    with FakeTensorMode(allow_non_fake_inputs=False), _IndexingWithoutDriver():
        yield torch.device("cuda")


def check_step(step: Step, state: DecodeState) -> None:
    """Runs one step on a fake state; raises `CaptureError` unless a graph could hold it.

    Call it inside `fake_cuda`, with a state, and a model if the step has one, made inside it too.
    """
    check_function(step.name, lambda: step.fn(state))


def check_program(program: Program) -> int:
    """Checks every step of a program, every branch included; returns how many there were."""
    count = 0
    for step in program.steps():
        check_step(step, program.state)
        count += 1
    return count


def check_function(name: str, fn: Callable[[], object]) -> None:
    """Runs `fn` under the guard; whatever it raises becomes a `CaptureError` that names `name`."""
    try:
        with torch.inference_mode(), CaptureGuard():
            fn()
    except _RefusedError as refused:
        raise CaptureError(name, refused.op, refused.reason, innermost_line(refused)) from None
    except Exception as error:
        summary = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise CaptureError(name, type(error).__name__, f"was raised: {summary}", innermost_line(error)) from error


def innermost_line(error: BaseException) -> str:
    """Where in the sources an error came from, outside torch and this file, as a clause; may be empty."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "/torch/" not in f.filename and f.filename != __file__]
    return f" (at {own[-1].filename}:{own[-1].lineno})" if own else ""
