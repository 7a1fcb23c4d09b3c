"""The arithmetic of a bench: quantiles, waits, acceptance, rates. Nothing here measures anything."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from ..outputs import RequestMetrics

Bursts = Sequence[tuple[float, int]]
"""(when, how many tokens), in order."""


def quantile(values: Iterable[float], share: float) -> float | None:
    """The value below which `share` of the values lie, interpolated linearly between neighbours; None of none.

    It is definition 7 of Hyndman and Fan, "Sample quantiles in statistical packages" (The American Statistician,
    1996), numpy's default.
    """
    ordered = sorted(values)
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def mean(values: Iterable[float]) -> float | None:
    """The arithmetic mean; None of none."""
    found = list(values)
    return math.fsum(found) / len(found) if found else None


def burst_waits(bursts: Bursts) -> list[float]:
    """Seconds between consecutive bursts: what a reader waits for the next piece of text."""
    return [later - earlier for (earlier, _), (later, _) in itertools.pairwise(bursts)]


def token_waits(bursts: Bursts) -> list[float]:
    """Seconds between consecutive tokens: 0 within a burst, the burst's wait for its first token."""
    waits: list[float] = []
    previous: float | None = None
    for when, count in bursts:
        if count < 1:
            continue
        if previous is not None:
            waits.append(when - previous)
        waits.extend([0.0] * (count - 1))
        previous = when
    return waits


def bursts_of(time_to_first_token: float, waits: Sequence[float]) -> tuple[tuple[float, int], ...]:
    """The bursts of an answer from its first token's time and the waits between tokens.

    The inverse of `token_waits`; tokens without a wait between them came together.
    """
    bursts = [(time_to_first_token, 1)]
    for wait in waits:
        when, count = bursts[-1]
        if wait == 0.0:
            bursts[-1] = (when, count + 1)
        else:
            bursts.append((when + wait, 1))
    return tuple(bursts)


def summed_histograms(histograms: Iterable[Sequence[Sequence[int]]]) -> tuple[tuple[int, ...], ...]:
    """The sum of histograms [K + 1][K + 1] of rounds by (drafts verified, drafts accepted); they share one K.

    Raises:
        ValueError: their sizes differ.
    """
    total: list[list[int]] = []
    for table in histograms:
        if not total:
            total = [[0] * len(row) for row in table]
        if [len(row) for row in table] != [len(row) for row in total]:
            raise ValueError(f"histograms of {len(table)} and {len(total)} rows cannot be added")
        for row, added in zip(total, table, strict=True):
            for column, count in enumerate(added):
                row[column] += count
    return tuple(tuple(row) for row in total)


def acceptance(histogram: Sequence[Sequence[int]]) -> RequestMetrics:
    """The figures of acceptance of a histogram, as a request's metrics without its times."""
    return RequestMetrics.from_histogram(histogram, prompt_tokens=0, output_tokens=0, submitted=0.0, token_times=())


def counts_in_bins(values: Iterable[float], edges: Sequence[float]) -> list[int]:
    """How many values lie in each of the `len(edges) - 1` bins; the last also takes what lies above it."""
    counts = [0] * (len(edges) - 1)
    for value in values:
        if value >= edges[0]:
            number = next((i for i in range(len(counts)) if value < edges[i + 1]), len(counts) - 1)
            counts[number] += 1
    return counts


def nice_step(span: float, most: int) -> float:
    """A step of 1, 2 or 5 times a power of ten that covers `span` in at most `most` steps."""
    if span <= 0.0:
        return 1.0
    least = span / most
    magnitude = 10.0 ** math.floor(math.log10(least))
    return next(factor * magnitude for factor in (1.0, 2.0, 5.0, 10.0) if factor * magnitude >= least * (1 - 1e-9))
