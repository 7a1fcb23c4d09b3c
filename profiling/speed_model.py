"""What speculation is worth, from costs and acceptance: the analytic model behind `draftgraph plan`.

With `alpha` the chance that a draft is accepted given that those before it were, and independent of everything else, a
round of K drafts yields (Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", eq. 1)

    E[tokens] = 1 + alpha + ... + alpha^K = (1 - alpha^(K+1)) / (1 - alpha)

and against plain decoding, which takes `baseline` per token,

    speed-up = baseline * E[tokens] / (draft + verify + state)

where draft, verify and state are the times of a whole round's drafting, target pass, and everything else.

A drafter that looks text up has nothing to propose in some rounds. With `coverage`, the share of rounds that have
drafts, tokens and costs are averages over the two kinds of rounds. `coverage` 1 is the model of the paper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def expected_tokens(alpha: float, num_drafts: int) -> float:
    """Tokens that a round of `num_drafts` drafts yields in expectation (Leviathan et al. 2023, eq. 1).

    Args:
        alpha: chance that a draft is accepted after those before it were, in [0, 1].
        num_drafts: K, at least 0.

    Returns:
        From 1 to K + 1.

    Raises:
        ValueError: `alpha` outside [0, 1] or `num_drafts` negative.
    """
    _require_share("alpha", alpha)
    if num_drafts < 0:
        raise ValueError(f"num_drafts must be at least 0, got {num_drafts}")
    return sum(alpha**accepted for accepted in range(num_drafts + 1))


@dataclass(frozen=True, kw_only=True)
class RoundCosts:
    """Times of one round in milliseconds, none negative; the verify is above 0."""

    draft_ms: float = 0.0
    """Drafting all K tokens."""
    verify_ms: float
    """The target's pass over the windows."""
    state_ms: float = 0.0
    """Everything else: budget, accept, commit, the state of recurrent layers."""

    def __post_init__(self) -> None:
        for name in ("draft_ms", "verify_ms", "state_ms"):
            _require_time(name, getattr(self, name))
        if self.verify_ms == 0.0:
            raise ValueError("verify_ms must be above 0, got 0.0")

    @property
    def round_ms(self) -> float:
        """The whole round."""
        return self.draft_ms + self.verify_ms + self.state_ms


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """How often drafts are accepted, and how often there are any."""

    alpha: float
    """Chance that a draft is accepted after those before it were, in [0, 1]."""
    coverage: float = 1.0
    """Share of the rounds that have drafts, in [0, 1]."""

    def __post_init__(self) -> None:
        _require_share("alpha", self.alpha)
        _require_share("coverage", self.coverage)

    @classmethod
    def from_histogram(cls, histogram: Sequence[Sequence[int]]) -> Acceptance:
        """The most likely values, given what was counted.

        A round tells of every draft that was accepted, and of the first that was not; later ones were not judged. So
        alpha is accepted / (accepted + rounds with a rejection), the maximum-likelihood estimate.

        Args:
            histogram: rounds by (drafts verified, drafts accepted), as `RequestMetrics.acceptance_histogram`.

        Raises:
            ValueError: it counts no round.
        """
        rounds = sum(map(sum, histogram))
        if rounds == 0:
            raise ValueError("acceptance cannot be estimated: no round was counted")
        accepted = sum(kept * count for row in histogram for kept, count in enumerate(row))
        rejections = sum(
            count for verified, row in enumerate(histogram) for kept, count in enumerate(row) if kept < verified
        )
        drafted = sum(map(sum, histogram[1:]))
        judged = accepted + rejections
        return cls(alpha=accepted / judged if judged else 0.0, coverage=drafted / rounds)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What K drafts per round are expected to give."""

    num_drafts: int
    tokens_per_round: float
    round_ms: float
    baseline_ms: float
    """Plain decoding, per token of each row."""

    @property
    def ms_per_token(self) -> float:
        """Of each row."""
        return self.round_ms / self.tokens_per_round

    @property
    def speed_up(self) -> float:
        """Against plain decoding; above 1 is faster."""
        return self.baseline_ms / self.ms_per_token


def estimate(
    acceptance: Acceptance,
    num_drafts: int,
    *,
    baseline_ms: float,
    costs: RoundCosts,
    undrafted: RoundCosts | None = None,
) -> Estimate:
    """The expected yield of `num_drafts` drafts per round.

    Args:
        acceptance: of the drafts.
        num_drafts: K; at 0, plain decoding: the costs are not used.
        baseline_ms: a round of plain decoding, which is a token of each row.
        costs: a round with K drafts.
        undrafted: a round in which the drafter looked and found nothing; needed where `coverage` is below 1.

    Raises:
        ValueError: a baseline that is not positive, or `undrafted` missing where it is needed.
    """
    _require_time("baseline_ms", baseline_ms)
    if baseline_ms == 0.0:
        raise ValueError("baseline_ms must be above 0, got 0.0")
    tokens = expected_tokens(acceptance.alpha, num_drafts)
    if num_drafts == 0:
        return Estimate(num_drafts=0, tokens_per_round=1.0, round_ms=baseline_ms, baseline_ms=baseline_ms)
    round_ms = costs.round_ms
    if acceptance.coverage < 1.0:
        if undrafted is None:
            raise ValueError(f"coverage is {acceptance.coverage}: the costs of a round without drafts are needed")
        share = acceptance.coverage
        tokens = share * tokens + (1 - share)
        round_ms = share * round_ms + (1 - share) * undrafted.round_ms
    return Estimate(num_drafts=num_drafts, tokens_per_round=tokens, round_ms=round_ms, baseline_ms=baseline_ms)


TOLERANCE = 0.01
"""By how much of the best speed-up a suggestion may fall short, if it drafts less for it."""


def best_depth(estimates: Sequence[Estimate], tolerance: float = TOLERANCE) -> int:
    """The fewest drafts whose speed-up is within `tolerance` of the best: what more drafts give must be worth it.

    Raises `ValueError` when there are no estimates.
    """
    if not estimates:
        raise ValueError("there are no estimates to choose from")
    best = max(e.speed_up for e in estimates)
    return min(e.num_drafts for e in estimates if e.speed_up >= best * (1 - tolerance))


def depth_table(depths: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The `num_speculative_tokens_per_batch_size` of a choice of K per batch bucket.

    Args:
        depths: (bucket, K) with ascending buckets; a bucket serves the batch sizes above the bucket before it.

    Returns:
        `[[first, last, K], ...]`, neighbours with equal K joined.
    """
    table: list[list[int]] = []
    last = 0
    for bucket, depth in depths:
        if bucket <= last:
            raise ValueError(f"buckets must ascend from 1, got {[b for b, _ in depths]}")
        if table and table[-1][2] == depth:
            table[-1][1] = bucket
        else:
            table.append([last + 1, bucket, depth])
        last = bucket
    return table


def _require_share(name: str, value: float) -> None:
    if not math.isfinite(value) or not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must be in [0, 1], got {value}")


def _require_time(name: str, value: float) -> None:
    if not math.isfinite(value) or value < 0.0:
        raise ValueError(f"{name} must be a finite number of at least 0, got {value}")
