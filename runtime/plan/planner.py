"""From costs and acceptance to a plan: the expected speed-up for every K and bucket, and what to configure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...profiling.speed_model import Acceptance, Estimate, RoundCosts, best_depth, depth_table, estimate
from ..speculative_config import SpeculativeConfig
from .measure import BucketCosts


@dataclass(frozen=True, kw_only=True)
class BucketPlan:
    """What is expected with a number of rows."""

    costs: BucketCosts
    estimates: tuple[Estimate, ...]
    """By K, from 0."""

    @property
    def depth(self) -> int:
        """The suggested K; 0 where speculation does not pay."""
        return best_depth(self.estimates)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The expectations of every bucket."""

    acceptance: Acceptance
    buckets: tuple[BucketPlan, ...]

    @property
    def table(self) -> list[list[int]]:
        """`num_speculative_tokens_per_batch_size`: [first, last, K] by batch size."""
        return depth_table([(bucket.costs.bucket, bucket.depth) for bucket in self.buckets])

    def suggestion(self, speculation: SpeculativeConfig) -> SpeculativeConfig:
        """`speculation` with the suggested numbers of drafts; plain decoding where none pays at any batch size."""
        table = self.table
        most = max(depth for _, _, depth in table)
        if most == 0:
            return SpeculativeConfig()
        dynamic: Any = table if len(table) > 1 else None
        return dataclasses.replace(
            speculation, num_speculative_tokens=most, num_speculative_tokens_per_batch_size=dynamic
        )


def make_plan(costs: Sequence[BucketCosts], acceptance: Acceptance) -> Plan:
    """The expected speed-ups, by `profiling.speed_model`; a bucket's K run from 0 to the most that was measured."""
    buckets = []
    for bucket in costs:
        estimates = [
            estimate(
                acceptance,
                depth,
                baseline_ms=bucket.plain.round_ms,
                costs=bucket.by_depth[depth] if depth else bucket.plain,
                undrafted=bucket.undrafted,
            )
            for depth in (0, *sorted(bucket.by_depth))
        ]
        buckets.append(BucketPlan(costs=bucket, estimates=tuple(estimates)))
    return Plan(acceptance=acceptance, buckets=tuple(buckets))


def given_costs(
    *, baseline_ms: float, draft_ms: float, verify_ms: float, state_ms: float, most_drafts: int
) -> BucketCosts:
    """Costs that the caller knows, of one row, the verify's the same for every K.

    Args:
        baseline_ms: a token of plain decoding.
        draft_ms: one draft.
        verify_ms: a target pass over a window.
        state_ms: the rest of a round.
        most_drafts: the largest K.

    Raises:
        ValueError: one is negative or not finite, or the baseline or verify is 0.
    """
    return BucketCosts(
        bucket=1,
        plain=RoundCosts(verify_ms=baseline_ms),
        undrafted=RoundCosts(verify_ms=verify_ms, state_ms=state_ms),
        by_depth={
            drafts: RoundCosts(draft_ms=drafts * draft_ms, verify_ms=verify_ms, state_ms=state_ms)
            for drafts in range(1, most_drafts + 1)
        },
    )
