"""The step timer on programs whose times are known, and its clock."""

from __future__ import annotations

import pytest
import torch

from draftgraph.graphs import DecodeState, HostExecutor, Program, Sequence, StateShape, Step, Switch, While
from draftgraph.profiling import Observer, Observers, StepTimer, phase_seconds, step_timer, total_calls, total_seconds
from draftgraph.profiling.clocks import HostClock, clock_for
from draftgraph.profiling.names import StepName

SHAPE = StateShape(slots=2, context=32, num_drafts=3, vocab_size=11, max_bucket=2, max_width=8)


class Ticks:
    """A clock that moves only when a step says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def device_name(self) -> str:
        return "ticks"


@pytest.fixture
def ticks(monkeypatch) -> Ticks:
    clock = Ticks()
    monkeypatch.setattr(step_timer, "clock_for", lambda device: clock)
    return clock


@pytest.fixture
def state() -> DecodeState:
    return DecodeState.allocate(SHAPE, dtype=torch.float32, device="cpu")


def round_program(state: DecodeState, ticks: Ticks, rounds: int) -> Program:
    """propose takes 1, verify[4] 3 and verify[8] 5, taken in turns, commit 2."""
    left = [rounds]

    def takes(seconds: float):
        def run(s: DecodeState) -> None:
            ticks.now += seconds

        return run

    def commit(s: DecodeState) -> None:
        ticks.now += 2
        left[0] -= 1
        s.width_index.fill_(1 - int(s.width_index))
        s.running.fill_(left[0] > 0)

    state.running.fill_(True)
    body = Sequence(
        Step("propose", takes(1)),
        Switch(state.width_index, (Step("verify[4]", takes(3)), Step("verify[8]", takes(5)))),
        Step("commit", commit),
    )
    return Program("round[2]", While(state.running, body), state)


def test_steps_are_summed_by_name_and_rounds_beside_them(state, ticks):
    timer = StepTimer("cpu")
    executor = HostExecutor(timer)
    assert len(list(executor.rounds(round_program(state, ticks, 3)))) == 3
    executor.run(Program("prefill[64]", Step("prefill[64]", lambda s: setattr(ticks, "now", ticks.now + 7)), state))
    table = timer.table()
    assert [(str(row.name), row.calls, row.seconds) for row in table] == [
        ("round[2]", 3, 20.0),
        ("round[2] propose", 3, 3.0),
        ("round[2] verify[4]", 2, 6.0),
        ("round[2] verify[8]", 1, 5.0),
        ("round[2] commit", 3, 6.0),
        ("prefill[64]", 1, 7.0),
        ("prefill[64] prefill[64]", 1, 7.0),
    ]
    assert phase_seconds(table) == {"propose": 3.0, "verify": 11.0, "commit": 6.0}
    assert (total_seconds(table), total_calls(table)) == (20.0, 3)
    assert phase_seconds(table, rounds=False) == {"prefill": 7.0}
    assert total_seconds(table, rounds=False) == 7.0
    assert [(row.phase, row.bucket, row.width) for row in table] == [
        ("", 2, None),
        ("propose", 2, None),
        ("verify", 2, 4),
        ("verify", 2, 8),
        ("commit", 2, None),
        ("", None, 64),
        ("prefill", None, 64),
    ]
    assert table[2].seconds_per_call == 3.0
    timer.reset()
    assert timer.table() == []


def test_events_are_a_timeline_from_the_first_mark(state, ticks):
    ticks.now = 100.0
    timer = StepTimer("cpu", keep_events=True)
    list(HostExecutor(timer).rounds(round_program(state, ticks, 2)))
    assert [(str(e.name), e.start, e.seconds) for e in timer.events()] == [
        ("round[2] propose", 0.0, 1.0),
        ("round[2] verify[4]", 1.0, 3.0),
        ("round[2] commit", 4.0, 2.0),
        ("round[2]", 0.0, 6.0),
        ("round[2] propose", 6.0, 1.0),
        ("round[2] verify[8]", 7.0, 5.0),
        ("round[2] commit", 12.0, 2.0),
        ("round[2]", 6.0, 8.0),
    ]


def test_marks_are_settled_before_they_pile_up(state, ticks, monkeypatch):
    monkeypatch.setattr(step_timer, "_MOST_PENDING", 4)
    timer = StepTimer("cpu")
    list(HostExecutor(timer).rounds(round_program(state, ticks, 10)))
    assert max(len(account.pending) for account in timer._accounts.values()) < 4
    assert total_calls(timer.table()) == 10


def test_a_step_that_raises_is_timed_and_its_error_kept(state, ticks):
    def fail(s: DecodeState) -> None:
        ticks.now += 4
        raise RuntimeError("broken")

    timer = StepTimer("cpu")
    with pytest.raises(RuntimeError, match="broken"):
        HostExecutor(timer).run(Program("round[1]", Step("verify[4]", fail), state))
    assert [(row.calls, row.seconds) for row in timer.table()] == [(1, 4.0), (1, 4.0)]


def test_several_observers_see_the_same(state, ticks):
    first, second = StepTimer("cpu"), StepTimer("cpu")
    list(HostExecutor(Observers(first, Observer(), second)).rounds(round_program(state, ticks, 2)))
    assert first.table() == second.table()
    assert total_calls(first.table()) == 2


def test_the_host_clock_counts_seconds_and_knows_the_processor():
    clock = clock_for("cpu")
    assert isinstance(clock, HostClock)
    start = clock.mark()
    assert 0.0 <= clock.seconds(start, clock.mark()) < 5.0
    assert clock.device_name()


def test_the_gpu_clock_reads_events_and_waits_for_the_later_one(monkeypatch):
    log = []

    class Event:
        made = 0

        def __init__(self, enable_timing):
            assert enable_timing
            Event.made += 1
            self.number = Event.made

        def record(self):
            log.append(f"record {self.number}")

        def synchronize(self):
            log.append(f"wait {self.number}")

        def elapsed_time(self, end):
            return 2.5  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = clock_for("cuda")
    start, end = clock.mark(), clock.mark()
    assert log == ["record 1", "record 2"]
    assert clock.seconds(start, end) == 2.5e-3
    assert log[2:] == ["wait 2"]


def test_a_device_without_a_clock_is_refused():
    with pytest.raises(ValueError, match="no clock for device 'meta'; devices with one: cpu, cuda"):
        StepTimer("meta")


@pytest.mark.parametrize(
    ("text", "phase", "bucket", "width", "is_round"),
    [
        ("round[4] verify[16]", "verify", 4, 16, True),
        ("round[4] accept", "accept", 4, None, True),
        ("round[4]", "", 4, None, True),
        ("prefill[64]", "", None, 64, False),
        ("prefill[64] prefill[64]", "prefill", None, 64, False),
    ],
)
def test_names_are_read_back(text, phase, bucket, width, is_round):
    name = StepName.parse(text)
    assert str(name) == text
    assert (name.phase, name.bucket, name.width, name.is_round) == (phase, bucket, width, is_round)


@pytest.mark.parametrize("text", ["aten::mm x y", "steady", "request 3, 12 prompt tokens", "round[1] a b", "round[x]"])
def test_other_texts_are_no_names(text):
    with pytest.raises(ValueError, match="names no pass or step"):
        StepName.parse(text)
