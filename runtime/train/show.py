"""What `draftgraph train` shows: how far it is, and what came of it."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bars
from rich.table import Table

from ...model_zoo.training.loop import Progress
from .answering_progress import duration
from .memory import gigabytes
from .result import TrainResult

_LINE_EVERY = 5.0
"""Seconds between lines where no bar can be drawn."""
_RECENT = 0.95
"""The last batches: each counts so much of the one after it."""

_NO_BETTER = (
    "the head is the one that training began with: none after it was better. Train on more text, longer, or at another "
    "--learning-rate"
)

Watch = Callable[[Progress], None]


class Speed:
    """What one process sees of a run: averages of the last batches, tokens per second, time left."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._first: Progress | None = None
        self._weight, self._loss, self._rates = 0.0, 0.0, list[float]()

    def describe(self, progress: Progress) -> str:
        """One line, after an update."""
        if self._first is None:
            self._first, self._began = progress, time.monotonic()
        self._rates = self._rates or [0.0] * len(progress.rates)
        self._weight = _RECENT * self._weight + 1.0
        share = 1.0 / self._weight
        self._loss += share * (progress.loss - self._loss)
        self._rates = [old + share * (new - old) for old, new in zip(self._rates, progress.rates, strict=True)]
        parts = [f"loss {self._loss:.3f}", f"accepted {_rates(self._rates)}"]
        if progress.held_out is not None:
            parts.append(f"held out {_rates(progress.held_out.rates)}, {progress.held_out.length:.2f} per round")
        seconds = time.monotonic() - self._began
        steps = progress.position.step - self._first.position.step
        if steps and seconds > 0.0:
            tokens = (progress.position.tokens - self._first.position.tokens) / seconds
            left = (progress.total_steps - progress.position.step) * seconds / steps
            parts.append(f"{tokens:.0f} tokens/s, {duration(left)} left")
        return ", ".join(parts)


@contextlib.contextmanager
def training_progress(console: Console | None = None, every: float = _LINE_EVERY) -> Iterator[Watch]:
    """Shows a run on standard error: a bar on a terminal, a line every few seconds elsewhere."""
    console = console or Console(stderr=True)
    speed = Speed()
    if not console.is_terminal:
        shown, waiting = -math.inf, ""

        def line(progress: Progress) -> None:
            nonlocal shown, waiting
            waiting = f"update {progress.position.step} of {progress.total_steps}: {speed.describe(progress)}"
            if time.monotonic() - shown >= every:
                console.print(waiting, highlight=False, soft_wrap=True)
                shown, waiting = time.monotonic(), ""

        yield line
        if waiting:
            console.print(waiting, highlight=False, soft_wrap=True)
        return
    columns = (TextColumn("training"), BarColumn(20), TaskProgressColumn(), TextColumn("{task.description}"))
    with Bars(*columns, console=console) as bars:
        task = bars.add_task("", total=None)

        def bar(progress: Progress) -> None:
            bars.update(
                task,
                completed=progress.position.step,
                total=progress.total_steps,
                description=speed.describe(progress),
            )

        yield bar


def show_result(result: TrainResult, console: Console) -> None:
    """The table at the end, where the head lies, and how to use it."""
    table = Table(title=f"{result.method} for {result.target}: acceptance on {result.held_out} held-out examples")
    for name in ("", "before", "after"):
        table.add_column(name, justify="right" if name else "left")
    for place, (before, after) in enumerate(zip(result.before.rates, result.after.rates, strict=True), start=1):
        what = "draft 1" if place == 1 else f"drafts 1 to {place}"
        table.add_row(what, f"{before:.1%}", f"{after:.1%}")
    table.add_row("tokens per round", f"{result.before.length:.2f}", f"{result.after.length:.2f}")
    console.print(table)
    device = "" if result.peak_device_bytes is None else f", {gigabytes(result.peak_device_bytes)} on the GPU"
    ended = {"finished": "", "no better": ", ended early: no better for the last evaluations"}.get(result.reason, "")
    for text in (
        f"{result.steps} updates on {result.tokens} tokens in {duration(result.seconds)}{ended}; peak memory "
        f"{gigabytes(result.peak_bytes)} resident{device}",
        *([_NO_BETTER] if result.after == result.before else []),
        f"the head lies in {result.out}, {gigabytes(result.exported_bytes)}; try it:",
        f"  draftgraph generate {result.target} 'Why is the sky blue?' --speculative-config '{_spec(result)}'",
    ):
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def _spec(result: TrainResult) -> str:
    return json.dumps(
        {"method": result.engine_method, "model": result.out, "num_speculative_tokens": len(result.after.rates)}
    )


def _rates(rates: Sequence[float]) -> str:
    return " ".join(f"{rate:.2f}" for rate in rates)
