"""Runs a program in plain Python: on any device, for debugging, and for timing one step at a time."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext

import torch

from .capture import CaptureReport
from .parking import parked
from .program import Node, Program, Sequence, Step, Switch, While
from .state import DecodeState

StepObserver = Callable[[Step], AbstractContextManager[None]]
"""Given the step about to run, returns a context manager to run it in: a timer or a profiler range."""


class HostExecutor:
    """Walks the program on the host, which reads `flag` and `index` itself."""

    name = "host"

    def __init__(self, observer: StepObserver | None = None) -> None:
        """Creates the executor; `observer` wraps every step, for timing."""
        self.observer = observer

    @property
    def report(self) -> CaptureReport:
        """Nothing: this executor captures no graphs."""
        return CaptureReport()

    def prepare(self, program: Program, progress: Callable[[str], None] | None = None) -> None:
        """Runs every step once where nothing depends on it, so that what compiles does so now."""
        with parked(program.state):
            for step in program.steps():
                if progress is not None:
                    progress(step.name)
                step.fn(program.state)

    def run(self, program: Program) -> None:
        """Runs the whole program."""
        with torch.inference_mode():
            self._run(program.root, program.state)

    def rounds(self, program: Program) -> Generator[None, None, None]:
        """Runs a program whose root is a `While`, pausing after each iteration.

        The caller may read what the state publishes at each pause, and may close the iterator there to leave
        the loop early. Raises `ValueError` when the root is not a `While`.
        """
        root = program.root
        if not isinstance(root, While):
            raise ValueError(f"program {program.name!r} is not a loop: its root is a {type(root).__name__}")
        while bool(root.flag):
            with torch.inference_mode():
                self._run(root.body, program.state)
            yield

    def _run(self, node: Node, state: DecodeState) -> None:
        match node:
            case Step():
                with self.observer(node) if self.observer else nullcontext():
                    node.fn(state)
            case Sequence():
                for child in node.nodes:
                    self._run(child, state)
            case Switch():
                index = int(node.index)
                if 0 <= index < len(node.branches):
                    self._run(node.branches[index], state)
            case While():
                while bool(node.flag):
                    self._run(node.body, state)
