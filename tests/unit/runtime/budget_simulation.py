"""Rounds of decoding without a model: acceptance by given rates, costs by a table, the budgeter as it is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from draftgraph.graphs import DecodeState, StateShape, verify_widths
from draftgraph.graphs.buckets import power_of_two_at_least
from draftgraph.runtime.adaptive import CURRENT_ROUND, AdaptiveBudget, BucketCosts, BudgetRule, CostTable
from draftgraph.runtime.speculative_methods import Evidence

# Milliseconds of a verify by its width, and of one pass of a drafter over one token per row, by the rows: measured on
# SmolLM2-135M in bfloat16 and float32 on 2 cores, and as an H200 would take them for an 8B model and a small drafter,
# by the bytes and operations that they need.
VERIFY = {
    "bfloat16 on a CPU": lambda width: 16.3 + 0.6 * width,
    "float32 on a CPU": lambda width: 18.0 + 7.0 * width,
    "a GPU": lambda width: 3.6 if width <= 128 else 3.6 * width / 128,
}
DRAFT = {
    "bfloat16 on a CPU": lambda rows: 2.5 + 0.1 * rows,
    "float32 on a CPU": lambda rows: 3.0 + 1.2 * rows,
    "a GPU": lambda rows: 0.25,
}

MEASURED = "SmolLM2 with layerskip, as an engine measured it"
"""The very table of an engine that drafts 7 tokens with 10 of the 30 layers: bfloat16, eager, 2 busy cores."""
TABLES = (*VERIFY, MEASURED)


def costs_of(name: str, rows: int, depth: int) -> BucketCosts:
    """Of the bucket in which so many rows decode."""
    bucket = power_of_two_at_least(rows)
    if name == MEASURED:
        table = CostTable.parse(json.loads(Path(__file__).with_name("smollm2_layerskip_costs.json").read_text()))
        assert len(table.buckets[bucket].draft) == depth + 1
        return table.buckets[bucket]
    verify = [VERIFY[name](width) for width in verify_widths(bucket, depth)]
    step = DRAFT[name](bucket)
    return BucketCosts.of(verify, [step * (0.5 + n) for n in range(depth + 1)])


class Simulation:
    """Rows that go on for ever, in the bucket that holds them."""

    def __init__(
        self,
        costs: BucketCosts,
        truth: np.ndarray,
        *,
        evidence: Evidence = Evidence.SURVIVAL,
        rule: BudgetRule = CURRENT_ROUND,
        spread: float = 0.0,
        seed: int = 0,
    ) -> None:
        """Takes the acceptance of every draft given those before it, [rows, K]; of a round it is `spread` off in the
        logit, which the drafter knows.
        """
        self.costs, self.truth, self.spread = costs, truth, spread
        self.rows, self.depth = truth.shape
        self.bucket = power_of_two_at_least(self.rows)
        self.widths = verify_widths(self.bucket, self.depth)
        self.rng = np.random.default_rng(seed)
        shape = StateShape(
            slots=self.bucket,
            context=64,
            num_drafts=self.depth,
            vocab_size=2,
            max_bucket=self.bucket,
            max_width=self.widths[-1],
        )
        self.state = state = DecodeState.allocate(shape, dtype=torch.float32, device="cpu")
        state.slot_of_row[:] = state.reserved_slot
        state.slot_of_row[: self.rows] = torch.arange(self.rows)
        state.finished[: self.rows] = False
        state.length[:], state.limit[:], state.running[:] = 4, 60, True
        self.budget = AdaptiveBudget(state, evidence=evidence, rule=rule)
        self.budget.set_costs(CostTable({self.bucket: costs}), {self.bucket: self.widths})
        self._widths = torch.tensor(self.widths, dtype=torch.int32)
        self.tokens = self.cost = self.verified = 0.0

    def round(self) -> None:
        """Drafts as far as the budget goes on, verifies what it says, and draws what stands."""
        state, rows, bucket, budget = self.state, self.rows, self.bucket, self.budget
        logit = np.log(self.truth / (1 - self.truth)) + self.spread * self.rng.normal(size=self.truth.shape)
        chance = 1 / (1 + np.exp(-logit))
        state.draft_count[:rows] = 0
        budget.keep(state, bucket, 0)
        steps = 0
        while steps < self.depth and not int(budget.stop):
            if budget.evidence is not Evidence.POSITION:
                state.confidence[:rows, steps] = torch.from_numpy(chance[:, steps]).float()
            steps += 1
            state.draft_count[:rows] = steps
            if steps < self.depth:
                budget.keep(state, bucket, steps)
        budget.plan(state, bucket, self._widths)
        verified = np.diff(state.cu_tokens.numpy()[: rows + 1]) - 1
        stands = np.cumprod(self.rng.random(chance.shape) < chance, 1).sum(1)
        state.accepted[:rows] = torch.from_numpy(np.minimum(stands, verified)).int()
        budget.note(state, bucket)
        survival = np.cumprod(chance, 1) * (np.arange(self.depth) < verified[:, None])
        self.tokens += rows + float(survival.sum())
        self.cost += self.costs.draft[steps] + self.costs.verify[int(state.width_index)]
        self.verified += float(state.cu_tokens[rows])

    def run(self, rounds: int, warm_up: int = 0) -> float:
        """Milliseconds per token over so many rounds, after others that do not count."""
        for _ in range(warm_up):
            self.round()
        self.tokens = self.cost = self.verified = 0.0
        for _ in range(rounds):
            self.round()
        return self.cost / self.tokens


def best_fixed(costs: BucketCosts, truth: np.ndarray) -> float:
    """Milliseconds per token of the best number of drafts that is the same for all rows, none included."""
    rows, depth = truth.shape
    widths, survival = verify_widths(power_of_two_at_least(rows), depth), np.cumprod(truth, 1)
    found = []
    for drafts in range(depth + 1):
        index = next(i for i, width in enumerate(widths) if width >= rows * (drafts + 1))
        tokens = rows + survival[:, :drafts].sum()
        found.append((costs.draft[drafts] + costs.verify[index]) / tokens)
    return min(found)
