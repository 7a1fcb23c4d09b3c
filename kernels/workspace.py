"""Workspaces: what one launch of an op leaves to the next, in buffers that the caller owns.

An op's launches follow each other on one stream, and a buffer is dead when its op ends. So every call and every
captured graph of an engine may use the same memory, and two engines, which may run at the same time on two streams,
may not. The buffers therefore belong to a `WorkspacePool`: an engine has one, and its steps run inside it.
"""

from __future__ import annotations

from contextvars import ContextVar
from types import TracebackType

import torch

# A tuple, of which the last is current, rather than one pool: pools may be nested, and each thread has its own.
_entered: ContextVar[tuple[WorkspacePool, ...]] = ContextVar("draftgraph_workspace_pools", default=())


class WorkspacePool:
    """Static buffers for the ops that run inside `with pool:`, made at first use and kept.

    There is one buffer per (name, device, type, size rounded up to a power of two), so that all calls of that size use
    the same memory. Work that may overlap on the device needs pools of its own. A pool may be entered again inside
    itself, and by several threads; which pool is current is a matter of each thread.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.device, torch.dtype, int], torch.Tensor] = {}

    def __enter__(self) -> WorkspacePool:
        _entered.set((*_entered.get(), self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _entered.set(_entered.get()[:-1])

    @property
    def num_bytes(self) -> int:
        """The memory that the pool holds."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())

    def buffer(self, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer of at least `numel` elements whose contents are undefined; see `workspace` for the errors."""
        size = 1 << max(numel - 1, 0).bit_length()
        key = (name, device, dtype, size)
        buffer = self._buffers.get(key)
        if buffer is None:
            if device.type == "cuda" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"the workspace {name} of {numel} elements would be made during a capture: run the step once before"
                )
            buffer = self._buffers[key] = torch.empty(size, dtype=dtype, device=device)
        return buffer


def workspace(name: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A buffer of the current pool, with at least `numel` elements whose contents are undefined.

    Args:
        name: the op's, and what it is for after a dot if the op has several.
        numel: the least number of elements.
        dtype: of the elements.
        device: where the op's arguments are.

    Raises:
        RuntimeError: no pool is current; or the buffer would have to be made during a capture, whose memory is not
            there to stay. Both name the workspace and say what to do.
    """
    entered = _entered.get()
    if not entered:
        raise RuntimeError(
            f"{name.partition('.')[0]} needs a workspace and no pool is current: call it inside `with WorkspacePool():`"
        )
    return entered[-1].buffer(name, numel, dtype, device)
