"""Marks, in memory that outlives a failed graph, how far the device came: to which step and which op.

A device that fails inside a graph does not say at which node, and afterwards answers nothing. So a traced graph stores
a number before each step and each op in a word that the host can read even then. Each mark is a small kernel in line
with the others, which is why tracing is off unless asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from .host_memory import shared

ObserveOps = Callable[[Callable[[str], None]], AbstractContextManager[None]]
"""Gives a context in which the given function is called with the name of every op before it runs."""


class StepTrace:
    """The marks of all that is captured for one executor."""

    def __init__(self, device: torch.device, observe_ops: ObserveOps) -> None:
        """Makes the word that both sides see.

        Args:
            device: where the graphs run.
            observe_ops: how to learn of ops.
        """
        self._word = shared((1,), torch.int32, device)
        self._observe_ops = observe_ops
        self._numbers: dict[tuple[str, int, str], int] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Inside, what the device is given marks itself as part of the step `name`."""
        self._mark(name, 0, "")
        ordinal = 0

        def reach(op: str) -> None:
            nonlocal ordinal
            ordinal += 1
            self._mark(name, ordinal, op)

        with self._observe_ops(reach):
            yield

    def last(self) -> str:
        """The last mark that the device left, in words."""
        number = int(self._word.host[0])
        places = list(self._numbers)
        if not 0 < number <= len(places):
            return "before its first step"
        step, ordinal, op = places[number - 1]
        return f"at op {op!r}, number {ordinal} of step {step!r}" if ordinal else f"at the start of step {step!r}"

    def _mark(self, step: str, ordinal: int, op: str) -> None:
        # A step that is captured, or on the CPU run, again finds its numbers again.
        number = self._numbers.setdefault((step, ordinal, op), len(self._numbers) + 1)
        self._word.device.fill_(number)
