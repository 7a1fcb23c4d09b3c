"""Clocks of devices: the host's for what runs on it, events for what is queued on a stream."""

from __future__ import annotations

import platform
import time
from pathlib import Path
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Marks points in time on a device, and tells afterwards how far they lie apart."""

    def mark(self) -> Any:
        """Notes the point that the device's work has reached; waits for nothing."""

    def seconds(self, start: Any, end: Any) -> float:
        """From one mark to a later one; may wait until the device has passed it."""

    def device_name(self) -> str:
        """What the device is called: the model of the processor or of the GPU."""


class HostClock:
    """`time.perf_counter`: on the CPU, work is done when the call returns."""

    def __init__(self, device: torch.device) -> None:
        self.mark = time.perf_counter

    def seconds(self, start: float, end: float) -> float:
        """The difference."""
        return end - start

    def device_name(self) -> str:
        """The processor's model, from /proc/cpuinfo where there is one."""
        info = Path("/proc/cpuinfo")
        if info.is_file():
            for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        return platform.processor() or platform.machine()


class EventClock:
    """CUDA events on the current stream. Reading the time between two waits for the later one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """Records an event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Milliseconds between the events, as seconds."""
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def device_name(self) -> str:
        """As the driver calls the GPU."""
        return torch.cuda.get_device_name(self._device)


_CLOCKS: dict[str, type[HostClock] | type[EventClock]] = {"cpu": HostClock, "cuda": EventClock}


def clock_for(device: torch.device | str) -> Clock:
    """The clock of a device; raises `ValueError` for a type of device that has none here."""
    device = torch.device(device)
    if device.type not in _CLOCKS:
        raise ValueError(f"no clock for device {str(device)!r}; devices with one: {', '.join(_CLOCKS)}")
    return _CLOCKS[device.type](device)
