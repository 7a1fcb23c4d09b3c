"""Rounds as graphs: which programs, how many in flight, what the host sees, and leaving early."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_device import WorkerExecutor

from draftgraph.graphs import DecodeState, HostExecutor, Program, Sequence, StateShape, Step, Switch, While
from draftgraph.graphs.driver.protocol import GraphError
from draftgraph.graphs.driver.recording import RecordingDriver
from draftgraph.graphs.recording_capture import recorded_executor
from draftgraph.graphs.round_executor import IN_FLIGHT, Published, take_apart

SHAPE = StateShape(slots=2, context=32, num_drafts=3, vocab_size=11, max_bucket=2, max_width=8)
BRANCHES = 3


def make_state() -> DecodeState:
    return DecodeState.allocate(SHAPE, dtype=torch.float32, device="cpu")


class World:
    """A loop that keeps what `RoundExecutor` asks of a program, and notes what it does in the state."""

    def __init__(self, rounds: int, *, switch: bool, pick: list[int] | None = None) -> None:
        self.state = s = make_state()
        self.broken = False
        self.pick = torch.tensor(pick or [0], dtype=torch.int32)
        s.limit[0] = rounds

        def choose(s: DecodeState) -> None:  # idempotent: from what is committed alone
            s.width_index.copy_(self.pick[s.length[0].long() % len(self.pick)])

        def branch(number: int) -> Step:
            def verify(s: DecodeState) -> None:
                s.accepted[0] = number + 1

            return Step(f"verify {number}", verify)

        def commit(s: DecodeState) -> None:
            if self.broken:
                raise RuntimeError("an illegal memory access was encountered")
            if not s.running:  # a round after the last one changes nothing
                return
            at = s.length[0].long()
            s.tokens[0, at] = s.accepted[0]
            s.length[0] += 1
            s.accepted[0] = 0
            s.running.copy_((s.length[:1] <= s.limit[:1]) & ~s.pause)
            s.published[0] += 1

        fixed = Step("verify", lambda s: s.accepted.fill_(7))
        middle = Switch(s.width_index, tuple(branch(b) for b in range(BRANCHES))) if switch else fixed
        body = Sequence(Step("budget", choose), Sequence(middle, Sequence()), Step("commit", commit))
        self.program = Program("loop", While(s.running, body), s)
        s.running.fill_(True)

    def outcome(self) -> list:
        s = self.state
        return [s.tokens[0].tolist(), int(s.length[0]), bool(s.running)]


def expected(rounds: int, **options) -> list:
    world = World(rounds, **options)
    for _ in HostExecutor().rounds(world.program):
        pass
    return world.outcome()


@given(
    rounds=st.integers(1, 12),
    pick=st.lists(st.integers(-1, BRANCHES), min_size=1, max_size=5),
    switch=st.booleans(),
    worker=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_the_same_rounds_as_on_the_host(rounds, pick, switch, worker):
    """An index out of range, above or below, runs no branch."""
    executor = WorkerExecutor("round") if worker else recorded_executor("round")
    world = World(rounds, switch=switch, pick=pick)
    looks = sum(1 for _ in executor.rounds(world.program))
    assert world.outcome() == expected(rounds, switch=switch, pick=pick)
    assert 1 <= looks <= rounds
    if not worker and switch:
        assert looks == rounds
    if worker:
        executor.close()


class Staged:
    """A loop of several switches: each adds what its branch is to a row of tokens; a round ends with a 9."""

    def __init__(self, rounds: int, picks: list[list[int]]) -> None:
        self.state = s = make_state()
        s.limit[0] = rounds
        self.indices = [torch.zeros(1, dtype=torch.int32) for _ in picks]

        def note(s: DecodeState, value: int) -> None:
            s.tokens[0, s.length[1].long()] = value
            s.length[1] += 1

        def choose(number: int, s: DecodeState) -> None:
            row = torch.tensor(picks[number], dtype=torch.int32)
            self.indices[number].copy_(row[s.length[0].long() % len(row)])

        def begin(s: DecodeState) -> None:  # may run again: a round starts where the last one ended
            s.length[1] = s.accepted[0]
            choose(0, s)

        def between(number: int, s: DecodeState) -> None:
            note(s, 7)
            choose(number, s)

        def end(s: DecodeState) -> None:
            if not s.running:
                return
            note(s, 9)
            s.accepted[0] = s.length[1]
            s.length[0] += 1
            s.running.copy_((s.length[:1] <= s.limit[:1]) & ~s.pause)

        nodes: list = [Step("begin", begin)]
        for number, index in enumerate(self.indices):
            branches = tuple(Step(f"{number}.{b}", partial(note, value=b)) for b in range(2))
            nodes.append(Switch(index, branches))
            if number + 1 < len(picks):
                nodes.append(Step(f"between {number}", partial(between, number + 1)))
        self.program = Program("staged", While(s.running, Sequence(*nodes, Step("end", end))), s)
        s.length[1] = 0
        s.running.fill_(True)

    def outcome(self) -> list:
        s = self.state
        return [s.tokens[0].tolist(), s.length.tolist(), s.accepted.tolist(), bool(s.running)]


@given(
    rounds=st.integers(1, 4),
    picks=st.lists(st.lists(st.integers(-1, 2), min_size=1, max_size=3), min_size=1, max_size=3),
    leave=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_bodies_of_several_switches(rounds, picks, leave):
    """Left between two rounds and entered again, it goes on as if nothing had been."""
    by_host, by_graph, executor = Staged(rounds, picks), Staged(rounds, picks), recorded_executor("round")
    HostExecutor().run(by_host.program)
    s = by_graph.state
    if leave:
        going = executor.rounds(by_graph.program)
        next(going)
        s.host.pause[0] = True
        going.close()
        s.host.pause[0] = False
        s.running.fill_(bool(s.length[0] <= rounds))
    executor.run(by_graph.program)
    assert by_graph.outcome() == by_host.outcome()


@pytest.mark.parametrize("switch", [False, True])
def test_two_fixed_rounds_are_in_flight_and_one_that_must_be_chosen(switch):
    executor = WorkerExecutor("round", seconds_per_launch=0.002)
    world = World(10, switch=switch)
    for _ in executor.rounds(world.program):
        pass
    executor.close()
    assert executor.driver.most_in_flight == (1 if switch else IN_FLIGHT)
    # With a switch: one launch of what comes before it. Without: at most one round after the last.
    assert executor.driver.launches in ((11,) if switch else (10, 11))
    assert world.outcome() == expected(10, switch=switch)


@pytest.mark.parametrize("switch", [False, True])
@pytest.mark.parametrize("worker", [False, True])
def test_leaving_early_waits_for_what_is_in_flight_and_entering_again_goes_on(switch, worker):
    executor = WorkerExecutor("round", seconds_per_launch=0.002) if worker else recorded_executor("round")
    world = World(12, switch=switch, pick=[0, 2, 1])
    for _ in range(3):
        rounds = executor.rounds(world.program)
        next(rounds)
        world.state.host.pause[0] = True
        rounds.close()
        if worker:
            length = int(world.state.length[0])
            time.sleep(0.01)
            assert int(world.state.length[0]) == length, "a round ran after the loop was left"
        world.state.host.pause[0] = False
        world.state.running.fill_(True)
    for _ in executor.rounds(world.program):
        pass
    assert world.outcome() == expected(12, switch=switch, pick=[0, 2, 1])
    if worker:
        executor.close()


def test_graphs_are_made_once_and_uploaded(monkeypatch):
    driver, made = RecordingDriver(), []
    instantiate = driver.instantiate
    monkeypatch.setattr(driver, "instantiate", lambda graph: made.append(instantiate(graph)) or made[-1])
    executor, world = recorded_executor("round", driver), World(4, switch=True)
    for _ in range(3):
        world.state.length[0] = 1
        world.state.running.fill_(True)
        assert len(list(executor.rounds(world.program))) == 4
    assert len(made) == 1 + BRANCHES + 1
    assert [executable.uploads for executable in made] == [1] * len(made)
    assert [step.name for step in executor.report.steps].count("loop budget") == 1


def test_steps_alone_are_one_graph():
    executor, state = recorded_executor("round"), make_state()
    program = Program("prefill", Sequence(*(Step(n, lambda s: s.limit[:1].add_(1)) for n in "abc")), state)
    executor.run(program)
    executor.run(program)
    assert state.limit[0] == 6
    assert executor.driver.launches == 2
    with pytest.raises(ValueError, match="program 'prefill' is not a loop: its root is a Sequence"):
        executor.rounds(program)


def test_run_goes_through_all_rounds():
    world = World(5, switch=True, pick=[1, 0])
    recorded_executor("round").run(world.program)
    assert world.outcome() == expected(5, switch=True, pick=[1, 0])


def nop(name: str) -> Step:
    return Step(name, lambda s: None)


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (lambda s: Sequence(nop("a"), While(s.running, nop("b"))), "a While inside its loop"),
        (lambda s: Switch(s.width_index, (Switch(s.width_index, (nop("a"),)),)), "control flow inside a branch"),
    ],
)
def test_what_is_not_supported_is_said_before_anything_is_captured(body, what):
    state = make_state()
    executor = recorded_executor("round")
    program = Program("odd", While(state.running, body(state)), state)
    with pytest.raises(GraphError, match=f"program 'odd' has {what}; the executor 'round' supports a While around"):
        executor.prepare(program)
    assert executor.report.steps == ()
    with pytest.raises(GraphError, match="a Switch as its root"):
        executor.run(Program("odd", Switch(state.width_index, (nop("a"),)), state))


def test_a_body_is_taken_apart_in_order():
    state = make_state()
    steps = {name: nop(name) for name in "abcdef"}
    switch = Switch(state.width_index, (Sequence(steps["c"], steps["d"]), Sequence()))
    body = Sequence(Sequence(steps["a"], steps["b"]), switch, Sequence(steps["e"], Sequence(steps["f"])))
    parts = take_apart(Program("p", While(state.running, body), state))
    assert parts.before == (steps["a"], steps["b"])
    (stage,) = parts.stages
    assert stage.switch is switch
    assert stage.branches == ((steps["c"], steps["d"]), ())
    assert stage.after == (steps["e"], steps["f"])
    twice = Sequence(steps["a"], switch, steps["e"], Sequence(switch))
    parts = take_apart(Program("p", While(state.running, twice), state))
    assert [(s.switch, s.after) for s in parts.stages] == [(switch, (steps["e"],)), (switch, ())]


def test_a_word_is_taken_apart_also_when_its_number_has_run_over():
    assert Published.parse(5 << 32 | 3 << 1 | 1) == Published(5, 3, True)
    assert Published.parse(-1) == Published(0xFFFFFFFF, 0x7FFFFFFF, True)


@pytest.mark.parametrize("switch", [False, True])
def test_round_numbers_may_run_over(switch):
    executor = recorded_executor("round")
    world = World(6, switch=switch)
    executor.prepare(world.program)
    loop = executor._prepared(world.program)
    near_end = 2**32 - 3
    loop.word.host[0] = (near_end << 32) - 2**64
    publish = next(n.kernel for n in loop.first.graph.nodes if n.kernel is not None)
    publish.count.fill_(near_end)
    for _ in executor.rounds(world.program):
        pass
    assert world.outcome() == expected(6, switch=switch)


@pytest.mark.parametrize("name", ["round", "loop"])
@pytest.mark.parametrize("worker", [False, True])
def test_a_failure_on_the_device_names_the_program_and_ends_the_wait(name, worker):
    executor = WorkerExecutor(name) if worker else recorded_executor(name)
    world = World(6, switch=True)
    executor.prepare(world.program)
    world.broken = True
    with pytest.raises(
        GraphError,
        match=r"program 'loop' failed in a graph: .*illegal memory access.*DRAFTGRAPH_TRACE_OPS=1.*executor='host'",
    ):
        for _ in executor.rounds(world.program):
            pass
    if worker:
        executor.close()


def test_a_round_that_publishes_nothing_is_an_error_not_a_wait():
    executor, world = recorded_executor("round"), World(3, switch=False)
    executor.prepare(world.program)
    executor.driver.launch = lambda executable, stream: None
    with pytest.raises(GraphError, match="program 'loop' ran on the device, but published nothing"):
        next(executor.rounds(world.program))
