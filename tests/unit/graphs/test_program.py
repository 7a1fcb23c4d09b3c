"""The algebra itself, and the host executor against plain Python."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from draftgraph.graphs import DecodeState, HostExecutor, Program, Sequence, StateShape, Step, Switch, While

SHAPE = StateShape(slots=2, context=32, num_drafts=3, vocab_size=11, max_bucket=2, max_width=8)


@pytest.fixture
def state() -> DecodeState:
    return DecodeState.allocate(SHAPE, dtype=torch.float32, device="cpu")


def logging_step(log: list[str], name: str, action=lambda s: None) -> Step:
    def run(s: DecodeState) -> None:
        log.append(name)
        action(s)

    return Step(name, run)


def test_sequence_runs_in_order(state):
    log: list[str] = []
    program = Program("p", Sequence(*(logging_step(log, n) for n in "abc")), state)
    HostExecutor().run(program)
    assert log == ["a", "b", "c"]
    assert [s.name for s in program.steps()] == ["a", "b", "c"]


@pytest.mark.parametrize(("index", "expected"), [(0, ["a"]), (1, ["b"]), (2, []), (-1, [])])
def test_switch_runs_the_branch_of_its_index_or_none(state, index, expected):
    log: list[str] = []
    state.width_index.fill_(index)
    HostExecutor().run(Program("p", Switch(state.width_index, (logging_step(log, "a"), logging_step(log, "b"))), state))
    assert log == expected


def test_while_tests_its_flag_before_each_pass(state):
    log: list[str] = []

    def count(s: DecodeState) -> None:
        s.base[0] += 1
        s.running.copy_(s.base[:1] < 3)

    program = Program("p", While(state.running, logging_step(log, "body", count)), state)
    HostExecutor().run(program)
    assert log == []
    state.running.fill_(True)
    HostExecutor().run(program)
    assert log == ["body"] * 3


def test_rounds_pauses_after_each_pass_and_can_be_closed(state):
    log: list[str] = []
    state.running.fill_(True)
    program = Program("p", While(state.running, logging_step(log, "body")), state)
    rounds = HostExecutor().rounds(program)
    next(rounds)
    next(rounds)
    assert len(log) == 2
    rounds.close()
    state.running.fill_(False)
    assert list(HostExecutor().rounds(program)) == []


def test_rounds_wants_a_loop(state):
    with pytest.raises(ValueError, match="'p' is not a loop: its root is a Step"):
        next(HostExecutor().rounds(Program("p", Step("s", lambda s: None), state)))


class Recorder:
    """An observer that notes what begins and ends."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    @contextmanager
    def run(self, program: Program):
        self.seen.append(f"<{program.name}")
        yield
        self.seen.append(f"{program.name}>")

    @contextmanager
    def step(self, program: Program, step: Step):
        self.seen.append(f"<{step.name}")
        yield
        self.seen.append(f"{step.name}>")


def test_an_observer_wraps_the_pass_and_every_step(state):
    recorder = Recorder()
    program = Program("p", Sequence(Step("a", lambda s: None), Step("b", lambda s: None)), state)
    HostExecutor(recorder).run(program)
    assert recorder.seen == ["<p", "<a", "a>", "<b", "b>", "p>"]


def test_an_observer_sees_each_round_of_a_loop_by_itself(state):
    recorder = Recorder()
    state.running.fill_(True)
    rounds = HostExecutor(recorder).rounds(Program("p", While(state.running, Step("a", lambda s: None)), state))
    for _ in range(2):
        next(rounds)
        assert recorder.seen == ["<p", "<a", "a>", "p>"]
        recorder.seen.clear()


def test_flags_and_indices_must_be_single_device_values(state):
    with pytest.raises(ValueError, match=r"While flag must be a tensor of one torch.bool, got torch.bool \[3\]"):
        While(state.finished, Sequence())
    with pytest.raises(ValueError, match=r"Switch index must be a tensor of one torch\.int32"):
        Switch(state.running, (Sequence(),))
    with pytest.raises(ValueError, match="at least one branch"):
        Switch(state.width_index, ())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": 0}, "slots must be at least 1, got 0"),
        ({"num_drafts": -1}, "num_drafts must be at least 0, got -1"),
        ({"max_bucket": 4}, r"max_bucket \(4\) must not exceed slots \(2\)"),
    ],
)
def test_state_shape_is_checked(change, message):
    import dataclasses

    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SHAPE, **change)


def test_a_new_state_has_no_live_row(state):
    assert state.finished.all()
    assert (state.slot_of_row == state.reserved_slot).all()
    assert set(state.tensors()) == {f for f in state.__dataclass_fields__ if f not in ("shape", "host")}
