"""Which step and op a failed graph had reached."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from worker_device import WorkerExecutor

from draftgraph.graphs import DecodeState, Program, Sequence, StateShape, Step, While
from draftgraph.graphs.driver.protocol import GraphError
from draftgraph.graphs.recording_capture import recorded_executor
from draftgraph.graphs.step_trace import StepTrace

SHAPE = StateShape(slots=2, context=32, num_drafts=3, vocab_size=11, max_bucket=2, max_width=8)
CPU = torch.device("cpu")


class Ops:
    """Ops of a toy step, which are observed as those of kernels/ are."""

    def __init__(self) -> None:
        self._observer = None
        self.broken = ""

    @contextmanager
    def observe(self, observer):
        self._observer = observer
        yield
        self._observer = None

    def __call__(self, name: str) -> None:
        if self._observer is not None:
            self._observer(name)
        if name == self.broken:
            raise RuntimeError("an illegal memory access was encountered")


def loop(ops: Ops) -> Program:
    state = DecodeState.allocate(SHAPE, dtype=torch.float32, device="cpu")
    state.running.fill_(True)

    def verify(s: DecodeState) -> None:
        ops("embed")
        ops("attention")
        ops("attention")

    def commit(s: DecodeState) -> None:
        s.length[0] += 1
        s.running.copy_(s.length[:1] < 3)
        if s.length[0] == 2:
            ops("append")

    return Program("loop", While(state.running, Sequence(Step("verify", verify), Step("commit", commit))), state)


@pytest.mark.parametrize("worker", [False, True])
@pytest.mark.parametrize("name", ["round", "loop"])
@pytest.mark.parametrize(
    ("broken", "where"),
    [
        ("attention", "at op 'attention', number 2 of step 'loop verify'"),
        ("append", "at op 'append', number 1 of step 'loop commit'"),
    ],
)
def test_a_traced_graph_that_fails_names_its_step_and_op(name, worker, broken, where):
    ops = Ops()
    trace = StepTrace(CPU, ops.observe)
    executor = WorkerExecutor(name, trace=trace) if worker else recorded_executor(name, trace=trace)
    program = loop(ops)
    executor.prepare(program)
    program.state.length.zero_()
    program.state.running.fill_(True)
    ops.broken = broken
    with pytest.raises(GraphError, match=f"program 'loop' failed in a graph {where}: .*illegal memory access"):
        for _ in executor.rounds(program):
            pass
    if worker:
        executor.close()


def test_marks_start_before_the_first_step_and_name_the_start_of_a_step():
    ops = Ops()
    trace = StepTrace(CPU, ops.observe)
    assert trace.last() == "before its first step"
    with trace.step("verify"):
        assert trace.last() == "at the start of step 'verify'"
        ops("attention")
    assert trace.last() == "at op 'attention', number 1 of step 'verify'"
    with trace.step("verify"):
        assert trace.last() == "at the start of step 'verify'"


OP = """
import torch
from draftgraph.graphs.step_trace import StepTrace
from draftgraph.kernels.embed_tokens import embed_tokens
from draftgraph.kernels.op_observer import observing_ops

trace = StepTrace(torch.device("cpu"), observing_ops)
with trace.step("embed"):
    embed_tokens(torch.zeros(1, dtype=torch.int32), torch.ones(4, 8), 1.0)
print(trace.last())
"""


def test_with_the_variable_set_every_op_of_the_package_leaves_a_mark():
    done = subprocess.run(
        [sys.executable, "-c", OP],
        capture_output=True,
        text=True,
        env={**os.environ, "DRAFTGRAPH_TRACE_OPS": "1"},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "at op 'embed_tokens', number 1 of step 'embed'"
