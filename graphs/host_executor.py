"""Runs a program in plain Python: on any device, for debugging, and for timing one step at a time."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from .capture import CaptureReport
from .parking import parked
from .program import Node, Program, Sequence, Step, Switch, While


class ProgramObserver(Protocol):
    """Told what runs: a timer, or what marks ranges for a profiler."""

    def run(self, program: Program) -> AbstractContextManager[Any]:
        """Returns a context for one pass of `program`: an iteration of its loop, or all of it if it is none."""

    def step(self, program: Program, step: Step) -> AbstractContextManager[Any]:
        """Returns a context for one step of a pass."""


class HostExecutor:
    """Walks the program on the host, which reads `flag` and `index` itself."""

    name = "host"

    def __init__(self, observer: ProgramObserver | None = None) -> None:
        """Creates the executor; `observer` sees every pass and every step, and may be set at any time between two."""
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
        """Runs the whole program; for the observer it is one pass."""
        with torch.inference_mode():
            self._pass(program.root, program)

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
                self._pass(root.body, program)
            yield

    def _pass(self, node: Node, program: Program) -> None:
        if self.observer is None:
            self._run(node, program)
        else:
            with self.observer.run(program):
                self._run(node, program)

    def _run(self, node: Node, program: Program) -> None:
        match node:
            case Step():
                if self.observer is None:
                    node.fn(program.state)
                else:
                    with self.observer.step(program, node):
                        node.fn(program.state)
            case Sequence():
                for child in node.nodes:
                    self._run(child, program)
            case Switch():
                index = int(node.index)
                if 0 <= index < len(node.branches):
                    self._run(node.branches[index], program)
            case While():
                while bool(node.flag):
                    self._run(node.body, program)
