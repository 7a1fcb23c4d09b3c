"""From what was measured to the figures of every method, and to the JSON document."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..outputs import RequestMetrics
from .figures import acceptance, burst_waits, mean, quantile, summed_histograms, token_waits
from .records import Answer, Method, Pass, StepReport
from .runner import Measurements

SCHEMA = "draftgraph-bench"
SCHEMA_VERSION = 1
"""Raised when a field of the document changes its meaning or goes; new fields do not raise it."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A median and the value that one in twenty exceeds; None where there is nothing to take them of."""

    median: float | None
    p95: float | None

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of some values."""
        found = list(values)
        return cls(median=quantile(found, 0.5), p95=quantile(found, 0.95))


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one method did on some of the prompts. Times are in seconds and of answers that ended by themselves."""

    answers: int
    """All that were begun and ended, whatever their status."""
    failed: int
    timeouts: int
    output_tokens: int
    """Of the passes that were not interrupted, and of every answer in them, finished or cut off."""
    tokens_per_second: float | None
    """`output_tokens` over the wall time of those passes."""
    speed_up: float | None
    """The median, over answers that plain decoding and this method both ended, of plain's time per token over this
    method's: each is compared with its neighbour in time."""
    speed_up_against_peer: float | None
    """The same against the peer's plain decoding; None without a peer."""
    tokens_per_round: float | None
    """Accepted path: 1 + accepted drafts per round; for a peer, tokens per pass of the target."""
    acceptance_rate: float | None
    """Accepted drafts over verified ones; None where nothing was drafted."""
    acceptance_by_position: tuple[float, ...]
    """Of the rounds that verified a draft at position i, the share that accepted it; ends where no round did."""
    time_to_first_token: Spread
    token_latency: Spread
    """Between tokens: those of one burst come 0 seconds apart."""
    burst_latency: Spread
    """Between bursts: what a reader waits for."""
    latency: Spread
    """Until an answer's end."""
    gigabytes_per_second: float | None
    """10^9 bytes that the rounds had to move, over the mean time between bursts."""
    share_of_limit: float | None
    """The least time of a round on this device, over the mean time between bursts."""
    compared_prompts: int
    """Prompts that plain decoding and this method both answered in every repeat that was measured."""
    different_prompts: int
    """Those of them whose tokens differ in any repeat."""

    def to_dict(self) -> dict[str, Any]:
        """Every figure, in types that JSON has."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}


@dataclass(frozen=True, kw_only=True)
class MethodReport:
    """Everything about one method."""

    method: Method
    overall: Figures
    by_set: Mapping[str, Figures]
    steps: StepReport | None
    held_memory: int | None
    """Bytes that it holds: weights, caches, drafter, compiled code."""
    peak_memory: int | None
    """The most bytes that it held at any time, loading included."""
    answers: tuple[Answer, ...]

    def to_dict(self) -> dict[str, Any]:
        """In types that JSON has."""
        steps = self.steps
        return {
            "name": self.method.name,
            "engine": self.method.engine,
            "family": self.method.family,
            "num_speculative_tokens": self.method.depth,
            "config": dict(self.method.config),
            "must_repeat_plain_text": self.method.repeats_plain_text,
            "overall": self.overall.to_dict(),
            "by_set": {name: figures.to_dict() for name, figures in self.by_set.items()},
            "steps": None
            if steps is None
            else {
                "rounds": steps.rounds,
                "round_seconds": steps.round_seconds,
                "phase_seconds": dict(steps.phase_seconds),
                "accounted": steps.accounted,
                "bytes_per_round": steps.bytes_per_round,
                "floor_seconds_per_round": steps.floor_seconds,
                "timeline": [[span.phase, span.start, span.seconds] for span in steps.timeline],
                "round_starts": list(steps.round_starts),
                "timeline_ends": steps.timeline_ends,
                "round_tokens": list(steps.round_tokens),
            },
            "held_memory_bytes": self.held_memory,
            "peak_memory_bytes": self.peak_memory,
            "answers": [answer.to_dict() for answer in self.answers],
        }


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """A whole bench, ready to be shown. The first method is plain decoding."""

    created: str
    """When, as ISO 8601."""
    partial: bool
    settings: Mapping[str, Any]
    machine: Mapping[str, Any]
    rounding_may_differ: bool
    """Whether rounding may flip a tie between two tokens: in other dtypes than float32, without `exact`."""
    methods: tuple[MethodReport, ...]

    def broken_promises(self) -> list[str]:
        """Methods whose text had to be plain decoding's and was not, by name."""
        if self.rounding_may_differ:
            return []
        return [
            report.method.name
            for report in self.methods
            if report.method.repeats_plain_text and report.overall.different_prompts
        ]

    def to_dict(self) -> dict[str, Any]:
        """The JSON document."""
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "created": self.created,
            "partial": self.partial,
            "settings": dict(self.settings),
            "machine": dict(self.machine),
            "rounding_may_differ": self.rounding_may_differ,
            "methods": [report.to_dict() for report in self.methods],
        }


def method_reports(
    methods: Sequence[Method],
    measurements: Measurements,
    memory: Mapping[str, tuple[int | None, int | None]],
) -> tuple[MethodReport, ...]:
    """The report of every method; the first is plain decoding, which the others are compared with.

    Args:
        methods: in the order of the report.
        measurements: of all of them.
        memory: (held, peak) in bytes by method.
    """

    def answers_of(method: Method | None) -> list[Answer]:
        return [
            answer
            for one in measurements.passes
            if method is not None and one.method == method.name
            for answer in one.answers
        ]

    plain, peer = answers_of(methods[0]), answers_of(plain_peer(methods))
    sets = list(dict.fromkeys(answer.prompt_set for one in measurements.passes for answer in one.answers))
    reports = []
    for method in methods:
        passes = [one for one in measurements.passes if one.method == method.name]
        steps = measurements.steps.get(method.name)
        by_set = {
            name: method_figures([_only(one, name) for one in passes if _holds(one, name)], plain, steps, peer)
            for name in sets
        }
        held, peak = memory.get(method.name, (None, None))
        reports.append(
            MethodReport(
                method=method,
                overall=method_figures(passes, plain, steps, peer),
                by_set=by_set,
                steps=steps,
                held_memory=held,
                peak_memory=peak,
                answers=tuple(answer for one in passes for answer in one.answers),
            )
        )
    return tuple(reports)


def plain_peer(methods: Sequence[Method]) -> Method | None:
    """The peer's plain decoding, if a peer answers too."""
    return next((one for one in methods if one.engine != methods[0].engine and one.depth == 0), None)


def method_figures(
    passes: Sequence[Pass], plain: Sequence[Answer], steps: StepReport | None, peer: Sequence[Answer] = ()
) -> Figures:
    """The figures of one method from its passes, those of plain decoding, its steps, and those of the plain peer."""
    answers = [answer for one in passes for answer in one.answers]
    good = [answer for answer in answers if answer.status == "ok"]
    whole = [one for one in passes if one.complete]
    tokens = sum(len(answer.token_ids) for one in whole for answer in one.answers)
    seconds = math.fsum(one.seconds for one in whole)
    histograms = [answer.histogram for answer in good if answer.histogram is not None]
    seen = acceptance(summed_histograms(histograms)) if histograms else None
    bursts = [wait for answer in good for wait in burst_waits(answer.bursts)]
    wait = mean(bursts)
    compared, different = _compared(answers, plain)
    return Figures(
        answers=len(answers),
        failed=sum(answer.status == "failed" for answer in answers),
        timeouts=sum(answer.status == "timeout" for answer in answers),
        output_tokens=tokens,
        tokens_per_second=tokens / seconds if seconds and tokens else None,
        speed_up=_speed_up(good, plain),
        speed_up_against_peer=_speed_up(good, peer),
        tokens_per_round=_tokens_per_round(good) if seen is None else seen.mean_acceptance_length,
        acceptance_rate=seen.draft_acceptance_rate if seen is not None and seen.proposed_tokens else None,
        acceptance_by_position=() if seen is None else seen.acceptance_by_position[: _most_drafts(seen)],
        time_to_first_token=Spread.of(answer.bursts[0][0] for answer in good if answer.bursts),
        token_latency=Spread.of(wait for answer in good for wait in token_waits(answer.bursts)),
        burst_latency=Spread.of(bursts),
        latency=Spread.of(answer.latency for answer in good),
        gigabytes_per_second=_ratio(None if steps is None else steps.bytes_per_round, wait, 1e-9),
        share_of_limit=_ratio(None if steps is None else steps.floor_seconds, wait),
        compared_prompts=compared,
        different_prompts=different,
    )


def _only(one: Pass, prompt_set: str) -> Pass:
    return Pass(
        method=one.method,
        answers=tuple(answer for answer in one.answers if answer.prompt_set == prompt_set),
        seconds=one.seconds,
        complete=one.complete,
    )


def _holds(one: Pass, prompt_set: str) -> bool:
    # A pass holds prompts of one set only, whatever the load.
    return any(answer.prompt_set == prompt_set for answer in one.answers)


def _most_drafts(seen: RequestMetrics) -> int:
    """The most drafts that a round verified."""
    return max((drafts for drafts, row in enumerate(seen.acceptance_histogram) if sum(row)), default=0)


def _tokens_per_round(answers: Sequence[Answer]) -> float | None:
    rounds = sum(answer.rounds or 0 for answer in answers)
    return sum(len(answer.token_ids) for answer in answers if answer.rounds) / rounds if rounds else None


def _speed_up(good: Sequence[Answer], plain: Sequence[Answer]) -> float | None:
    baseline = {answer.key: answer for answer in plain if answer.status == "ok"}
    pairs = [(baseline[answer.key], answer) for answer in good if answer.key in baseline]
    return quantile(
        [
            (one.latency / len(one.token_ids)) / (other.latency / len(other.token_ids))
            for one, other in pairs
            if one.token_ids and other.token_ids and other.latency
        ],
        0.5,
    )


def _compared(answers: Sequence[Answer], plain: Sequence[Answer]) -> tuple[int, int]:
    """How many prompts can be compared with plain decoding, and how many of them have other tokens."""
    baseline = {answer.key: answer for answer in plain}
    same: dict[tuple[str, str], list[bool | None]] = {}
    for answer in answers:
        other = baseline.get(answer.key)
        if other is not None:
            both = answer.status == "ok" and other.status == "ok"
            same.setdefault(answer.key[:2], []).append(answer.token_ids == other.token_ids if both else None)
    compared = [verdicts for verdicts in same.values() if None not in verdicts]
    return len(compared), sum(False in verdicts for verdicts in compared)


def _ratio(value: float | None, by: float | None, scale: float = 1.0) -> float | None:
    return value * scale / by if value is not None and by else None


def _plain(value: Any) -> Any:
    if isinstance(value, Spread):
        return {"median": value.median, "p95": value.p95}
    return list(value) if isinstance(value, tuple) else value
