"""How much memory a piece of work takes, and the most it took while it ran."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch


class MemoryMeter(Protocol):
    """Reads the memory that this process uses on a device, in bytes."""

    def in_use(self) -> int | None:
        """What is in use now; None where it cannot be read."""

    def reset_peak(self) -> bool:
        """Starts a new high-water mark at what is in use now; False where that cannot be done."""

    def peak(self) -> int | None:
        """The high-water mark; None where it cannot be read."""


class HostMemory:
    """Resident memory of the process, as Linux counts it in /proc: weights, caches and everything else."""

    _STATUS = Path("/proc/self/status")
    _CLEAR = Path("/proc/self/clear_refs")

    def __init__(self, device: torch.device) -> None:
        pass

    def in_use(self) -> int | None:
        """The resident set, VmRSS."""
        return self._read("VmRSS")

    def reset_peak(self) -> bool:
        """Writes 5 to clear_refs, which is what Linux offers for it (proc_pid_clear_refs(5))."""
        try:
            self._CLEAR.write_text("5")
        except OSError:
            return False
        return True

    def peak(self) -> int | None:
        """The largest resident set since the last reset, VmHWM."""
        return self._read("VmHWM")

    def _read(self, name: str) -> int | None:
        try:
            found = re.search(rf"^{name}:\s+(\d+) kB$", self._STATUS.read_text(), flags=re.MULTILINE)
        except OSError:
            return None
        return int(found[1]) * 1024 if found else None


class CudaMemory:
    """What PyTorch's allocator has given out on a GPU: tensors, the pools of captured graphs, workspaces."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def in_use(self) -> int | None:
        """`torch.cuda.memory_allocated`."""
        return torch.cuda.memory_allocated(self._device)

    def reset_peak(self) -> bool:
        """`torch.cuda.reset_peak_memory_stats`."""
        torch.cuda.reset_peak_memory_stats(self._device)
        return True

    def peak(self) -> int | None:
        """`torch.cuda.max_memory_allocated`."""
        return torch.cuda.max_memory_allocated(self._device)


_METERS: dict[str, type[HostMemory] | type[CudaMemory]] = {"cpu": HostMemory, "cuda": CudaMemory}


def memory_meter(device: torch.device | str) -> MemoryMeter:
    """The meter of a device; raises `ValueError` for a type of device that has none here."""
    device = torch.device(device)
    if device.type not in _METERS:
        raise ValueError(f"no memory meter for device {str(device)!r}; devices with one: {', '.join(_METERS)}")
    return _METERS[device.type](device)


class MemoryAccount:
    """The memory of one of several parties that take turns in one process.

    What is in use grows or shrinks while a party works, and that much is its own; other parties wait meanwhile.
    Memory that a library takes once, such as its code, goes to whoever uses it first.
    """

    def __init__(self, device: torch.device | str, held: int = 0) -> None:
        """Opens an account; `held` bytes are its own already."""
        self._meter = memory_meter(device)
        self._held: int | None = held
        self._peak: int | None = held

    @property
    def held(self) -> int | None:
        """Bytes in use that are this party's; None where the meter cannot tell."""
        return self._held

    @property
    def peak(self) -> int | None:
        """The most bytes it had while it worked, in `watch`; None where the meter cannot tell."""
        return self._peak

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Charges the account with what the block takes."""
        has_peak = self._meter.reset_peak()
        before = self._meter.in_use()
        try:
            yield
        finally:
            after, peak = self._meter.in_use(), self._meter.peak() if has_peak else None
            if self._held is None or before is None or after is None:
                self._held = self._peak = None
            else:
                if self._peak is not None:
                    # The kernel's high-water mark lags a little behind what it counts as in use.
                    rise = None if peak is None else max(peak, before, after) - before
                    self._peak = None if rise is None else max(self._peak, self._held + rise)
                self._held += after - before
