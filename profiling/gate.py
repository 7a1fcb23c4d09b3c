"""The rules of the regression gate: which difference between a baseline and now is a regression."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from .baseline import Baseline, Measure


class Verdict(Enum):
    """What became of one figure."""

    OK = "ok"
    BETTER = "better"
    """Faster than the tolerance explains: worth a new baseline."""
    WORSE = "worse"
    """A regression: the gate fails."""
    CHANGED = "changed"
    """A count that is not the baseline's: the gate fails, whichever direction."""
    NEW = "new"
    """A figure that the baseline does not know: the gate fails until the baseline has it."""
    MISSING = "missing"
    """A count of the baseline that was not measured: the gate fails."""
    SHOWN = "shown"
    """Not comparable here; only for reading."""

    @property
    def fails(self) -> bool:
        """Whether the gate fails with it."""
        return self in (Verdict.WORSE, Verdict.CHANGED, Verdict.NEW, Verdict.MISSING)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One figure, then and now."""

    kind: str
    """count, ratio or seconds."""
    name: str
    before: float | None
    now: float | None
    allowed: float | None = None
    """The most that passes; None for a count, and where nothing is compared."""
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How far a ratio may exceed its baseline: three times the baseline's spread, but within these shares."""

    least: float
    """What a busy neighbour alone can do to this ratio."""
    most: float
    """What must be noticed, however much the baseline varied."""

    def __post_init__(self) -> None:
        if not 0.0 < self.least <= self.most:
            raise ValueError(f"0 < least <= most is needed, got {self.least} and {self.most}")


def compare_counts(
    before: Mapping[str, int], now: Mapping[str, int], *, optional: frozenset[str] = frozenset()
) -> list[Finding]:
    """Counts must be equal, name by name.

    Args:
        before: the baseline's.
        now: as measured.
        optional: names of counts that some machines cannot measure; they are compared where both sides have them.
    """
    findings = []
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if old is None or new is None:
            absent = Verdict.NEW if old is None else Verdict.MISSING
            verdict = Verdict.SHOWN if name in optional else absent
        else:
            verdict = Verdict.OK if old == new else Verdict.CHANGED
        findings.append(Finding(kind="count", name=name, before=old, now=new, verdict=verdict))
    return findings


def compare_measure(
    kind: str, name: str, before: Measure | None, now: float, limits: Limits, *, comparable: bool = True
) -> Finding:
    """A time, or a ratio of times, against the baseline's.

    Args:
        kind: ratio or seconds.
        name: of the figure.
        before: the baseline's; None where it has none, which fails a ratio or time that is to be compared.
        now: as measured.
        limits: of the tolerance.
        comparable: whether the two can be compared; if not, both are only shown.
    """
    if before is None or not comparable:
        verdict = Verdict.NEW if comparable else Verdict.SHOWN
        old = None if before is None else before.value
        return Finding(kind=kind, name=name, before=old, now=now, verdict=verdict)
    tolerance = before.tolerance(limits.least, limits.most)
    allowed = before.value * (1.0 + tolerance)
    verdict = Verdict.OK
    if now > allowed:
        verdict = Verdict.WORSE
    elif now < before.value / (1.0 + tolerance):
        verdict = Verdict.BETTER
    return Finding(kind=kind, name=name, before=before.value, now=now, allowed=allowed, verdict=verdict)


def differences(old: Baseline | None, new: Baseline) -> list[Finding]:
    """What a new baseline changes, for reading: every figure of either, and nothing fails."""
    findings = []
    groups = (("count", "counts"), ("ratio", "ratios"), ("seconds", "seconds"))
    for kind, attribute in groups:
        before, after = (getattr(baseline, attribute) if baseline else {} for baseline in (old, new))
        for name in sorted(before.keys() | after.keys()):
            values = [_value(side.get(name)) for side in (before, after)]
            findings.append(Finding(kind=kind, name=name, before=values[0], now=values[1], verdict=Verdict.SHOWN))
    return findings


def _value(figure: int | Measure | None) -> float | None:
    return figure.value if isinstance(figure, Measure) else figure
