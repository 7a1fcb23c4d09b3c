"""The gate as a whole: measures, compares with a baseline, or makes a new one."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from ...profiling.baseline import Baseline, Measure, baseline_path, find_baseline
from ...profiling.device_name import device_name
from ...profiling.gate import Finding, Limits, Verdict, compare_counts, compare_measure
from ...profiling.interleaved import Times
from ..errors import DraftgraphError
from ..progress import ProgressCallback
from .counts import answer_counts, byte_counts, is_optional, program_counts, region_counts, smollm2_counts
from .ratios import Group, answer_group, step_group

ATTEMPTS = 3
"""A regression is what stays: a figure that is too large is measured again, so many times in all."""
PASSES = 5
"""Measurements of each figure for a new baseline, which give its spread."""
_ALIKE = 0.10
"""How far the contenders without our code may be from the baseline for times to be comparable."""
_SECONDS = Limits(least=0.30, most=0.50)
_PACKAGES = ("torch", "transformers", "triton")
_COUNTS = (
    ("programs", program_counts),
    ("compiled regions", region_counts),
    ("bytes", byte_counts),
    ("answers", answer_counts),
    ("SmolLM2", smollm2_counts),
)

GroupSource = Callable[[], AbstractContextManager[Group]]


class NoBaselineError(DraftgraphError):
    """There is nothing to compare with: says what to do."""


@dataclass(frozen=True, kw_only=True)
class GateReport:
    """What the gate found."""

    device: str
    baseline: Path
    same_device: bool
    """Whether the baseline is of this very device; otherwise only counts are compared."""
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    """What a reader should know, one sentence each."""

    @property
    def passed(self) -> bool:
        """Whether no figure fails."""
        return not any(finding.verdict.fails for finding in self.findings)


def current_device() -> str:
    """The name of the device that the gate measures."""
    return device_name("cpu")


def choose_baseline(named: Path | None, device: str) -> Path:
    """The file to compare with; raises `NoBaselineError` when there is none."""
    path = named if named is not None else find_baseline(device)
    if path is None or not path.is_file():
        missing = f"there is no baseline {named}" if named else "there is no baseline of any device"
        own = named or baseline_path(device)
        raise NoBaselineError(
            f"{missing}: run `draftgraph gate --update{f' --baseline {named}' if named else ''}` on a tree that is "
            f"known to be good, which writes {own}, and commit that file"
        )
    return path


def run_gate(
    path: Path,
    *,
    quick: bool = False,
    progress: ProgressCallback,
    groups: Sequence[GroupSource] = (step_group, answer_group),
) -> GateReport:
    """Measures everything and compares it with the baseline in `path`.

    Args:
        path: of the baseline.
        quick: counts only, nothing that is timed.
        progress: called as the work goes on.
        groups: what is timed.

    Raises:
        BaselineError: the file is no baseline.
    """
    baseline, device = Baseline.load(path), current_device()
    same_device = baseline.device == device
    total = len(_COUNTS) + (0 if quick else len(groups))
    findings = _check_counts(baseline, measure_counts(progress, total), same_device)
    with _one_thread():
        for number, source in enumerate(() if quick else groups):
            progress(len(_COUNTS) + number, total, "gate")
            with source() as group:
                findings += _check_group(group, baseline, same_device)
    progress(total, total, "gate")
    return GateReport(
        device=device,
        baseline=path,
        same_device=same_device,
        findings=tuple(findings),
        notes=tuple(_notes(baseline, device, same_device, quick)),
    )


def measure_counts(progress: ProgressCallback, total: int) -> dict[str, int]:
    """Every count of this tree."""
    counts: dict[str, int] = {}
    for number, (_, measure) in enumerate(_COUNTS):
        progress(number, total, "gate")
        counts |= measure()
    return counts


def make_baseline(
    progress: ProgressCallback, groups: Sequence[GroupSource] = (step_group, answer_group), passes: int = PASSES
) -> tuple[Baseline, list[str]]:
    """A baseline of this tree on this device, and what is doubtful about it, one sentence each."""
    total = len(_COUNTS) + passes * len(groups)
    counts = measure_counts(progress, total)
    ratios: dict[str, Measure] = {}
    seconds: dict[str, Measure] = {}
    doubts = []
    with _one_thread():
        for number, source in enumerate(groups):
            with source() as group:
                measured: list[Times] = []
                for _ in range(passes):
                    progress(len(_COUNTS) + number * passes + len(measured), total, "gate")
                    measured.append(group.measure())
            for comparison in group.comparisons:
                measure = Measure.of([comparison.of(times) for times in measured])
                ratios[str(comparison)] = measure
                if 3 * measure.spread > comparison.limits.most:
                    doubts.append(
                        f"{comparison} varied by {measure.spread:.0%} from pass to pass; more than "
                        f"{comparison.limits.most:.0%} above it will fail all the same: better repeat this on a "
                        "quieter machine"
                    )
            for name in group.contest:
                seconds[name] = Measure.of([times.seconds(name) for times in measured])
    progress(total, total, "gate")
    baseline = Baseline(device=current_device(), made_with=versions(), counts=counts, ratios=ratios, seconds=seconds)
    return baseline, doubts


def versions() -> dict[str, str]:
    """Of the packages that can change the figures."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _check_counts(baseline: Baseline, now: dict[str, int], same_device: bool) -> list[Finding]:
    optional = frozenset(name for name in (*baseline.counts, *now) if is_optional(name))
    before = dict(baseline.counts)
    if not same_device:
        # Another processor rounds a real model's products in another way, which can turn a near-tie.
        before = {name: count for name, count in before.items() if name not in optional}
    return compare_counts(before, now, optional=optional)


def _check_group(group: Group, baseline: Baseline, same_device: bool) -> list[Finding]:
    """Measures a group until nothing is too large, `ATTEMPTS` times at most; the best of each figure counts."""
    ratios: dict[str, float] = {}
    seconds: dict[str, float] = {}
    findings: list[Finding] = []
    for _ in range(ATTEMPTS):
        times = group.measure()
        for comparison in group.comparisons:
            name, ratio = str(comparison), comparison.of(times)
            ratios[name] = min(ratio, ratios.get(name, ratio))
        for name in group.contest:
            seconds[name] = min(times.seconds(name), seconds.get(name, times.seconds(name)))
        findings = [
            compare_measure(
                "ratio",
                str(comparison),
                baseline.ratios.get(str(comparison)),
                ratios[str(comparison)],
                comparison.limits,
                comparable=same_device,
            )
            for comparison in group.comparisons
        ]
        alike = same_device and all(_alike(baseline.seconds.get(name), seconds[name]) for name in group.foreign)
        findings += [
            compare_measure("seconds", name, baseline.seconds.get(name), value, _SECONDS, comparable=alike)
            for name, value in seconds.items()
        ]
        if not any(finding.verdict is Verdict.WORSE for finding in findings):
            break
    return findings


def _alike(before: Measure | None, now: float) -> bool:
    return before is not None and abs(now / before.value - 1.0) <= _ALIKE


def _notes(baseline: Baseline, device: str, same_device: bool, quick: bool) -> Iterator[str]:
    if quick:
        yield "quick: only counts were compared, nothing was timed"
    elif not same_device:
        yield (
            f"there is no baseline of this device ({device}): counts are compared with those of {baseline.device}; "
            "ratios and times are only shown. To gate them here, run `draftgraph gate --update` on a tree known "
            "to be good, and commit the file"
        )
    here = versions()
    for name, version in baseline.made_with.items():
        if here.get(name) != version:
            yield f"the baseline was made with {name} {version}, not {here.get(name)}: that alone can change figures"


@contextmanager
def _one_thread() -> Iterator[None]:
    """Steps of the fixed model gain nothing from threads, and waiting for one that was interrupted costs much."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
