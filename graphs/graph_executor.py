"""What the executors of captured graphs have in common: captured steps, programs without control flow, waiting."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from typing import Any

from .backoff import Backoff
from .capture import CaptureReport, Progress, StepCapture, StepLibrary
from .driver.protocol import Executable, Graph, GraphDriver, GraphError, Node
from .driver.stream import DeviceEvent, DeviceStream
from .program import Node as ProgramNode
from .program import Program, Sequence, Step

logger = logging.getLogger("draftgraph.graphs")


class GraphExecutor(ABC):
    """Captures a program's steps when it first runs, and launches graphs made of them."""

    name: str

    def __init__(
        self,
        driver: GraphDriver,
        capture: StepCapture,
        stream: DeviceStream,
        *,
        backoff: Callable[[], Backoff] = Backoff,
    ) -> None:
        """Builds nothing yet.

        Args:
            driver: makes and launches graphs.
            capture: makes graphs of steps, in the form that `driver` takes as children.
            stream: where to launch.
            backoff: how the host waits.
        """
        self.driver, self.stream = driver, stream
        self._backoff = backoff
        self._steps = StepLibrary(capture)
        # By identity; the program is kept with what was built, so that its id is not given to another.
        self._built: dict[int, tuple[Program, Any]] = {}

    @property
    def report(self) -> CaptureReport:
        """What was captured so far."""
        return self._steps.report

    def prepare(self, program: Program, progress: Progress | None = None) -> None:
        """Captures, instantiates and uploads all that a program needs. What is under way is not disturbed.

        Raises:
            CaptureError: a step cannot be captured.
            GraphError: the graph cannot be made, or this executor does not support the program.
        """
        self._prepared(program, progress)

    def _prepared(self, program: Program, progress: Progress | None = None) -> Any:
        if id(program) not in self._built:
            self._check(program)
            before = len(self.report.steps)
            self._steps.prepare(program, progress)
            new = CaptureReport(self.report.steps[before:])
            logger.info("captured for %s: %s", program.name, new.summary())
            self._built[id(program)] = (program, self._build(program))
        return self._built[id(program)][1]

    @abstractmethod
    def run(self, program: Program) -> None:
        """Runs the whole program. On a device that works by itself it may return before the program has ended."""

    @abstractmethod
    def rounds(self, program: Program) -> Generator[None, None, None]:
        """Runs a program whose root is a `While`; yields whenever the host may look at what was published."""

    @abstractmethod
    def _check(self, program: Program) -> None:
        """Raises `GraphError`, saying what is supported, for a program that this executor cannot run."""

    @abstractmethod
    def _build(self, program: Program) -> Any:
        """Makes what `run` and `rounds` launch, from captured steps."""

    def _graph_of(self, nodes: Iterable[Step]) -> Graph:
        """A new graph of steps in a row."""
        graph = self.driver.create_graph()
        self._append(graph, nodes, ())
        return graph

    def _append(self, graph: Graph, steps: Iterable[Step], after: tuple[Node, ...]) -> tuple[Node, ...]:
        """Adds steps in a row; returns what comes last."""
        for step in steps:
            try:
                after = (self.driver.add_child(graph, self._steps[step].graph, after),)
            except GraphError as error:
                raise GraphError(f"step {step.name!r} cannot become part of a graph: {error}") from error
        return after

    def _instantiate(self, program: Program, graph: Graph) -> Executable:
        try:
            executable = self.driver.instantiate(graph)
            self.driver.upload(executable, self.stream.raw)
        except GraphError as error:
            raise GraphError(f"program {program.name!r}: {error}") from error
        return executable

    def _launch(self, program: Program, executable: Executable) -> DeviceEvent:
        """Launches; returns an event behind it."""
        try:
            self.driver.launch(executable, self.stream.raw)
            return self.stream.record()
        except Exception as error:
            raise self._failed(program, error) from error

    def _passed(self, program: Program, event: DeviceEvent) -> bool:
        try:
            return event.query()
        except GraphError as error:
            raise self._failed(program, error) from error

    def _wait(self, program: Program, event: DeviceEvent) -> None:
        """Waits for an event without a synchronise, which would keep the processor and, in torch, other threads."""
        backoff = self._backoff()
        while not self._passed(program, event):
            backoff.pause()

    def _failed(self, program: Program, error: BaseException) -> GraphError:
        text = " ".join(str(error).split()) or type(error).__name__
        trace = self._steps.trace
        if trace is None:
            return GraphError(
                f"program {program.name!r} failed in a graph: {text}; with DRAFTGRAPH_TRACE_OPS=1 in the environment "
                "the next failure names its step and op; executor='host' runs one step at a time"
            )
        return GraphError(f"program {program.name!r} failed in a graph {trace.last()}: {text}")


def straight_steps(node: ProgramNode) -> tuple[Step, ...] | None:
    """The steps of a node that has no control flow, in order; None for one that has."""
    match node:
        case Step():
            return (node,)
        case Sequence():
            parts = [straight_steps(child) for child in node.nodes]
            if any(part is None for part in parts):
                return None
            return tuple(step for part in parts if part is not None for step in part)
        case _:
            return None
