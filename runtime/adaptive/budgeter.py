"""Adaptive verification: how many drafts are worth making, and worth verifying, decided on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...graphs import DecodeState
from ...kernels.budget_topk import budget_topk
from ...kernels.choose_budget import choose_budget
from ...kernels.estimate_acceptance import estimate_acceptance
from ...kernels.keep_drafting import keep_drafting
from ...kernels.learn_acceptance import (
    FIRST_BETA,
    FIRST_OMEGA,
    LABEL,
    LEAST_LABELS,
    MOST_BETA,
    NUM_SUMS,
    UNKNOWN,
    learn_acceptance,
)
from ...kernels.put_rows import put_rows
from ..errors import ConfigError
from ..speculative_methods import UNKNOWN_CONFIDENCE, Evidence
from .budget import Budget
from .costs import CostTable
from .rules import BudgetRule

_MOST_OMEGA = 1e6
"""The most that is taken for a weight that was learned."""
_MOST_ROUNDS = 2**30
"""The most that are taken to have gone before; they are counted on in an int32."""


class _Costs(NamedTuple):
    """Of one bucket, on the device."""

    widths: torch.Tensor
    """int32 [n]."""
    verify: torch.Tensor
    """float32 [n]."""
    draft: torch.Tensor
    """float32 [K + 1]."""


class AdaptiveBudget(Budget):
    """Verifies the drafts that are worth it: the best ratio of expected tokens to cost over the captured widths.

    Acceptance is what the drafter says (`Evidence.SURVIVAL`), or estimated online from its confidence and the
    position, with weights that all rows and requests share. Under a rule that does not see this round's drafts, the
    size of the budget and the number of drafts made follow from the rows' last rounds; how the budget is shared among
    them may follow from this one's.
    """

    varies_depth = True

    def __init__(
        self,
        state: DecodeState,
        *,
        evidence: Evidence,
        rule: BudgetRule,
        confidence: torch.Tensor | None = None,
    ) -> None:
        """Allocates; `set_costs` must be called before the first round.

        Args:
            state: of the engine; its confidences are filled in where the drafter gives none.
            evidence: what the confidences are.
            rule: what the budget may depend on; see `lawful_rule`.
            confidence: float32 [rows, K], where the drafter leaves its confidences, if not in the state's.
        """
        super().__init__(state)
        self.rule, self.evidence, self._source = rule, evidence, confidence
        slots, drafts = state.confidence.shape
        self._device = state.device

        def full(size: tuple[int, ...], value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.full(size, value, dtype=dtype, device=state.device)

        self.forecast = full((slots, drafts), UNKNOWN)
        """float32 [R1, K]: the confidences that the row's last rounds make expect."""
        self.expected = full((slots, drafts), 1.0)
        """float32 [R1, K]: the acceptance that follows from the forecast."""
        self.acceptance = full((slots, drafts), 1.0)
        """float32 [R1, K]: of this round's drafts; what is expected of those not made."""
        self._seen = full((slots, drafts), UNKNOWN)
        self.rounds = full((1,), 0, torch.int32)
        self._budget, self._rate = full((1,), 0, torch.int32), full((1,), 0.0)
        self._weights: torch.Tensor | None = None
        self._sums: torch.Tensor | None = None
        if evidence is not Evidence.SURVIVAL:
            self._weights = full((drafts + 1,), FIRST_BETA)
            self._weights[0] = FIRST_OMEGA
            self._sums = full((NUM_SUMS, drafts), 0, torch.int64)
        if evidence is Evidence.POSITION:
            state.confidence.fill_(UNKNOWN_CONFIDENCE)
        self._costs: dict[int, _Costs] = {}

    def prepare(self, bucket: int, widths: Sequence[int]) -> None:
        """Allocates the bucket's costs."""
        if bucket in self._costs:
            return
        drafts = self.acceptance.shape[1]
        table = torch.tensor(tuple(widths), dtype=torch.int32).to(self._device)
        self._costs[bucket] = _Costs(table, *(torch.ones(n, device=self._device) for n in (len(widths), drafts + 1)))

    def set_costs(self, costs: CostTable, widths: Mapping[int, Sequence[int]]) -> None:
        """Puts the table on the device; raises `ValueError` for one of other buckets, widths or depths."""
        if not costs.fits(widths, self.acceptance.shape[1]):
            raise ValueError(f"the costs are not of the engine's buckets and widths {dict(widths)}")
        for bucket, part in costs.buckets.items():
            self.prepare(bucket, widths[bucket])
            kept = self._costs[bucket]
            kept.verify.copy_(torch.tensor(part.verify, dtype=torch.float32))
            kept.draft.copy_(torch.tensor(part.draft, dtype=torch.float32))

    def keep(self, state: DecodeState, bucket: int, step: int) -> None:
        """Goes on while the next draft is expected to be worth its time."""
        costs, rows = self._costs[bucket], state.slot_of_row[:bucket]
        self._estimate(state, bucket)
        # Before the first draft nothing of this round is known.
        basis = self.acceptance if self.rule.sees_drafts and step > 0 else self.expected
        keep_drafting(
            state.finished,
            state.length,
            state.limit,
            state.draft_limit,
            rows,
            basis,
            costs.widths,
            costs.verify,
            costs.draft,
            self.rounds,
            step,
            self.stop,
        )

    def plan(self, state: DecodeState, bucket: int, widths: torch.Tensor) -> None:
        """Chooses the budget and shares it."""
        costs, rows = self._costs[bucket], state.slot_of_row[:bucket]
        self._estimate(state, bucket)
        candidates = (state.finished, state.length, state.limit, state.draft_count, state.draft_limit, rows, widths)
        choose_budget(
            *candidates,
            self.acceptance if self.rule.sees_drafts else self.expected,
            costs.verify,
            costs.draft,
            self.rounds,
            self._budget,
            self._rate,
        )
        ends, base = state.cu_tokens[: bucket + 1], state.base[:bucket]
        budget_topk(*candidates, self.acceptance, self._budget, ends, base, state.width_index)

    def note(self, state: DecodeState, bucket: int) -> None:
        """Keeps what the next round may know, and learns from what was accepted."""
        learn_acceptance(
            state.confidence,
            self._seen,
            state.accepted,
            state.failed,
            state.finished,
            state.cu_tokens[: bucket + 1],
            state.slot_of_row[:bucket],
            state.running,
            self.forecast,
            self.rounds,
            self._sums,
            self._weights,
        )

    def admit(self, slot: int) -> None:
        """Expects everything of a new request's first round."""
        self.forecast[slot] = UNKNOWN

    def export(self) -> dict[str, Any] | None:
        """What was learned, ready for JSON and for `load`; None where the drafter itself says how sure it is."""
        if self._weights is None:
            return None
        omega, *beta = self._weights.tolist()
        return {"omega": omega, "beta": beta, "rounds": int(self.rounds)}

    def load(self, learned: Mapping[str, Any]) -> None:
        """Takes what `export` gave, perhaps of fewer drafts: later positions are as the last one known, and rounds look
        around as if they were the first ones. Otherwise they go on where the others ended.

        Raises `ConfigError` for anything else, or where nothing is learned.
        """
        if self._weights is None or self._sums is None:
            raise ConfigError("this drafter says itself how sure it is: there is nothing to load")
        parts = learned if isinstance(learned, Mapping) else {}
        omega, beta, rounds = parts.get("omega"), parts.get("beta"), parts.get("rounds", 0)
        numbers = [omega, *beta] if isinstance(beta, (list, tuple)) and beta else []
        known = [float(n) for n in numbers if type(n) in (int, float) and -MOST_BETA <= n <= _MOST_OMEGA]
        sound = bool(known) and len(known) == len(numbers) and known[0] >= 0 and max(known[1:]) <= MOST_BETA
        if not sound or type(rounds) is not int or rounds < 0:
            raise ConfigError(
                f"what was learned must be omega, from 0 to {_MOST_OMEGA:g}, a list beta of numbers within "
                f"{MOST_BETA:g}, and the number of rounds, as export_acceptance gives them, got {learned!r}"
            )
        drafts = self._weights.shape[0] - 1
        padded = [*known[1:], *[known[-1]] * drafts][:drafts]
        self._weights.copy_(torch.tensor([known[0], *padded], dtype=torch.float32))
        self._sums.zero_()
        self._sums[-1, : len(known) - 1] = LEAST_LABELS * LABEL
        self.rounds.fill_(min(rounds, _MOST_ROUNDS) if len(known) > drafts else 0)

    def _estimate(self, state: DecodeState, bucket: int) -> None:
        rows = state.slot_of_row[:bucket]
        if self._source is not None:
            put_rows(self._source[:bucket], rows, 0, state.confidence[:, None])
        outputs = (self._seen, self.expected, self.acceptance)
        estimate_acceptance(state.confidence, state.draft_count, rows, self._weights, self.forecast, *outputs)
