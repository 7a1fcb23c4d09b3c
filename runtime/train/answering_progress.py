"""Shows how far the target's answering is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from .regenerate import Answering, AnsweringCallback

_LINE_EVERY = 30.0
"""Seconds between lines where no bar can be drawn."""


def describe(state: Answering) -> str:
    """One line: prompts, tokens per second, time left."""
    left = "" if state.seconds_left is None else f", {duration(state.seconds_left)} left"
    return f"{state.done} of {state.total} prompts, {state.tokens_per_second:.0f} tokens/s{left}"


def duration(seconds: float) -> str:
    """As hours, minutes and seconds: 1:02:03, or 2:03."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextlib.contextmanager
def answering_progress(console: Console | None = None) -> Iterator[AnsweringCallback]:
    """Shows the answering on standard error, or on `console`."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        shown = -math.inf

        def line(state: Answering) -> None:
            nonlocal shown
            now = time.perf_counter()
            if now - shown >= _LINE_EVERY or state.done == state.total:
                shown = now
                console.print(f"answering: {describe(state)}", highlight=False)

        yield line
        return
    columns = (TextColumn("answering"), BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as bars:
        task = bars.add_task("", total=None)

        def bar(state: Answering) -> None:
            bars.update(task, completed=state.done, total=state.total, description=describe(state))

        yield bar
