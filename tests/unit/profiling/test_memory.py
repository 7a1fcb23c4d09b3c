import subprocess
import sys

import pytest

from draftgraph.profiling.memory import MemoryAccount, memory_meter

SCRIPT = """
import torch
from draftgraph.profiling.memory import memory_meter

megabyte = 1_000_000
meter = memory_meter("cpu")
before = meter.in_use()
if before is None or not meter.reset_peak():
    raise SystemExit(77)
held = torch.ones(40 * megabyte, dtype=torch.uint8)
during = meter.in_use()
assert during - before >= 38 * megabyte, (before, during)
del held
assert meter.in_use() <= during - 38 * megabyte, (during, meter.in_use())
assert meter.peak() >= during - 2 * megabyte
meter.reset_peak()
assert meter.peak() <= during - 30 * megabyte
"""


def test_the_host_meter_sees_what_is_allocated_and_what_was():
    """In a process of its own, which has no freed memory to take the tensor from."""
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    if run.returncode == 77:
        pytest.skip("this system does not tell the resident memory of a process")
    assert run.returncode == 0, run.stderr


def test_devices_without_a_meter_are_refused():
    with pytest.raises(ValueError, match="no memory meter for device 'meta'; devices with one: cpu, cuda"):
        memory_meter("meta")


class Meter:
    """Reads what it was told to."""

    def __init__(self, use, peaks, resets=True):
        self.use, self.peaks, self.resets = list(use), list(peaks), resets

    def in_use(self):
        return self.use.pop(0)

    def peak(self):
        return self.peaks.pop(0)

    def reset_peak(self):
        return self.resets


def account(meter, held=0):
    made = MemoryAccount("cpu", held)
    made._meter = meter
    return made


def test_an_account_is_charged_with_the_growth_of_its_own_turns():
    mine = account(Meter([1000, 1500, 5000, 4800], [1900, 5600]))
    with mine.watch():
        pass
    assert (mine.held, mine.peak) == (500, 900)
    # Meanwhile another party grew by 3500: that is not this one's.
    with mine.watch():
        pass
    assert (mine.held, mine.peak) == (300, 1100)


def test_an_account_that_begins_with_something_and_an_interrupt():
    mine = account(Meter([100, 150], [170]), held=40)
    with pytest.raises(KeyboardInterrupt), mine.watch():
        raise KeyboardInterrupt
    assert (mine.held, mine.peak) == (90, 110)


def test_what_cannot_be_read_is_none_and_not_zero():
    mine = account(Meter([None, None], [None]))
    with mine.watch():
        pass
    assert (mine.held, mine.peak) == (None, None)
    without_peak = account(Meter([10, 30], [99], resets=False))
    with without_peak.watch():
        pass
    assert (without_peak.held, without_peak.peak) == (20, None)
