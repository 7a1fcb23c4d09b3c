"""Time by step: how long each step of the rounds took, and the rounds themselves."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..graphs import Program, Step
from .clocks import Clock, clock_for
from .names import StepName
from .observer import Observer

# Marks are turned into seconds when they are asked for, or when so many wait: a mark on a GPU is an event.
_MOST_PENDING = 4096


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """What one step of one program, or its whole pass, took."""

    name: StepName
    calls: int
    seconds: float
    """Of all calls together."""
    kernels: int | None = None
    """Kernels launched, where the profiler counts them."""
    kernel_seconds: float | None = None
    """Time that these kernels ran, where the profiler knows."""

    @property
    def phase(self) -> str:
        """The step without its width; empty for a whole pass."""
        return self.name.phase

    @property
    def width(self) -> int | None:
        """Token positions of a verify or prefill."""
        return self.name.width

    @property
    def bucket(self) -> int | None:
        """Rows of the round; None for a prefill."""
        return self.name.bucket

    @property
    def seconds_per_call(self) -> float:
        """The mean; 0 without a call."""
        return self.seconds / self.calls if self.calls else 0.0


@dataclass(frozen=True)
class StepEvent:
    """One call of a step, or one pass, for a timeline."""

    name: StepName
    start: float
    """Seconds since the timer's first mark."""
    seconds: float


def phase_seconds(table: Iterable[StepTime], *, rounds: bool = True) -> dict[str, float]:
    """Seconds by phase, of rounds or else of prefills, in the order of the table. Whole passes are left out."""
    totals: dict[str, float] = {}
    for row in table:
        if row.phase and row.name.is_round == rounds:
            totals[row.phase] = totals.get(row.phase, 0.0) + row.seconds
    return totals


def total_seconds(table: Iterable[StepTime], *, rounds: bool = True) -> float:
    """Seconds of the whole passes, of rounds or else of prefills, which include what lies between their steps."""
    return sum(row.seconds for row in table if not row.phase and row.name.is_round == rounds)


def total_calls(table: Iterable[StepTime], *, rounds: bool = True) -> int:
    """How many passes there were, of rounds or else of prefills."""
    return sum(row.calls for row in table if not row.phase and row.name.is_round == rounds)


def in_order(rows: Iterable[StepTime]) -> list[StepTime]:
    """Sorts a table: by program, its pass before its steps, by phase, and the widths of a phase ascending.

    Programs and phases keep the order in which they come first.
    """
    found = list(rows)
    programs = list(dict.fromkeys(row.name.program for row in found))
    phases = ["", *dict.fromkeys(row.phase for row in found if row.phase)]
    return sorted(found, key=lambda row: (programs.index(row.name.program), phases.index(row.phase), row.width or 0))


@dataclass
class _Account:
    """The calls of one step, those not yet turned into seconds apart."""

    calls: int = 0
    seconds: float = 0.0
    pending: list[tuple[Any, Any]] = field(default_factory=list)


class _Span:
    """Marks where a step begins and ends; one per step, used again and again."""

    __slots__ = ("_account", "_mark", "_start", "_timer")

    def __init__(self, timer: StepTimer, account: _Account, clock: Clock) -> None:
        self._timer, self._account, self._mark = timer, account, clock.mark

    def __enter__(self) -> None:
        self._start = self._mark()

    def __exit__(self, *exc: object) -> None:
        pending = self._account.pending
        pending.append((self._start, self._mark()))
        if len(pending) >= _MOST_PENDING:
            self._timer.settle()


class StepTimer(Observer):
    """Adds up the time of every step and pass, by program: `Engine.observe` attaches it, `table` reads it.

    On the CPU the times are the host's. On a GPU they are the device's, between two events on the stream, and
    nothing waits until they are read.
    """

    def __init__(self, device: torch.device | str, *, keep_events: bool = False) -> None:
        """Creates a timer at zero.

        Args:
            device: that the steps run on.
            keep_events: keep every call for `events`, and not only sums.
        """
        self._clock = clock_for(device)
        self._accounts: dict[tuple[str, str], _Account] = {}
        self._spans: dict[tuple[str, str], _Span] = {}
        self._keep_events = keep_events
        self._events: list[StepEvent] = []
        self._origin: Any = None

    def run(self, program: Program) -> AbstractContextManager[Any]:
        """Times a pass."""
        return self._span((program.name, ""))

    def step(self, program: Program, step: Step) -> AbstractContextManager[Any]:
        """Times a step."""
        return self._span((program.name, step.name))

    def table(self) -> list[StepTime]:
        """Every pass and step that ran, in the order of `in_order`."""
        self.settle()
        return in_order(
            StepTime(name=StepName(*key), calls=account.calls, seconds=account.seconds)
            for key, account in self._accounts.items()
        )

    def events(self) -> list[StepEvent]:
        """Every call in order of its end; empty unless made with `keep_events=True`."""
        self.settle()
        return sorted(self._events, key=lambda event: (event.start + event.seconds, -event.start))

    def reset(self) -> None:
        """Forgets all times."""
        self._accounts.clear()
        self._spans.clear()
        self._events.clear()
        self._origin = None

    def settle(self) -> None:
        """Turns marks into seconds; on a GPU it waits for the last one."""
        for key, account in list(self._accounts.items()):
            # Taken as a whole: another thread's round may add to the list meanwhile.
            pending, account.pending = account.pending, []
            for start, end in pending:
                seconds = self._clock.seconds(start, end)
                account.calls += 1
                account.seconds += seconds
                if self._keep_events:
                    begin = self._clock.seconds(self._origin, start)
                    self._events.append(StepEvent(StepName(*key), begin, seconds))

    def _span(self, key: tuple[str, str]) -> _Span:
        span = self._spans.get(key)
        if span is None:
            if self._origin is None:
                self._origin = self._clock.mark()
            self._accounts[key] = _Account()
            span = self._spans[key] = _Span(self, self._accounts[key], self._clock)
        return span
