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
_LISTED, _FIRST = 8, 4
"""The most rates that a line has, and the first that stay where there are more."""
_BAR, _WIDE = 20, 120
"""Columns of the bar, and of a terminal that has room for it."""

Watch = Callable[[Progress], None]


class Speed:
    """What one process sees of a run: averages of the last batches, tokens per second, time left."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._first: Progress | None = None
        self._weight, self._loss, self._rates = 0.0, 0.0, list[float]()

    def describe(self, progress: Progress, room: int | None = None) -> str:
        """One line, after an update.

        Args:
            progress: of the run.
            room: characters that there are; the least important is left out until it fits. None: as many as it takes.
        """
        if self._first is None:
            self._first, self._began = progress, time.monotonic()
        self._rates = self._rates or [0.0] * len(progress.rates)
        self._weight = _RECENT * self._weight + 1.0
        share = 1.0 / self._weight
        self._loss += share * (progress.loss - self._loss)
        self._rates = [old + share * (new - old) for old, new in zip(self._rates, progress.rates, strict=True)]
        most = _LISTED if room is None else _FIRST
        lines = [
            self._line(progress, accepted, held_out) for accepted, held_out in ((most, most), (1, 1), (0, 1), (0, 0))
        ]
        return next((line for line in lines if room is None or len(line) <= room), lines[-1])

    def _line(self, progress: Progress, accepted: int, held_out: int) -> str:
        """With so many of the rates that are accepted, and of those that are held out."""
        parts = [f"loss {self._loss:.3f}"]
        if accepted:
            parts.append(f"accepted {_rates(self._rates, accepted)}")
        if progress.held_out is not None:
            if held_out:
                parts.append(f"held out {_rates(progress.held_out.rates, held_out)}")
            parts.append(f"{progress.held_out.length:.2f} per round")
        seconds = time.monotonic() - self._began
        assert self._first is not None, "set before"
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
    before = (TextColumn("training"), BarColumn(_BAR)) if console.width >= _WIDE else ()
    with Bars(*before, TaskProgressColumn(), TextColumn("{task.description}"), console=console) as bars:
        task = bars.add_task("", total=None)
        taken = len("100% ") + (len("training ") + _BAR + 1 if before else 0)

        def bar(progress: Progress) -> None:
            bars.update(
                task,
                completed=progress.position.step,
                total=progress.total_steps,
                description=speed.describe(progress, console.width - taken),
            )

        yield bar


def show_result(result: TrainResult, console: Console) -> None:
    """The table at the end, where the head lies, and how to use it."""
    table = Table(title=f"{result.method} for {result.target}: acceptance on {result.held_out} held-out examples")
    for name in ("", "before", "after"):
        table.add_column(name, justify="right" if name else "left")
    rates_before = ["unknown"] * len(result.after.rates)
    length_before = "unknown"
    if result.before is not None:
        rates_before, length_before = [f"{rate:.1%}" for rate in result.before.rates], f"{result.before.length:.2f}"
    for place, (before, after) in enumerate(zip(rates_before, result.after.rates, strict=True), start=1):
        what = "draft 1" if place == 1 else f"drafts 1 to {place}"
        table.add_row(what, before, f"{after:.1%}")
    table.add_row("tokens per round", length_before, f"{result.after.length:.2f}")
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


def _rates(rates: Sequence[float], most: int) -> str:
    """At most so many; of more, the first and the last."""
    if len(rates) <= most:
        return _numbers(rates)
    return _numbers(rates[:1]) if most == 1 else f"{_numbers(rates[:_FIRST])} .. {rates[-1]:.2f}"


def _numbers(rates: Sequence[float]) -> str:
    return " ".join(f"{rate:.2f}" for rate in rates)
