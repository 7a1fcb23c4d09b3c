"""The library of captured steps, its report, its errors, and parking."""

from __future__ import annotations

import gc

import pytest
import torch

from draftgraph.graphs import DecodeState, Program, Sequence, StateShape, Step, Switch, While
from draftgraph.graphs.capture import CapturedStep, CaptureReport, StepLibrary, TorchCapture, capture_error
from draftgraph.graphs.capture_guard import CaptureError
from draftgraph.graphs.driver.protocol import NodeKind
from draftgraph.graphs.driver.recording import RecordingDriver
from draftgraph.graphs.parking import parked
from draftgraph.graphs.recording_capture import RecordingCapture

SHAPE = StateShape(slots=2, context=32, num_drafts=3, vocab_size=11, max_bucket=2, max_width=8)


@pytest.fixture
def state() -> DecodeState:
    return DecodeState.allocate(SHAPE, dtype=torch.float32, device="cpu")


class SizedCapture:
    """Notes what is warmed up and captured; a step's size is the number in its name."""

    trace = None

    def __init__(self) -> None:
        self.calls: list[str] = []

    def warm_up(self, name, steps, state) -> int:
        self.calls.append(f"warm {steps[0].name}")
        return int(steps[0].name)

    def capture(self, name, steps, state) -> CapturedStep:
        self.calls.append(f"capture {steps[0].name}")
        return CapturedStep(name=name, graph=object(), kinds=(NodeKind.KERNEL,), bytes=1, seconds=0.0, owner=None)


def nothing(name: str) -> Step:
    return Step(name, lambda s: None)


def test_all_is_warmed_up_first_and_the_largest_captured_first(state):
    capture, told = SizedCapture(), []
    library = StepLibrary(capture)
    first, second, third = nothing("1"), nothing("30"), nothing("2")
    body = Sequence(first, Switch(state.width_index, (second, third)))
    library.prepare(Program("p", While(state.running, body), state), told.append)
    assert capture.calls == ["warm 1", "warm 30", "warm 2", "capture 30", "capture 2", "capture 1"]
    assert told == ["1", "30", "2"]
    assert library[second].name == "p 30"


def test_a_step_is_captured_once_and_equal_names_are_told_apart(state):
    capture = SizedCapture()
    library = StepLibrary(capture)
    step, other = nothing("1"), nothing("1")
    library.prepare(Program("p", Sequence(step, step), state))
    library.prepare(Program("q", Sequence(step, other), state))
    library.prepare(Program("q", Sequence(step, other), state))
    assert capture.calls.count("capture 1") == 2
    assert library[step].graph is not library[other].graph
    assert [s.name for s in library.report.steps] == ["p 1", "q 1"]


def test_a_graph_keeps_its_step_alive(state):
    library = StepLibrary(SizedCapture())
    for number in range(50):  # a freed step's id would come up again
        step = nothing(str(number))
        library.prepare(Program("p", step, state))
        del step
        gc.collect()
    assert len(library.report.steps) == 50


def test_the_report_is_a_table_with_sums():
    def captured(name: str, nodes: int, size: int, seconds: float) -> CapturedStep:
        kinds = (NodeKind.KERNEL,) * nodes
        return CapturedStep(name=name, graph=None, kinds=kinds, bytes=size, seconds=seconds, owner=None)

    report = CaptureReport((captured("round[1] verify[4]", 120, 3_000_000, 0.5), captured("commit", 2, 0, 0.25)))
    assert report.seconds == 0.75
    assert report.table().splitlines() == [
        "graph               nodes   MB     s",
        "round[1] verify[4]    120  3.0  0.50",
        "commit                  2  0.0  0.25",
        "2 graphs              122  3.0  0.75",
    ]
    assert report.summary() == "2 graphs, 122 nodes, 3.0 MB, 0.75 s"
    assert report.kinds() == {NodeKind.KERNEL: 122}


def test_a_failure_names_the_step_the_first_error_and_the_line(state):
    def broken(s: DecodeState) -> None:
        try:
            raise RuntimeError("operation not permitted when stream is capturing")
        finally:
            raise ValueError("the capture was invalidated")  # as ending a failed capture raises

    library = StepLibrary(RecordingCapture(RecordingDriver()))
    with pytest.raises(CaptureError, match="operation not permitted") as caught:
        library.prepare(Program("round[2]", Sequence(nothing("fine"), Step("verify[8]", broken)), state))
    assert caught.value.step == "round[2] verify[8]"
    assert "test_capture.py" in str(caught.value)
    assert "invalidated" not in str(caught.value)


def test_a_refusal_is_passed_on_unchanged():
    refused = CaptureError("verify", "aten.item", "waits")
    assert capture_error("other", refused, "failed") is refused


# Parking


def test_parking_restores_every_tensor_even_after_a_failure(state):
    generator = torch.Generator().manual_seed(1)
    for tensor in state.tensors().values():
        tensor.copy_(torch.randint(0, 2, tensor.shape, generator=generator))
    before = {name: tensor.clone() for name, tensor in state.tensors().items()}

    def disturb() -> None:
        assert (state.slot_of_row == state.reserved_slot).all()
        assert state.prefill_slot[0] == state.reserved_slot
        assert state.prefill_range.tolist() == [0, 0]
        for name, tensor in state.tensors().items():
            if not hasattr(state.host, name):
                tensor.fill_(1).add_(1) if tensor.dtype != torch.bool else tensor.logical_not_()
        raise RuntimeError("a step fails")

    with pytest.raises(RuntimeError, match="fails"), parked(state):
        disturb()
    for name, tensor in state.tensors().items():
        assert torch.equal(tensor, before[name]), name


def test_parking_leaves_alone_what_the_host_shares(state):
    with parked(state):
        state.host.cancel[1] = True
        state.host.pause[0] = True
        state.host.taken[0] = 5
    assert state.cancel[1]
    assert state.pause[0]
    assert state.taken[0] == 5


# Capture with torch, against a stand-in for torch.cuda


class FakeCuda:
    """Notes the order of calls; what a step raises while capturing invalidates the capture."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.stream = "main"
        self.capturing = False
        cuda = self

        class Stream:
            def __init__(self, device=None) -> None:
                self.name = "side"

            def wait_stream(self, other) -> None:
                cuda.calls.append(f"{self.name} waits for {other.name}")

            def synchronize(self) -> None:
                cuda.calls.append("synchronize")

        class OnStream:
            def __init__(self, stream) -> None:
                self.new = stream.name

            def __enter__(self):
                self.old, cuda.stream = cuda.stream, self.new

            def __exit__(self, *exc):
                cuda.stream = self.old

        class Graph:
            def __init__(self, keep_graph: bool) -> None:
                assert keep_graph

            def capture_begin(self, pool, capture_error_mode) -> None:
                cuda.calls.append(f"begin on {cuda.stream} in {pool}, {capture_error_mode}")
                cuda.capturing = True

            def capture_end(self) -> None:
                cuda.calls.append("end")
                cuda.capturing = False
                if cuda.spoiled:
                    raise RuntimeError("capture was invalidated")

        self.spoiled = False
        main = Stream()
        main.name = "main"
        for name, value in {
            "Stream": Stream,
            "current_stream": lambda device=None: main,
            "stream": OnStream,
            "CUDAGraph": Graph,
            "graph_pool_handle": lambda: "the pool",
            "empty_cache": lambda: None,
            "memory_reserved": lambda device: 0,
            "memory_allocated": lambda device: 100,
            "max_memory_allocated": lambda device: 350,
            "reset_peak_memory_stats": lambda device: None,
        }.items():
            patch.setattr(torch.cuda, name, value)


class KindsDriver:
    def node_kinds(self, graph):
        return (NodeKind.KERNEL, NodeKind.MEMCPY)


def test_torch_capture_warms_up_and_captures_on_one_side_stream_and_pool(state, monkeypatch):
    cuda = FakeCuda(monkeypatch)
    capture = TorchCapture(KindsDriver(), torch.device("cuda"))
    step = Step("s", lambda s: cuda.calls.append(f"runs on {cuda.stream}, capturing {cuda.capturing}"))
    assert capture.warm_up("s", (step,), state) == 250
    captured = capture.capture("s", (step,), state)
    assert cuda.calls == [
        "side waits for main",
        "runs on side, capturing False",
        "runs on side, capturing False",
        "synchronize",
        "main waits for side",
        "begin on side in the pool, thread_local",
        "runs on side, capturing True",
        "end",
    ]
    assert captured.nodes == 2
    assert captured.owner is captured.graph


def test_a_failed_torch_capture_is_ended_and_explained(state, monkeypatch):
    cuda = FakeCuda(monkeypatch)

    def reads_the_host(s: DecodeState) -> None:
        cuda.spoiled = True
        raise RuntimeError("operation not permitted when stream is capturing")

    capture = TorchCapture(KindsDriver(), torch.device("cuda"))
    with pytest.raises(CaptureError, match="step 'commit' cannot be captured: RuntimeError is not possible in a graph"):
        capture.capture("commit", (Step("commit", reads_the_host),), state)
    assert cuda.calls[-1] == "end"
    assert cuda.stream == "main"
