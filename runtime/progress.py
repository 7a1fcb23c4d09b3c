"""Progress of long work: one callable that the work calls, and a bar on the terminal that shows it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

ProgressCallback = Callable[[int, int, str], None]
"""Called as (done, total, what) with `what` naming the phase; the units are the phase's own."""


@contextlib.contextmanager
def terminal_progress() -> Iterator[ProgressCallback]:
    """A bar per phase on standard error; where that is no terminal, one line per phase."""
    console = Console(stderr=True)
    if not console.is_terminal:
        seen: set[str] = set()

        def line(done: int, total: int, what: str) -> None:
            if what not in seen:
                seen.add(what)
                console.print(what, highlight=False)

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def bar(done: int, total: int, what: str) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield bar
