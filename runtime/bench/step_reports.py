"""From a step timer's table to where the rounds' time went, and to the least time that they could take."""

from __future__ import annotations

from collections.abc import Sequence

from ...profiling.device_rates import DeviceRates
from ...profiling.floor import RoundShape, StepCost
from ...profiling.step_timer import StepEvent, StepTime, StepTimer, phase_seconds, total_calls, total_seconds
from ..engine import Engine
from .figures import acceptance, summed_histograms
from .records import Answer, StepReport, StepSpan

TIMELINE_ROUNDS = 24
"""Rounds that are kept step by step."""


def step_report(
    engine: Engine, timer: StepTimer, answers: Sequence[Answer], rates: DeviceRates | None
) -> StepReport | None:
    """What a timer saw of `answers`; None when no round ran."""
    table = timer.table()
    rounds = total_calls(table)
    if not rounds:
        return None
    tokens = _round_tokens(answers, rounds)
    first = len(answers[0].bursts) if tokens else rounds
    timeline, starts = _timeline(timer.events(), min(first, TIMELINE_ROUNDS))
    moved, least = (None, None) if rates is None else _floor(engine, table, answers, rates)
    return StepReport(
        phase_seconds=phase_seconds(table),
        round_seconds=total_seconds(table),
        rounds=rounds,
        timeline=timeline,
        round_starts=starts,
        timeline_ends=first <= TIMELINE_ROUNDS,
        round_tokens=tokens[: len(starts) - 1],
        bytes_per_round=moved,
        floor_seconds=least,
    )


def _timeline(events: Sequence[StepEvent], most: int) -> tuple[tuple[StepSpan, ...], tuple[float, ...]]:
    """The steps of the first `most` rounds, and where the rounds begin; times count from the first round."""
    rounds = [event for event in events if event.name.is_round and not event.name.phase][:most]
    origin, end = rounds[0].start, rounds[-1].start + rounds[-1].seconds
    spans = [
        StepSpan(phase=event.name.phase, start=event.start - origin, seconds=event.seconds)
        for event in events
        if event.name.is_round and event.name.phase and origin <= event.start < end
    ]
    spans.sort(key=lambda span: span.start)
    return tuple(spans), (*(one.start - origin for one in rounds), end - origin)


def _round_tokens(answers: Sequence[Answer], rounds: int) -> tuple[int, ...]:
    """Tokens of every round, which are the bursts of the answers; nothing where answers shared rounds."""
    counts = tuple(count for answer in answers for _, count in answer.bursts)
    return counts if len(counts) == rounds else ()


def _floor(
    engine: Engine, table: Sequence[StepTime], answers: Sequence[Answer], rates: DeviceRates
) -> tuple[float | None, float | None]:
    """Bytes and least seconds of an average round, over the widths that ran.

    A round's shape is the mean over the answers: what depends on it, the keys and values and the drafts, is small
    beside the weights.
    """
    histograms = [answer.histogram for answer in answers if answer.histogram is not None and answer.rounds]
    verifies = [row for row in table if row.phase == "verify" and row.width is not None and row.bucket is not None]
    calls = sum(row.calls for row in verifies)
    if not histograms or not calls:
        return None, None
    seen = acceptance(summed_histograms(histograms))
    weights = [(answer.rounds or 0, answer.prompt_tokens + len(answer.token_ids) / 2) for answer in answers]
    context = sum(count * length for count, length in weights) / seen.rounds
    moved = least = 0.0
    for row in verifies:
        assert row.width is not None
        assert row.bucket is not None
        rows = min(seen.rounds / calls, row.bucket)
        shape = RoundShape(
            rows=rows,
            width=row.width,
            window=min(1 + seen.proposed_tokens / seen.rounds, row.width / rows),
            context=context,
            num_drafts=engine.config.speculative.num_speculative_tokens or 0,
            emitted=1 + seen.accepted_tokens / seen.rounds,
            dtype=engine.config.torch_dtype,
        )
        cost: StepCost
        for cost in engine.round_costs(shape).values():
            moved += row.calls * cost.bytes
            least += row.calls * cost.seconds(rates)
    return moved / calls, least / calls
