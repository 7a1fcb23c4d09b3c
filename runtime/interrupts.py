"""Ctrl-C lands between rounds, never inside one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Holds back the first SIGINT until the block is done, so that no step is left half applied.

    A second one is let through at once, for a block that takes long (a compile). Does nothing outside the main
    thread, where Python delivers no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.getsignal(signal.SIGINT)
    if not callable(previous):  # ignored, or handled outside Python
        yield
        return
    pending: list[tuple[int, FrameType | None]] = []

    def hold(signum: int, frame: FrameType | None) -> Any:
        if pending:
            signal.signal(signal.SIGINT, previous)
            return previous(signum, frame)
        pending.append((signum, frame))
        return None

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if pending:
        previous(*pending[0])
