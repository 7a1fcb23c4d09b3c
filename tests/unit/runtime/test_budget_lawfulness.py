"""What adaptive verification does to the distribution of the text, summed over every outcome of a small exact model.

The drafter and the target are tables. For every way in which the drafts can turn out the budgeter itself, with its ops,
says how many are verified; the rest is arithmetic: every acceptance, every replacement, every continuation.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from draftgraph.graphs import DecodeState, StateShape
from draftgraph.runtime.adaptive import (
    CURRENT_ROUND,
    PREVIOUS_ROUNDS,
    AdaptiveBudget,
    BucketCosts,
    BudgetRule,
    CostTable,
    lawful_rule,
)
from draftgraph.runtime.speculative_config import SpeculativeConfig
from draftgraph.runtime.speculative_methods import Evidence
from draftgraph.runtime.verification import create_policy

Text = tuple[int, ...]
VOCAB, DRAFTS = 2, 2
WIDTHS = (1, 2, 3, 4, 5, 6)


def noise(prefix: Text, salt: int) -> float:
    """A number in (0, 1) that looks random."""
    value = salt
    for token in prefix:
        value = (value * 31 + token + 7) % 97
    return (value * 37 % 97 + 1) / 99


def target(row: int, prefix: Text) -> list[float]:
    first = 0.2 + 0.6 * noise(prefix, 11 + row)
    return [first, 1 - first]


def drafter(row: int, prefix: Text) -> list[float]:
    first = 0.25 + 0.5 * noise(prefix, 41 + row)
    return [first, 1 - first]


def confidence(row: int, drafts: Text) -> list[float]:
    """Sure of the second draft after one of the first ones only: what a drafter does that knows what it said."""
    return [0.6 + 0.1 * row, 0.95 if drafts[0] == row else 0.05]


def after(row: int, prefix: Text, length: int) -> Iterator[tuple[Text, float]]:
    """Every continuation by the target up to a length, with its probability."""
    if len(prefix) >= length:
        yield prefix, 1.0
        return
    for token, p in enumerate(target(row, prefix)):
        for text, rest in after(row, (*prefix, token), length):
            yield text, p * rest


def normalized(weights: list[float]) -> list[float]:
    return [w / sum(weights) for w in weights]


def standard(row: int, drafts: Text) -> Iterator[tuple[Text, float]]:
    """What a round emits of these drafts, with its probability."""
    chance = 1.0
    for place, token in enumerate(drafts):
        prefix = drafts[:place]
        p, q = target(row, prefix), drafter(row, prefix)
        stands = min(1.0, p[token] / q[token])
        if stands < 1.0:
            for other, weight in enumerate(normalized([max(a - b, 0.0) for a, b in zip(p, q, strict=True)])):
                yield (*prefix, other), chance * (1 - stands) * weight
        chance *= stands
    for token, p in enumerate(target(row, drafts)):
        yield (*drafts, token), chance * p


def block(row: int, drafts: Text) -> Iterator[tuple[Text, float]]:
    """The same by block verification, after the paper's formulas."""
    scale, stands = [1.0], [1.0]
    for place, token in enumerate(drafts):
        prefix = drafts[: place + 1]
        ratio = target(row, prefix[:-1])[token] / drafter(row, prefix[:-1])[token]
        scale.append(min(1.0, scale[-1] * ratio))
        if place + 1 == len(drafts):
            stands.append(scale[-1])
        else:
            rest = sum(
                max(scale[-1] * a - b, 0.0) for a, b in zip(target(row, prefix), drafter(row, prefix), strict=True)
            )
            bottom = rest + 1 - scale[-1]
            stands.append(rest / bottom if bottom > 0 else 1.0)
    chance = 1.0
    for kept in range(len(drafts), -1, -1):
        here, chance = chance * stands[kept], chance * (1 - stands[kept])
        if here <= 0.0:
            continue
        prefix = drafts[:kept]
        weights = target(row, prefix)
        if kept < len(drafts):
            q = drafter(row, prefix)
            weights = normalized([max(scale[kept] * a - b, 0.0) for a, b in zip(weights, q, strict=True)])
        for token, weight in enumerate(weights):
            yield (*prefix, token), here * weight


RULES = {"standard": standard, "block": block}


class Rows:
    """The budgeter at work on one or two rows."""

    def __init__(self, rows: int, rule: BudgetRule) -> None:
        shape = StateShape(slots=rows, context=32, num_drafts=DRAFTS, vocab_size=2, max_bucket=rows, max_width=6)
        self.rows, self.state = rows, DecodeState.allocate(shape, dtype=torch.float32, device="cpu")
        state = self.state
        state.slot_of_row.copy_(torch.arange(rows))
        state.finished[:rows] = False
        state.length[:], state.limit[:] = 4, 30
        self.budget = AdaptiveBudget(state, evidence=Evidence.SURVIVAL, rule=rule)
        # Drafts are verified by twos, and a pair pays if both are likely to stand.
        verify = {1: [1.0, 1.9, 1.9, 9.0, 9.0, 9.0], 2: [1.0, 2.0, 3.2, 3.2, 4.2, 4.2]}[rows]
        table = CostTable({rows: BucketCosts.of(verify, [0.001] * (DRAFTS + 1))})
        self.budget.set_costs(table, {rows: WIDTHS})
        self.budget.forecast[:] = torch.tensor([0.9, 0.3])

    def verified(self, drafts: list[Text]) -> list[int]:
        """How many of each row's drafts."""
        state = self.state
        state.draft_count[:] = DRAFTS
        for row, of_row in enumerate(drafts):
            state.confidence[row] = torch.tensor(confidence(row, of_row))
        self.budget.plan(state, self.rows, torch.tensor(WIDTHS, dtype=torch.int32))
        ends = state.cu_tokens.tolist()
        return [b - a - 1 for a, b in itertools.pairwise(ends)]


def distribution(rows: int, rule: BudgetRule, judge: str, length: int) -> tuple[Counter[tuple[Text, ...]], set[int]]:
    """Of the rows' texts together, and how many drafts are verified in all."""
    found: Counter[tuple[Text, ...]] = Counter()
    budgets, work = set(), Rows(rows, rule)
    ways = list(itertools.product(range(VOCAB), repeat=DRAFTS))
    for drafts in itertools.product(ways, repeat=rows):
        chance = 1.0
        for row, of_row in enumerate(drafts):
            for place, token in enumerate(of_row):
                chance *= drafter(row, of_row[:place])[token]
        counts = work.verified(list(drafts))
        budgets.add(sum(counts))
        ends = []
        for row, (of_row, count) in enumerate(zip(drafts, counts, strict=True)):
            own: Counter[Text] = Counter()
            for emitted, p in RULES[judge](row, of_row[:count]):
                for text, rest in after(row, emitted, length):
                    own[text] += p * rest
            ends.append(own)
        for texts in itertools.product(*ends):
            product = chance
            for own, text in zip(ends, texts, strict=True):
                product *= own[text]
            found[texts] += product
    return found, budgets


def wanted(rows: int, length: int) -> dict[tuple[Text, ...], float]:
    texts = [dict(after(row, (), length)) for row in range(rows)]
    return {
        combined: torch.tensor([t[x] for t, x in zip(texts, combined, strict=True)]).double().prod().item()
        for combined in itertools.product(*texts)
    }


def distance(rows: int, rule: BudgetRule, judge: str) -> float:
    """Total variation between the texts of a round of these rows and the target's own."""
    found, _ = distribution(rows, rule, judge, DRAFTS + 1)
    exact = wanted(rows, DRAFTS + 1)
    assert sum(found.values()) == pytest.approx(1.0)
    return sum(abs(found[texts] - p) for texts, p in exact.items()) / 2


@pytest.mark.parametrize("judge", RULES)
@pytest.mark.parametrize("rows", [1, 2])
def test_a_budget_that_sees_sampled_drafts_is_biased_and_ours_is_not(judge, rows):
    assert distance(rows, CURRENT_ROUND, judge) > 0.01
    policy = create_policy(SpeculativeConfig(rejection_sample_method=judge))
    rule = lawful_rule(policy, samples_drafts=True, confidence_reads_drafts=True)
    assert rule is PREVIOUS_ROUNDS
    assert distance(rows, rule, judge) < 1e-6


def test_the_cases_are_worth_their_name():
    """The naive budget varies with the drafts; ours does not, but its share between two rows does."""
    assert len(distribution(2, CURRENT_ROUND, "standard", 3)[1]) > 1
    assert distribution(2, PREVIOUS_ROUNDS, "standard", 3)[1] == {2}
    work = Rows(2, PREVIOUS_ROUNDS)
    shares = {tuple(work.verified([a, b])) for a in ((0, 0), (1, 0)) for b in ((0, 0), (1, 0))}
    assert len(shares) > 1


@pytest.mark.parametrize("judge", ["standard", "block"])
def test_drafts_that_are_not_sampled_may_be_seen(judge, monkeypatch):
    """Each draft is the only one that its drafter would have made: q is 1 there."""

    def certain(row: int, prefix: Text) -> list[float]:
        likeliest = noise(prefix, 41 + row) < 0.5
        return [float(likeliest), float(not likeliest)]

    monkeypatch.setattr(f"{__name__}.drafter", certain)

    def only_possible(row: int, drafts: Text) -> Iterator[tuple[Text, float]]:
        made = all(certain(row, drafts[:place])[token] for place, token in enumerate(drafts))
        return RULES_AS_THEY_ARE[judge](row, drafts) if made else iter([((), 1.0)])

    monkeypatch.setitem(RULES, judge, only_possible)
    policy = create_policy(SpeculativeConfig(rejection_sample_method=judge))
    rule = lawful_rule(policy, samples_drafts=False, confidence_reads_drafts=True)
    assert rule is CURRENT_ROUND
    assert distance(2, rule, judge) < 1e-6


RULES_AS_THEY_ARE = dict(RULES)


@pytest.mark.parametrize("judge", RULES)
def test_confidences_that_do_not_read_the_drafts_may_be_seen(judge, monkeypatch):
    monkeypatch.setattr(f"{__name__}.confidence", lambda row, drafts: [0.9 - 0.5 * row, 0.5])
    policy = create_policy(SpeculativeConfig(rejection_sample_method=judge))
    rule = lawful_rule(policy, samples_drafts=True, confidence_reads_drafts=False)
    assert rule is CURRENT_ROUND
    assert distance(2, rule, judge) < 1e-6


def test_coupled_gives_the_same_text_whatever_the_budget_sees():
    """Noise of four values at each position, shared by drafter and target: every one of its outcomes."""
    policy = create_policy(SpeculativeConfig(rejection_sample_method="coupled"))
    rule = lawful_rule(policy, samples_drafts=True, confidence_reads_drafts=True)
    assert rule is CURRENT_ROUND
    work, budgets = Rows(1, rule), set()

    def token(weights: list[float], atom: int) -> int:
        return int((atom + 0.5) / 4 > weights[0])

    for atoms in itertools.product(range(4), repeat=DRAFTS + 1):
        plain: Text = ()
        drafts: Text = ()
        for atom in atoms:
            plain = (*plain, token(target(0, plain), atom))
        for atom in atoms[:-1]:
            drafts = (*drafts, token(drafter(0, drafts), atom))
        (count,) = work.verified([drafts])
        budgets.add(count)
        emitted: Text = ()
        for place in range(count + 1):
            emitted = (*emitted, token(target(0, emitted), atoms[place]))
            if place < count and drafts[place] != emitted[-1]:
                break
        assert emitted == plain[: len(emitted)]
    assert len(budgets) > 1


@pytest.mark.parametrize("rule", [CURRENT_ROUND, PREVIOUS_ROUNDS])
def test_only_a_rule_that_sees_them_stops_drafting_by_this_rounds_confidences(rule):
    stops = []
    for sure in (0.99, 0.01):
        work = Rows(1, rule)
        work.budget.set_costs(CostTable({1: BucketCosts.of([1.0] * 6, [0.1, 0.2, 0.3])}), {1: WIDTHS})
        work.state.draft_count[0], work.state.confidence[0] = 1, torch.tensor([sure, 0.0])
        work.budget.keep(work.state, 1, 1)
        stops.append(int(work.budget.stop))
    assert stops == ([0, 1] if rule.sees_drafts else [0, 0])
