"""One answer under the step timer, beside the least that its rounds had to move."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..graphs import prefill_widths
from ..graphs.buckets import chunk_width
from ..profiling.device_rates import DeviceRates
from ..profiling.floor import Efficiency, RoundShape, StepCost
from ..profiling.report import ReportRow, decode_efficiency, report_rows
from ..profiling.step_timer import StepTime, StepTimer
from .engine import Engine
from .errors import ConfigError, RequestError
from .outputs import GenerationResult
from .prompts import Prompt
from .sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class AnswerProfile:
    """Where the time of one answer went."""

    result: GenerationResult
    rows: list[ReportRow]
    rates: DeviceRates
    decode: Efficiency | None
    """Of the rounds, beside the limit of the device; None when there was no round."""

    def to_dict(self) -> dict[str, Any]:
        """In types that JSON has."""
        metrics, decode = self.result.metrics, self.decode
        return {
            "prompt_tokens": len(self.result.prompt_token_ids),
            "output_tokens": len(self.result.token_ids),
            "rounds": None if metrics is None else metrics.rounds,
            "finish_reason": self.result.finish_reason,
            "seed": self.result.seed,
            "decode": None
            if decode is None
            else {
                "tokens_per_second": decode.tokens_per_second,
                "bytes_per_second": decode.bytes_per_second,
                "share_of_limit": decode.share_of_limit,
            },
            "device": self.rates.to_dict(),
            "steps": [row.to_dict() for row in self.rows],
        }


def profile_answer(
    engine: Engine, prompt: Prompt, params: SamplingParams, rates: DeviceRates, timer: StepTimer | None = None
) -> AnswerProfile:
    """Answers one prompt under a step timer.

    Nothing else may run on the engine meanwhile, and `params.n` must be 1. The engine needs metrics, and should not
    reuse prefixes when the prefill is of interest. Compile before: see `Engine.warmup`.

    Args:
        engine: that answers.
        prompt: to be answered.
        params: as in `Engine.generate`.
        rates: of the engine's device.
        timer: to use; default: one of its own. It must not have seen anything yet.
    """
    if params.n != 1:
        raise RequestError(f"a profile is of one answer: n must be 1, got {params.n}")
    if engine.config.metrics == "none":
        raise ConfigError("a profile needs metrics 'summary' or 'detailed', got 'none'")
    timer = timer or StepTimer(engine.config.torch_device)
    bursts: list[int] = []
    result: GenerationResult | None = None
    with engine.observe(timer), engine.stream(prompt, params) as stream:
        for chunk in stream:
            if chunk.token_ids:
                bursts.append(len(chunk.token_ids))
            result = chunk.result or result
    assert result is not None  # a stream that was not cancelled ends with its result
    table = timer.table()
    rows = report_rows(table, _costs(engine, table, result, bursts), rates)
    return AnswerProfile(
        result=result, rows=rows, rates=rates, decode=decode_efficiency(rows, len(result.token_ids), rates)
    )


def _costs(
    engine: Engine, table: Sequence[StepTime], result: GenerationResult, bursts: Sequence[int]
) -> Callable[[StepTime], StepCost | None]:
    """The cost of each step of one answer, from what came out of its rounds."""
    metrics = result.metrics
    assert metrics is not None  # the engine keeps them
    prompt = metrics.prompt_tokens
    lengths = [prompt - 1 + sum(bursts[:number]) for number in range(len(bursts))]
    widths = sorted({row.width for row in table if row.phase == "verify" and row.width is not None})
    common: dict[str, Any] = {
        "rows": 1,
        "context": sum(lengths) / len(lengths) if lengths else 0,
        "num_drafts": len(metrics.acceptance_histogram) - 1,
        "emitted": sum(bursts) / len(bursts) if bursts else 1,
        "dtype": engine.config.torch_dtype,
    }
    logprobs = next((len(token.top) for token in result.logprobs or ()), None)

    def window(histogram: Sequence[tuple[int, int]]) -> float:
        rounds = sum(count for _, count in histogram)
        return sum((drafts + 1) * count for drafts, count in histogram) / rounds if rounds else 1.0

    # A round's width is the narrowest that holds its window.
    by_width: dict[int, list[tuple[int, int]]] = {width: [] for width in widths}
    for drafts, row in enumerate(metrics.acceptance_histogram):
        if sum(row):
            by_width[next(width for width in widths if drafts + 1 <= width)].append((drafts, sum(row)))
    costs: dict[tuple[str, int | None], StepCost] = {}
    if widths:
        every = [entry for entries in by_width.values() for entry in entries]
        shape = RoundShape(**common, width=widths[-1], window=window(every), logprobs=logprobs)
        costs.update({(phase, None): cost for phase, cost in engine.round_costs(shape).items() if phase != "verify"})
    for width, entries in by_width.items():
        costs["verify", width] = engine.round_costs(RoundShape(**common, width=width, window=window(entries)))["verify"]
    chunks = list(_chunks(prompt - 1, metrics.reused_prompt_tokens, prefill_widths(engine.config.exact)))
    for width in {width for width, _, _ in chunks}:
        each = [engine.prefill_cost(width=w, tokens=count, context=start) for w, start, count in chunks if w == width]
        costs["prefill", width] = sum(each, StepCost()).times(1 / len(each))
    return lambda time: costs.get((time.phase, time.width))


def _chunks(target: int, done: int, widths: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """Width, first position and token count of every prefill chunk."""
    while done < target:
        width = chunk_width(target - done, widths)
        count = min(width, target - done)
        yield width, done, count
        done += count


def measured_dtypes(engine: Engine) -> tuple[torch.dtype, ...]:
    """The dtypes whose matrix products the engine's floor needs rates for."""
    return (engine.config.torch_dtype,)
