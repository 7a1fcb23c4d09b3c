"""Reads what Nsight Systems recorded into the step table: CSV of `nsys stats`, or its SQLite export."""

from __future__ import annotations

import csv
import sqlite3
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from .names import DOMAIN, StepName
from .step_timer import StepTime, in_order

# Values of NVTX_EVENTS.eventType in the SQLite export.
_PUSH_POP_RANGE = 59
_DOMAIN_CREATE = 75
# A global thread id holds the process in its upper bits, a global process id is the same without the thread.
_PROCESS_MASK = ~0xFFFFFF


@dataclass
class _Sums:
    """What is known of one range so far."""

    calls: int = 0
    nanoseconds: float = 0.0
    kernels: int | None = None
    kernel_nanoseconds: float | None = None

    def add_kernel(self, nanoseconds: float, count: int = 1) -> None:
        self.kernels = (self.kernels or 0) + count
        self.kernel_nanoseconds = (self.kernel_nanoseconds or 0.0) + nanoseconds

    def row(self, name: StepName) -> StepTime:
        return StepTime(
            name=name,
            calls=self.calls,
            seconds=self.nanoseconds / 1e9,
            kernels=self.kernels,
            kernel_seconds=None if self.kernel_nanoseconds is None else self.kernel_nanoseconds / 1e9,
        )


def read_stats(file: Path) -> list[StepTime]:
    """The step table of a recording.

    Args:
        file: an SQLite export (`nsys export --type sqlite`), told by its content, or else CSV as `nsys stats --format
            csv` prints it for the reports nvtx_sum, nvtx_pushpop_sum, nvtx_gpu_proj_sum and nvtx_kern_sum, one after
            another if there are several.

    Raises:
        ValueError: the file has no ranges of draftgraph, or is neither.
        OSError: it cannot be read.
    """
    with file.open("rb") as start:
        is_database = start.read(16) == b"SQLite format 3\x00"
    if is_database:
        rows = read_sqlite(file)
    else:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            lines = []
        rows = read_csv(lines)
        if not any("Range" in line or line.startswith("SKIPPED") for line in lines):  # not even a header
            raise ValueError(f"{file} is neither an SQLite export nor CSV of `nsys stats` on NVTX ranges")
    if not rows:
        raise ValueError(f"{file} has no NVTX ranges of the domain {DOMAIN!r}: was the run started with them?")
    return rows


def read_csv(lines: Iterable[str]) -> list[StepTime]:
    """The step table of what `nsys stats --format csv` printed; lines between the reports are passed over."""
    sums: dict[StepName, _Sums] = {}
    for record in _records(lines):
        name = _step_name(record.get("NVTX Range") or record.get("Range") or "")
        if name is None:
            continue
        entry = sums.setdefault(name, _Sums())
        if "Kern Inst" in record:  # nvtx_kern_sum: a line for each range and kernel
            entry.add_kernel(_number(record["Total Time (ns)"]), int(_number(record["Kern Inst"])))
            entry.calls = max(entry.calls, int(_number(record["NVTX Inst"])))
        elif "Range Instances" in record:  # nvtx_gpu_proj_sum
            entry.calls = int(_number(record["Range Instances"]))
            entry.nanoseconds = _number(record["Total Range Time (ns)"])
        else:  # nvtx_sum, nvtx_pushpop_sum
            entry.calls = int(_number(record["Instances"]))
            entry.nanoseconds = _number(record["Total Time (ns)"])
    return in_order(entry.row(name) for name, entry in sums.items())


def read_sqlite(file: Path) -> list[StepTime]:
    """The step table of an SQLite export: host time of each range, and the kernels launched inside it.

    A kernel belongs to the range in which its launch began, on the launching thread. The kernels of a CUDA graph all
    belong to the launch of the graph.
    """
    with closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)) as database:
        if "NVTX_EVENTS" not in _tables(database):
            return []
        ranges = sorted(_ranges(database))
        sums: dict[StepName, _Sums] = {}
        # A pass and a step of it overlap; two passes, or two steps, of a thread do not.
        lanes: dict[tuple[int, bool], list[tuple[int, int, StepName]]] = defaultdict(list)
        for start, end, thread, name in ranges:
            entry = sums.setdefault(name, _Sums())
            entry.calls += 1
            entry.nanoseconds += end - start
            lanes[thread, bool(name.step)].append((start, end, name))
        starts = {lane: [start for start, _, _ in found] for lane, found in lanes.items()}
        if {"CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"} <= _tables(database):
            for entry in sums.values():
                entry.kernels, entry.kernel_nanoseconds = 0, 0.0
            for launched, thread, nanoseconds in _launches(database):
                for lane in ((thread, False), (thread, True)):
                    index = bisect_right(starts.get(lane, []), launched) - 1
                    if index >= 0 and launched < lanes[lane][index][1]:
                        sums[lanes[lane][index][2]].add_kernel(nanoseconds)
    return in_order(entry.row(name) for name, entry in sums.items())


def _records(lines: Iterable[str]) -> Iterator[dict[str, str]]:
    header: list[str] | None = None
    for cells in csv.reader(lines):
        if "Range" in cells or "NVTX Range" in cells:
            header = cells
        elif header is not None and len(cells) == len(header):
            yield dict(zip(header, cells, strict=True))
        else:
            header = None


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _step_name(text: str) -> StepName | None:
    """The step that a range `domain:message` is of; None for other ranges."""
    domain, colon, message = text.partition(":")
    if not colon or domain != DOMAIN:
        return None
    return _parsed(message)


def _parsed(message: str) -> StepName | None:
    try:
        return StepName.parse(message)
    except ValueError:
        return None


def _tables(database: sqlite3.Connection) -> set[str]:
    return {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def _ranges(database: sqlite3.Connection) -> Iterator[tuple[int, int, int, StepName]]:
    """Start, end, thread and name of every pass and step."""
    text = "coalesce(event.text, string.value)"
    source = "NVTX_EVENTS AS event LEFT JOIN StringIds AS string ON event.textId = string.id"
    domains = {
        (domain, thread & _PROCESS_MASK)
        for domain, thread, name in database.execute(
            f"SELECT event.domainId, event.globalTid, {text} FROM {source} WHERE event.eventType = ?",
            (_DOMAIN_CREATE,),
        )
        if name == DOMAIN
    }
    for start, end, thread, domain, message in database.execute(
        f"SELECT event.start, event.end, event.globalTid, event.domainId, {text} FROM {source} "
        "WHERE event.eventType = ? AND event.end IS NOT NULL",
        (_PUSH_POP_RANGE,),
    ):
        name = _parsed(message or "") if (domain, thread & _PROCESS_MASK) in domains else None
        if name is not None:
            yield start, end, thread, name


def _launches(database: sqlite3.Connection) -> Iterator[tuple[int, int, int]]:
    """When each kernel was launched, by which thread, and how long it ran."""
    yield from database.execute(
        "SELECT call.start, call.globalTid, kernel.end - kernel.start "
        "FROM CUPTI_ACTIVITY_KIND_KERNEL AS kernel JOIN CUPTI_ACTIVITY_KIND_RUNTIME AS call "
        "ON call.correlationId = kernel.correlationId AND (call.globalTid & ?) = (kernel.globalPid & ?)",
        (_PROCESS_MASK, _PROCESS_MASK),
    )
