"""Steps become graphs: the interface, the library that keeps what is captured, and capture with torch."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .capture_guard import CaptureError, innermost_line
from .driver.protocol import Graph, GraphDriver, NodeKind
from .parking import parked
from .program import Program, Step
from .state import DecodeState
from .step_trace import StepTrace

Progress = Callable[[str], None]
"""Called with the name of what is done next."""

_WARM_UPS = 2
"""The first run of a step compiles and makes workspaces; the second shows how much memory a run takes."""


@dataclass(frozen=True, kw_only=True)
class CapturedStep:
    """Steps as one graph."""

    name: str
    graph: Graph
    """The driver's; a template for child nodes."""
    kinds: tuple[NodeKind, ...]
    """Of its nodes."""
    bytes: int
    """By how much its capture made the pool of memory grow."""
    seconds: float
    owner: Any
    """What must live as long as the graph does."""

    @property
    def nodes(self) -> int:
        """How many nodes it has."""
        return len(self.kinds)


class StepCapture(Protocol):
    """Makes graphs of steps."""

    trace: StepTrace | None
    """Where what is captured marks how far it came; None marks nothing."""

    def warm_up(self, name: str, steps: Sequence[Step], state: DecodeState) -> int:
        """Runs the steps until nothing is left to compile; returns the bytes that a run allocates at most.

        The caller has parked the state. Raises `CaptureError`, naming `name`, when a step fails.
        """

    def capture(self, name: str, steps: Sequence[Step], state: DecodeState) -> CapturedStep:
        """Captures steps that were warmed up. Raises `CaptureError`, naming `name`, when that is impossible."""


@dataclass(frozen=True)
class CaptureReport:
    """What was captured so far, in order."""

    steps: tuple[CapturedStep, ...] = ()

    @property
    def seconds(self) -> float:
        """What warming up and capturing took, all together."""
        return sum(step.seconds for step in self.steps)

    def table(self) -> str:
        """One line per graph: its name, nodes, megabytes and seconds; then the sums."""
        lines = [(s.name, str(s.nodes), f"{s.bytes / 1e6:.1f}", f"{s.seconds:.2f}") for s in self.steps]
        nodes, size = sum(s.nodes for s in self.steps), sum(s.bytes for s in self.steps)
        lines.append((f"{len(self.steps)} graphs", str(nodes), f"{size / 1e6:.1f}", f"{self.seconds:.2f}"))
        rows = [("graph", "nodes", "MB", "s"), *lines]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        return "\n".join(
            "  ".join([row[0].ljust(widths[0]), *(row[c].rjust(widths[c]) for c in (1, 2, 3))]) for row in rows
        )

    def summary(self) -> str:
        """The sums in words."""
        nodes, size = sum(s.nodes for s in self.steps), sum(s.bytes for s in self.steps)
        return f"{len(self.steps)} graphs, {nodes} nodes, {size / 1e6:.1f} MB, {self.seconds:.2f} s"

    def kinds(self) -> Counter[NodeKind]:
        """How many nodes of each kind there are."""
        return Counter(kind for step in self.steps for kind in step.kinds)


class StepLibrary:
    """The graphs of steps, each captured when a program that has it is first prepared, and kept."""

    def __init__(self, capture: StepCapture) -> None:
        self._capture = capture
        # By identity: two steps may have equal names, and functions compare by identity anyway. The step is kept
        # with its graph, so that its id is not given to another.
        self._graphs: dict[int, tuple[Step, CapturedStep]] = {}

    @property
    def trace(self) -> StepTrace | None:
        """The marks that the graphs leave, if they do."""
        return self._capture.trace

    @property
    def report(self) -> CaptureReport:
        """What was captured so far."""
        return CaptureReport(tuple(captured for _, captured in self._graphs.values()))

    def prepare(self, program: Program, progress: Progress | None = None) -> None:
        """Captures those steps of a program that are not captured yet, and disturbs nothing.

        All are warmed up first and then captured by falling size, so that the pool is made once, by the largest, and
        the others fit into it.

        Raises:
            CaptureError: a step cannot be captured; says which and why.
        """
        steps = {id(step): step for step in program.steps() if id(step) not in self._graphs}
        if not steps:
            return
        with parked(program.state):
            warmed = []
            for step in steps.values():
                if progress is not None:
                    progress(step.name)
                start = time.perf_counter()
                size = self._capture.warm_up(_full_name(program, step), (step,), program.state)
                warmed.append((size, time.perf_counter() - start, step))
            for _, seconds, step in sorted(warmed, key=lambda item: -item[0]):
                captured = self._capture.capture(_full_name(program, step), (step,), program.state)
                captured = CapturedStep(
                    name=captured.name,
                    graph=captured.graph,
                    kinds=captured.kinds,
                    bytes=captured.bytes,
                    seconds=captured.seconds + seconds,
                    owner=captured.owner,
                )
                self._graphs[id(step)] = (step, captured)

    def __getitem__(self, step: Step) -> CapturedStep:
        """The graph of a step of a prepared program."""
        return self._graphs[id(step)][1]


def _full_name(program: Program, step: Step) -> str:
    return step.name if step.name == program.name else f"{program.name} {step.name}"


class TorchCapture:
    """Captures with torch, on one side stream into one private pool of memory that all the graphs share.

    Sharing is safe because a step leaves nothing in the pool for another: all that outlives a step is in static
    tensors, made before. And no two graphs run at the same time.

    What would wait for the device is refused by CUDA during capture, and by `capture_guard.check_step` without any
    device. The guard does not run here: it sees ops one by one, which compiled regions no longer are.
    """

    def __init__(self, driver: GraphDriver, device: torch.device, trace: StepTrace | None = None) -> None:
        """Makes the stream and the pool.

        Args:
            driver: of the graphs.
            device: a CUDA device.
            trace: where graphs mark how far they came.
        """
        self._driver, self._device = driver, device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self.trace = trace

    def warm_up(self, name: str, steps: Sequence[Step], state: DecodeState) -> int:
        """Runs the steps twice on the side stream, whose workspaces the capture then finds made."""
        try:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream), torch.inference_mode():
                for _ in range(_WARM_UPS):
                    torch.cuda.reset_peak_memory_stats(self._device)
                    before = torch.cuda.memory_allocated(self._device)
                    run_steps(name, steps, state)
            self._stream.synchronize()  # so that what fails on the device is known to have failed in this step
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        except Exception as error:
            raise capture_error(name, error, "failed before capture") from error
        return torch.cuda.max_memory_allocated(self._device) - before

    def capture(self, name: str, steps: Sequence[Step], state: DecodeState) -> CapturedStep:
        """Captures the steps as one graph, which is not instantiated: it becomes a child of others."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        # What warm-ups left in torch's ordinary pool would lie idle, since captures allocate from their own.
        torch.cuda.empty_cache()
        start, reserved = time.perf_counter(), torch.cuda.memory_reserved(self._device)
        try:
            # Not torch.cuda.graph: it stays on the side stream when the end of a failed capture raises.
            with torch.cuda.stream(self._stream), torch.inference_mode():
                # Other threads may use the device meanwhile: only this one is held to what a capture allows.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    run_steps(name, steps, state, self.trace)
                finally:
                    graph.capture_end()
            kinds = self._driver.node_kinds(graph)
        except Exception as error:
            raise capture_error(name, error, "is not possible in a graph") from error
        return CapturedStep(
            name=name,
            graph=graph,
            kinds=kinds,
            bytes=max(0, torch.cuda.memory_reserved(self._device) - reserved),
            seconds=time.perf_counter() - start,
            owner=graph,
        )


def run_steps(name: str, steps: Iterable[Step], state: DecodeState, trace: StepTrace | None = None) -> None:
    """Runs steps in a row, which leave their marks in `trace` under `name`."""
    with nullcontext() if trace is None else trace.step(name):
        for step in steps:
            step.fn(state)


def capture_error(name: str, error: BaseException, what: str) -> CaptureError:
    """A `CaptureError` for whatever a step raised: names the step, the first error and the line it came from.

    A failed capture raises twice, once where the step did what it must not, and once when the capture is ended. The
    first says why.
    """
    first = error
    while first.__context__ is not None:
        first = first.__context__
    if isinstance(first, CaptureError):
        return first
    text = str(first).strip()
    summary = text.splitlines()[0] if text else type(first).__name__
    return CaptureError(name, type(first).__name__, f"{what}: {summary}", innermost_line(first))
