"""What executors ask of a stream besides launching graphs: whether what was launched has ended, without waiting."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from .protocol import GraphError


class DeviceEvent(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Whether the device has come past it; never waits. Raises `GraphError` when work before it failed."""


class DeviceStream(Protocol):
    """Where graphs are launched, in order."""

    @property
    def raw(self) -> Any:
        """What `GraphDriver.launch` takes."""

    def record(self) -> DeviceEvent:
        """An event behind all that was launched so far."""


class TorchEvent:
    """A CUDA event."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def query(self) -> bool:
        """Whether the device has come past it."""
        try:
            return self._event.query()
        except RuntimeError as error:
            raise GraphError(f"the device reports: {' '.join(str(error).split())}") from error


class TorchStream:
    """PyTorch's current stream, asked for anew each time, so graphs keep their place among torch's own kernels."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def raw(self) -> int:
        """The `CUstream` as an integer."""
        return torch.cuda.current_stream(self._device).cuda_stream

    def record(self) -> TorchEvent:
        """An event behind all that was launched so far."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return TorchEvent(event)


class _PastEvent:
    def query(self) -> bool:
        return True


class HostStream:
    """For drivers that run a graph before `launch` returns: every event has passed."""

    raw = None

    def record(self) -> DeviceEvent:
        """An event that has passed."""
        return _PastEvent()
