"""Measures what rounds of decoding cost, by bucket and number of drafts, and how often drafts are accepted."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...graphs import Program, Step
from ...profiling.clocks import Clock, clock_for
from ...profiling.speed_model import Acceptance, RoundCosts
from ..core import EngineCore
from ..detokenizer import IncrementalDetokenizer
from ..engine import Engine
from ..engine_config import EngineConfig
from ..errors import RequestError
from ..loading import LoadedModel, build_core
from ..progress import ProgressCallback
from ..prompts import encode_prompt
from ..request import Request
from ..sampling_params import SamplingParams
from ..speculative_config import SpeculativeConfig

ROUNDS = 9
"""Measured rounds of each kind; the median counts."""
_PLAIN, _ONE, _MANY = "plain", "one draft", "many drafts"


@dataclass(frozen=True, kw_only=True)
class BucketCosts:
    """What a round costs with a number of rows."""

    bucket: int
    plain: RoundCosts
    """Plain decoding."""
    undrafted: RoundCosts
    """A round in which the drafter found nothing."""
    by_depth: Mapping[int, RoundCosts]
    """By K, from 1 to the most."""


@dataclass
class _Samples:
    """Milliseconds of one kind of round, round by round."""

    draft: list[float] = dataclasses.field(default_factory=list)
    verify: list[float] = dataclasses.field(default_factory=list)
    state: list[float] = dataclasses.field(default_factory=list)

    def costs(self, draft_ms: float | None = None) -> RoundCosts:
        """The medians, with another drafting time if one is given."""
        measured = statistics.median(self.draft) if draft_ms is None else draft_ms
        return RoundCosts(
            draft_ms=measured, verify_ms=statistics.median(self.verify), state_ms=statistics.median(self.state)
        )


def with_depth(speculation: SpeculativeConfig, depth: int) -> SpeculativeConfig:
    """The same config with `depth` drafts at every batch size, all of them verified."""
    return dataclasses.replace(
        speculation,
        num_speculative_tokens=depth,
        num_speculative_tokens_per_batch_size=None,
        enable_adaptive_verification=False,
    )


def measure_costs(
    target: LoadedModel, config: EngineConfig, prompt: Any, *, progress: ProgressCallback
) -> list[BucketCosts]:
    """Times rounds step by step through the host executor, kinds in turns, so that a slow moment hits all alike.

    The rows repeat `prompt`. What is drafted is replaced by as many tokens as a round is to have, since only their
    number matters to the cost; drafting itself is timed at one draft and at the most, and taken as linear between.

    Args:
        target: the model.
        config: of the engine; its `speculative` drafts the most tokens, K.
        prompt: text, token ids or a chat.
        progress: called as the work goes on.

    Raises:
        RequestError: the prompt leaves no room for the rounds.
    """
    depth = config.speculative.num_speculative_tokens
    assert depth is not None  # `with_depth` set it
    cores = {
        _PLAIN: build_core(target, dataclasses.replace(config, speculative=SpeculativeConfig())),
        _ONE: build_core(target, dataclasses.replace(config, speculative=with_depth(config.speculative, 1))),
        _MANY: build_core(target, config),
    }
    found = []
    for number, bucket in enumerate(config.buckets):
        progress(number, len(config.buckets), "measuring rounds")
        found.append(_measure_bucket(cores, target, prompt, bucket, depth))
    progress(len(config.buckets), len(config.buckets), "measuring rounds")
    return found


def _measure_bucket(
    cores: Mapping[str, EngineCore], target: LoadedModel, prompt: Any, bucket: int, depth: int
) -> BucketCosts:
    # Rounds of one width cost the same, whether their windows fill it or not: the fullest stands for all.
    widths = cores[_MANY].plan.widths[bucket]
    fullest = {width: min(depth, width // bucket - 1) for width in widths if width >= 2 * bucket}
    kinds = [(_PLAIN, 0), (_ONE, 1), (_MANY, 0), *((_MANY, k) for k in sorted(set(fullest.values())))]
    samples: dict[tuple[str, int], _Samples] = {kind: _Samples() for kind in kinds}
    # A round gains at most its drafts and one more token.
    most = (ROUNDS + 3) * sum(k + 1 for _, k in kinds)
    ready = {name: _decoding(core, target, prompt, bucket, most) for name, core in cores.items()}
    for turn in range(ROUNDS + 1):
        for name, drafts in kinds:
            times = samples[name, drafts] if turn else _Samples()  # the first turn compiles
            _timed_round(cores[name], ready[name], bucket, drafts, times)
    for core in cores.values():
        core.abort(None)
    one, many = (statistics.median(samples[kind].draft) for kind in ((_ONE, 1), (_MANY, depth)))
    slope = max(0.0, many - one) / max(1, depth - 1)
    by_depth = {}
    for drafts in range(1, depth + 1):
        width = next(width for width in fullest if width >= bucket * (drafts + 1))
        by_depth[drafts] = samples[_MANY, fullest[width]].costs(min(one, many) + slope * (drafts - 1))
    plain, undrafted = samples[_PLAIN, 0].costs(), samples[_MANY, 0].costs()
    return BucketCosts(bucket=bucket, plain=plain, undrafted=undrafted, by_depth=by_depth)


def _decoding(core: EngineCore, target: LoadedModel, prompt: Any, rows: int, most: int) -> Program:
    """Lets `rows` requests decode, so that every one has a committed token, and returns the program of their rounds."""
    ids = encode_prompt(
        prompt, target.tokenizer, vocab_size=target.config.vocab_size, max_model_len=target.max_model_len
    )
    limit = len(ids) + most
    if limit > target.max_model_len:
        raise RequestError(
            f"the prompt has {len(ids)} tokens and the rounds to measure add up to {most}: together more than the "
            f"{target.max_model_len} tokens of a sequence; use a shorter prompt, or a larger max_model_len"
        )
    requests = [
        Request(
            prompt_ids=ids,
            params=SamplingParams(max_tokens=most, ignore_eos=True),
            seed=index,
            index=0,
            limit=limit,
            stop_token_ids=(),
            detokenizer=IncrementalDetokenizer(target.tokenizer),
        )
        for index in range(rows)
    ]
    for request in requests:
        core.submit(request)
    while not all(request.token_ids for request in requests):
        core.step()
    return next(program for program in core.programs() if program.name == f"round[{rows}]")


def _timed_round(core: EngineCore, program: Program, bucket: int, drafts: int, times: _Samples) -> None:
    """Runs one round with so many drafts of each row, and notes what its steps took."""
    state, clock = core.state, clock_for(core.state.device)
    steps = {step.name: step for step in program.steps()}
    slots = state.slot_of_row[:bucket].long()
    with torch.inference_mode():
        draft = _ms(clock, steps["propose"], state) if "propose" in steps else 0.0
        state.draft_count[slots] = drafts
        state.draft_tokens[slots] = 0
        limits = state.draft_limit.clone()
        state.draft_limit.fill_(drafts)
        around = _ms(clock, steps["budget"], state)
        state.draft_limit.copy_(limits)
        width = core.plan.widths[bucket][int(state.width_index)]
        verify = _ms(clock, steps[f"verify[{width}]"], state)
        around += _ms(clock, steps["accept"], state)
        around += _ms(clock, steps["commit"], state)
    times.draft.append(draft)
    times.verify.append(verify)
    times.state.append(around)


def _ms(clock: Clock, step: Step, state: Any) -> float:
    start = clock.mark()
    step.fn(state)
    return 1e3 * clock.seconds(start, clock.mark())


def measure_acceptance(
    target: LoadedModel,
    config: EngineConfig,
    prompts: Sequence[Any],
    params: SamplingParams,
    *,
    progress: ProgressCallback,
) -> Acceptance:
    """Answers the prompts, one after another, and counts which drafts were accepted.

    Raises:
        RequestError: an answer failed, or a prompt cannot be answered.
    """
    depth = config.speculative.num_speculative_tokens or 0
    total = [[0] * (depth + 1) for _ in range(depth + 1)]
    with Engine(target, build_core(target, config), config) as engine:
        for number, prompt in enumerate(prompts):
            progress(number, len(prompts), "measuring acceptance")
            for result in _results(engine.generate(prompt, params)):
                if result.finish_reason == "error":
                    raise RequestError(f"prompt {number + 1} could not be answered: {result.error}")
                for row, counted in zip(total, result.metrics.acceptance_histogram, strict=True):
                    row[:] = [a + b for a, b in itertools.zip_longest(row, counted)]
        progress(len(prompts), len(prompts), "measuring acceptance")
    return Acceptance.from_histogram(total)


def _results(answer: Any) -> Iterator[Any]:
    yield from answer if isinstance(answer, tuple) else (answer,)
