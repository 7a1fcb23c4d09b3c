"""One launch for a whole loop, read while it runs."""

from __future__ import annotations

import threading

import pytest
import torch
from worker_device import WorkerExecutor

from draftgraph.graphs import DecodeState, HostExecutor, Program, Sequence, StateShape, Step, Switch, While
from draftgraph.graphs.capture_guard import CaptureError
from draftgraph.graphs.driver.protocol import ALLOWED_IN_BODY, GraphError, NodeKind
from draftgraph.graphs.driver.recording import RecordingDriver
from draftgraph.graphs.recording_capture import RecordingCapture, recorded_executor

SHAPE = StateShape(slots=2, context=32, num_drafts=3, vocab_size=11, max_bucket=2, max_width=8)


class Counting:
    """A loop that counts to its limit; each pass publishes, and may wait to be let through."""

    def __init__(self, limit: int) -> None:
        self.state = s = DecodeState.allocate(SHAPE, dtype=torch.float32, device="cpu")
        self.gate: threading.Semaphore | None = None
        self.passed = threading.Semaphore(0)
        s.length[0], s.limit[0] = 0, limit
        s.running.fill_(True)

        def count(s: DecodeState) -> None:
            if self.gate is not None:
                assert self.gate.acquire(timeout=10)
            s.length[0] += 1
            s.published[0] += 1
            s.running.copy_((s.length[:1] < s.limit[:1]) & ~s.pause)
            self.passed.release()

        self.program = Program("count", While(s.running, Sequence(Step("count", count))), s)


def test_one_launch_and_one_look_where_the_launch_is_over_at_once():
    executor, counting = recorded_executor("loop"), Counting(7)
    assert len(list(executor.rounds(counting.program))) == 1
    assert counting.state.length[0] == 7
    assert executor.driver.launches == 1
    counting.state.length[0], counting.state.running[0] = 0, True
    list(executor.rounds(counting.program))
    assert counting.state.length[0] == 7
    assert executor.driver.launches == 2


def test_the_host_looks_while_the_loop_runs_and_at_its_end():
    executor, counting = WorkerExecutor("loop"), Counting(5)
    executor.prepare(counting.program)
    counting.gate = threading.Semaphore(0)
    rounds = executor.rounds(counting.program)
    for number in range(1, 6):
        counting.gate.release()
        next(rounds)
        assert counting.state.length[0] == number
    assert list(rounds) in ([], [None])  # the end may have been seen with the last round or after it
    executor.close()
    assert executor.driver.launches == 1


def test_leaving_early_waits_for_the_end():
    executor, counting = WorkerExecutor("loop"), Counting(10**6)
    executor.prepare(counting.program)
    counting.gate = threading.Semaphore(0)
    rounds = executor.rounds(counting.program)
    counting.gate.release()
    next(rounds)
    counting.state.host.pause[0] = True
    threading.Timer(0.05, counting.gate.release).start()
    rounds.close()
    assert counting.state.length[0] == 2, "the round under way ends, and no other begins"
    executor.close()


def test_a_loop_that_never_began_needs_no_leaving():
    executor, counting = recorded_executor("loop"), Counting(3)
    executor.rounds(counting.program).close()
    assert executor.driver.launches == 0
    with pytest.raises(ValueError, match="program 's' is not a loop: its root is a Step"):
        executor.rounds(Program("s", Step("s", lambda s: None), counting.state))


@pytest.mark.parametrize("has_switch", [True, False])
def test_every_program_is_supported(has_switch):
    def build():
        state = DecodeState.allocate(SHAPE, dtype=torch.float32, device="cpu")
        inner = torch.zeros(1, dtype=torch.bool)

        def start(s: DecodeState) -> None:
            s.accepted[0] = 0
            inner.fill_(True)

        def tick(s: DecodeState) -> None:
            s.accepted[0] += 1
            s.tokens[0, 0] += 1
            s.width_index.copy_(s.accepted[:1] % 2)
            inner.copy_(s.accepted[:1] < 3)

        def tock(s: DecodeState) -> None:
            s.length[0] += 1
            s.running.copy_(s.length[:1] < 4)

        odd = Step("odd", lambda s: s.tokens[0, 1:2].add_(1))
        inner_loop = While(inner, Sequence(Step("tick", tick), Switch(state.width_index, (Sequence(), odd))))
        body = Sequence(Step("start", start), inner_loop, Step("tock", tock))
        state.running.fill_(True)
        return Program("nested", While(state.running, body), state)

    host, graph = build(), build()
    HostExecutor().run(host)
    executor = recorded_executor("loop", RecordingDriver(has_switch=has_switch))
    executor.run(graph)
    assert torch.equal(graph.state.tokens, host.state.tokens)
    assert graph.state.tokens[0, 0] == 9
    report = executor.structure(graph)
    assert set(report.nodes) <= ALLOWED_IN_BODY
    assert report.depth == 3
    assert executor.driver.launches == 1


def test_a_step_with_a_forbidden_node_is_refused_by_name():
    class HostNodes(RecordingCapture):
        def capture(self, name, steps, state):
            captured = super().capture(name, steps, state)
            graph = executor.driver.record_call(name, lambda: None, (NodeKind.HOST,))
            return type(captured)(**{**vars(captured), "graph": graph})

    counting = Counting(3)
    executor = recorded_executor("loop")
    executor._steps._capture = HostNodes(executor.driver)
    with pytest.raises(GraphError, match=r"program 'count': step 'count' holds a host node"):
        executor.prepare(counting.program)


def test_a_step_that_fails_to_warm_up_is_named():
    counting = Counting(3)
    counting.gate = threading.Semaphore(0)
    counting.gate.acquire = lambda timeout: False
    with pytest.raises(CaptureError, match=r"step 'count' cannot be captured: AssertionError failed before capture"):
        recorded_executor("loop").prepare(counting.program)
