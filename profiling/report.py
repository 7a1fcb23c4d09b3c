"""The step table: measured times, beside what each step must at least move, as rows, JSON and a terminal table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from .device_rates import DeviceRates
from .floor import Efficiency, StepCost, efficiency
from .step_timer import StepTime, total_seconds

_MEANINGS = {
    "k. ms": "milliseconds in kernels",
    "moves": "the least bytes of a call",
    "limit": "its least time, of the time taken",
}


@dataclass(frozen=True, kw_only=True)
class ReportRow:
    """One step: its time, its part of the rounds or prefills, and its floor where it is known."""

    time: StepTime
    share: float
    """Of the time of all rounds, or of all prefills."""
    cost: StepCost | None = None
    """Of one call."""
    least_seconds: float | None = None
    """Of one call, on this device."""

    @property
    def bytes_per_second(self) -> float | None:
        """Of the bytes that had to be moved."""
        taken = self.time.seconds_per_call
        return self.cost.bytes / taken if self.cost is not None and taken > 0.0 else None

    @property
    def share_of_limit(self) -> float | None:
        """The least time over the time taken."""
        taken = self.time.seconds_per_call
        return self.least_seconds / taken if self.least_seconds is not None and taken > 0.0 else None

    def to_dict(self) -> dict[str, Any]:
        """In types that JSON has."""
        time = self.time
        return {
            "program": time.name.program,
            "step": time.name.step,
            "phase": time.phase,
            "bucket": time.bucket,
            "width": time.width,
            "calls": time.calls,
            "seconds": time.seconds,
            "share": self.share,
            "kernels": time.kernels,
            "kernel_seconds": time.kernel_seconds,
            "bytes_per_call": None if self.cost is None else self.cost.bytes,
            "operations_per_call": None if self.cost is None else self.cost.operations,
            "bytes_per_second": self.bytes_per_second,
            "share_of_limit": self.share_of_limit,
        }


def report_rows(
    table: Sequence[StepTime],
    cost_of: Callable[[StepTime], StepCost | None] | None = None,
    rates: DeviceRates | None = None,
) -> list[ReportRow]:
    """Joins measured times with floors; a pass has the sum of its steps' floors.

    Args:
        table: what a timer or a profile's parser gave.
        cost_of: the cost of one call of a step, or None where it is not known.
        rates: of the device; without them no share of the limit is known.
    """
    costs = {time.name: cost_of(time) for time in table if time.phase and cost_of is not None}
    rows = []
    for time in table:
        whole = total_seconds(table, rounds=time.name.is_round)
        share = time.seconds / whole if whole > 0.0 else 0.0
        steps = [time] if time.phase else [t for t in table if t.phase and t.name.program == time.name.program]
        known = [(step.calls / time.calls, cost) for step in steps if (cost := costs.get(step.name)) and time.calls]
        least = sum(calls * cost.seconds(rates) for calls, cost in known) if known and rates is not None else None
        total = sum((cost.times(calls) for calls, cost in known), StepCost()) if known else None
        rows.append(ReportRow(time=time, share=share, cost=total, least_seconds=least))
    return rows


def decode_efficiency(rows: Iterable[ReportRow], tokens: int, rates: DeviceRates) -> Efficiency | None:
    """The speed of all rounds together beside its limit; None when nothing was decoded."""
    rounds = [row for row in rows if row.time.name.is_round]
    seconds = total_seconds(row.time for row in rounds)
    if seconds <= 0.0:
        return None
    costs = [(row.time.calls, row.cost) for row in rounds if row.time.phase and row.cost is not None]
    return efficiency(tokens, seconds, costs, rates)


def step_table(rows: Sequence[ReportRow], title: str = "time by step") -> Table:
    """The rows for a terminal. Columns that no row has anything for are left out, and so are the steps of programs
    whose one step is the whole of them.
    """
    rows = [row for row in rows if row.time.name.step != row.time.name.program]
    columns: list[tuple[str, Callable[[ReportRow], str]]] = [
        ("step", lambda row: f" {row.time.name.step}" if row.time.phase else str(row.time.name)),
        ("calls", lambda row: f"{row.time.calls}"),
        ("ms/call", lambda row: f"{row.time.seconds_per_call * 1e3:.3f}"),
        ("ms", lambda row: f"{row.time.seconds * 1e3:.1f}"),
        ("share", lambda row: f"{row.share:.1%}"),
        ("kernels", lambda row: "" if row.time.kernels is None else f"{row.time.kernels}"),
        (
            "k. ms",
            lambda row: "" if row.time.kernel_seconds is None else f"{row.time.kernel_seconds * 1e3:.3f}",
        ),
        ("moves", lambda row: "" if row.cost is None else _bytes(row.cost.bytes)),
        ("GB/s", lambda row: "" if row.bytes_per_second is None else f"{row.bytes_per_second / 1e9:.2f}"),
        ("limit", lambda row: "" if row.share_of_limit is None else f"{row.share_of_limit:.1%}"),
    ]
    shown = [(name, cell) for name, cell in columns if any(cell(row) for row in rows)]
    explained = [f"{name}: {meaning}" for name, meaning in _MEANINGS.items() if name in dict(shown)]
    table = Table(title=title, caption="; ".join(explained) or None, box=SIMPLE_HEAD, show_edge=False)
    for name, _ in shown:
        table.add_column(name, justify="left" if name == "step" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(cell(row) for _, cell in shown), style=None if row.time.phase else "bold")
    return table


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"
