"""How the host waits for the device without a synchronise: looks often at first, then ever less."""

from __future__ import annotations

import time
from collections.abc import Callable

SPIN_SECONDS = 100e-6
"""For so long after the last news only the processor is yielded between looks."""
LEAST_SLEEP = 20e-6
MOST_SLEEP = 1e-3
SHARE = 1 / 32
"""A sleep is this share of the wait so far, so what a look comes too late by is a few per cent of the wait, and the
first token of a long prompt is not late by more than the thousandth token."""


class Backoff:
    """One wait. `pause` between two looks; `reset` when a look found something."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """Starts the wait.

        Args:
            clock: seconds, never going back.
            sleep: sleeps for so many seconds; 0 lets others run.
        """
        self._clock, self._sleep = clock, sleep
        self._start = clock()

    def reset(self) -> None:
        """Begins a new wait: the next looks are close together again."""
        self._start = self._clock()

    def pause(self) -> None:
        """Lets time pass: nothing but other threads' turns while the wait is young, then a share of its age."""
        waited = self._clock() - self._start
        self._sleep(0.0 if waited < SPIN_SECONDS else min(max(waited * SHARE, LEAST_SLEEP), MOST_SLEEP))
