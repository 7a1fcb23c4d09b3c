"""What the engine returns: results, pieces of a stream, and the figures of a request."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]
"""stop: a stop token or string; length: a limit; cancelled: by the caller; error: see `error`."""


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one output position: natural logarithm, of the logits before temperature and filters."""

    token_id: int
    logprob: float
    """Of the token that was chosen."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens, likeliest first, as (token id, log-probability)."""


@dataclass(frozen=True, kw_only=True)
class RequestMetrics:
    """The figures of one request. A round is one target pass over its window; prefill is not a round."""

    prompt_tokens: int
    reused_prompt_tokens: int
    """Prompt tokens whose keys and values were already cached."""
    output_tokens: int
    rounds: int
    proposed_tokens: int
    """Drafts that the target verified."""
    accepted_tokens: int
    """Drafts that it accepted."""
    acceptance_by_position: tuple[float, ...]
    """K values: of the rounds that verified a draft at position i, the share that accepted it."""
    acceptance_histogram: tuple[tuple[int, ...], ...]
    """[K + 1][K + 1]: rounds by (drafts verified, drafts accepted)."""
    time_to_first_token: float
    """Seconds from the request's submission to its first token."""
    inter_token_latencies: tuple[float, ...]
    """Seconds between consecutive tokens; the tokens of one round arrive together, so most are 0."""
    total_time: float
    """Seconds from the request's submission to its last token."""
    round_pairs: tuple[tuple[int, int], ...] | None = None
    """(verified, accepted) of every round in order; only with `metrics="detailed"`."""
    budget_rule: str | None = None
    """With adaptive verification, what the number of drafts was decided from: the confidences of the "current round",
    or where those would change the distribution of the text, of the "previous rounds"."""

    @classmethod
    def from_histogram(
        cls,
        histogram: Sequence[Sequence[int]],
        *,
        prompt_tokens: int,
        reused_prompt_tokens: int = 0,
        output_tokens: int,
        submitted: float,
        token_times: Sequence[float],
        finished: float | None = None,
        round_pairs: Sequence[tuple[int, int]] | None = None,
        budget_rule: str | None = None,
    ) -> RequestMetrics:
        """The figures from the counters that the device kept and the times that the host saw.

        Args:
            histogram: [K + 1, K + 1] rounds by (drafts verified, drafts accepted), nested sequences.
            prompt_tokens: length of the prompt.
            reused_prompt_tokens: how many of them were cached.
            output_tokens: length of the answer.
            submitted: when the request was made, in seconds on a monotonic clock.
            token_times: when each output token reached the host, on the same clock, in order.
            finished: when the request ended; default: with its last token.
            round_pairs: (verified, accepted) of every round, or None.
            budget_rule: what adaptive verification decided from; None without it.
        """
        table = tuple(tuple(int(count) for count in row) for row in histogram)
        rounds = sum(map(sum, table))
        proposed = sum(verified * sum(row) for verified, row in enumerate(table))
        accepted = sum(count * kept for row in table for kept, count in enumerate(row))
        positions = []
        for position in range(len(table) - 1):
            offered = sum(sum(row) for row in table[position + 1 :])
            kept = sum(sum(row[position + 1 :]) for row in table[position + 1 :])
            positions.append(kept / offered if offered else 0.0)
        if finished is None:
            finished = token_times[-1] if token_times else submitted
        return cls(
            prompt_tokens=prompt_tokens,
            reused_prompt_tokens=reused_prompt_tokens,
            output_tokens=output_tokens,
            rounds=rounds,
            proposed_tokens=proposed,
            accepted_tokens=accepted,
            acceptance_by_position=tuple(positions),
            acceptance_histogram=table,
            time_to_first_token=(token_times[0] if token_times else finished) - submitted,
            inter_token_latencies=tuple(after - before for before, after in itertools.pairwise(token_times)),
            total_time=finished - submitted,
            round_pairs=None if round_pairs is None else tuple((int(a), int(b)) for a, b in round_pairs),
            budget_rule=budget_rule,
        )

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per round: 1 + accepted drafts / rounds. 1 without a round."""
        return 1.0 + (self.accepted_tokens / self.rounds if self.rounds else 0.0)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted drafts / verified drafts. 0 without a draft."""
        return self.accepted_tokens / self.proposed_tokens if self.proposed_tokens else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed: the tokens after the first burst over the time since it. 0 for a single burst."""
        waits = list(itertools.dropwhile(lambda wait: wait == 0.0, self.inter_token_latencies))
        return len(waits) / sum(waits) if waits else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Every figure, the derived ones included, in types that JSON has."""
        figures = {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}
        figures["mean_acceptance_length"] = self.mean_acceptance_length
        figures["draft_acceptance_rate"] = self.draft_acceptance_rate
        figures["tokens_per_second"] = self.tokens_per_second
        return figures


@dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """One answer.

    `Engine.generate` returns one result for one prompt; with `SamplingParams(n=...)` above 1, a tuple of `n`
    results, ordered by `index`. A list of prompts gives a list with one such entry per prompt.
    """

    text: str
    """The answer, without stop strings and special tokens."""
    token_ids: tuple[int, ...]
    """The tokens of the answer, up to and including the one that ended it."""
    finish_reason: FinishReason
    error: str | None = None
    """What went wrong, for finish reason "error"."""
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the answer."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One entry per token of `token_ids`, if asked for."""
    metrics: RequestMetrics | None = None
    """None with `metrics="none"`."""
    prompt_token_ids: tuple[int, ...] = ()
    seed: int = 0
    """The seed that was used, also when the request named none."""
    synthetic: bool = False
    """Drafts were accepted at given rates, for a benchmark: the text is not what the model would have written."""
    index: int = 0
    """Which of the `n` answers to the prompt, from 0."""

    def to_dict(self) -> dict[str, Any]:
        """Every field in types that JSON has."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}


@dataclass(frozen=True, kw_only=True)
class StreamChunk:
    """A piece of an answer, as `Engine.stream` yields it; the chunks' texts join to the answer's text."""

    text: str
    """New text that later tokens cannot change; may be empty while a character is incomplete."""
    token_ids: tuple[int, ...]
    """The tokens that arrived with it."""
    index: int = 0
    """Which of the `n` answers it belongs to."""
    finish_reason: FinishReason | None = None
    """Set on the last chunk of an answer."""
    result: GenerationResult | None = None
    """The whole answer, on its last chunk."""


def _plain(value: Any) -> Any:
    if isinstance(value, (RequestMetrics, GenerationResult)):
        return value.to_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(part) for part in value]
    return value
