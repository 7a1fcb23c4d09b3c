"""The ops of adaptive verification: the CPU's against the references, and both against what they are defined by."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from adaptive_cases import WIDTHS, choosing, estimating, keeping, learning
from budget_cases import COUNT, DRAFT_LIMIT, FINISHED, LENGTH, LIMIT, ROWS
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import assert_same_effect, check_capture_safe, check_registration, clone

from draftgraph.kernels.budget_topk import budget_topk
from draftgraph.kernels.choose_budget import choose_budget, choose_budget_reference
from draftgraph.kernels.estimate_acceptance import estimate_acceptance, estimate_acceptance_reference
from draftgraph.kernels.keep_drafting import keep_drafting, keep_drafting_reference
from draftgraph.kernels.learn_acceptance import FIRST_BETA, FIRST_OMEGA, learn_acceptance, learn_acceptance_reference

CASES = {"seed": st.integers(0, 10**6), "rows": st.integers(1, 16), "num_drafts": st.integers(1, 15)}
ACCEPTANCE, VERIFY_COST, DRAFT_COST, ROUNDS, BUDGET, RATE = range(7, 13)
BOTH_CHOOSE = pytest.mark.parametrize("run", [choose_budget, choose_budget_reference], ids=["op", "reference"])


@given(**CASES, levels=st.sampled_from([0, 1, 2, 4]), probing=st.booleans())
@settings(max_examples=60, deadline=None)
def test_choose_budget_equals_its_reference(seed, rows, num_drafts, levels, probing):
    args = choosing(seed, rows=rows, num_drafts=num_drafts, levels=levels, probing=probing)
    assert_same_effect(choose_budget, choose_budget_reference, args)


@given(**CASES, adaptive=st.booleans())
@settings(max_examples=60, deadline=None)
def test_keep_drafting_equals_its_reference(seed, rows, num_drafts, adaptive):
    args = keeping(seed, rows=rows, num_drafts=num_drafts, adaptive=adaptive)
    assert_same_effect(keep_drafting, keep_drafting_reference, args)


@given(**CASES, learned=st.booleans())
@settings(max_examples=60, deadline=None)
def test_estimate_acceptance_equals_its_reference(seed, rows, num_drafts, learned):
    args = estimating(seed, rows=rows, num_drafts=num_drafts, learned=learned)
    assert_same_effect(estimate_acceptance, estimate_acceptance_reference, args)


@given(**CASES, learns=st.sampled_from([True, True, False]))
@settings(max_examples=80, deadline=None)
def test_learn_acceptance_equals_its_reference(seed, rows, num_drafts, learns):
    args = learning(seed, rows=rows, num_drafts=num_drafts, learns=learns)
    assert_same_effect(learn_acceptance, learn_acceptance_reference, args)


# The budget


def masses(args: list[Any]) -> list[list[int]]:
    """Of each live row, the survival of every draft that it may verify, in units of 2**-40."""
    live = [slot for slot in args[ROWS].tolist() if not args[FINISHED][slot]]
    found = []
    for slot in live:
        room = int(args[LIMIT][slot] - args[LENGTH][slot]) - 1
        most = max(0, min(int(args[COUNT][slot]), int(args[DRAFT_LIMIT][len(live)]), room))
        product, of_row = np.float32(1.0), []
        for factor in args[ACCEPTANCE][slot, :most].tolist():
            product = product * np.float32(min(factor, 1.0) if factor > 0 else 0.0)
            of_row.append(int(product * np.float32(2.0**40)))
        found.append(of_row)
    return found


def most_by_budget(rows: list[list[int]]) -> list[int]:
    """The largest sum over all ways to give the rows so many of their first drafts together, for each number of them.

    Ways are joined row by row, which leaves none out: the sum of a way is that of its rows.
    """
    best = [0]
    for of_row in rows:
        own = [0, *itertools.accumulate(of_row)]
        best = [
            max(best[total - k] + own[k] for k in range(len(own)) if 0 <= total - k < len(best))
            for total in range(len(best) + len(own) - 1)
        ]
    return best


def objective(args: list[Any], rows: int, drafts: int, tokens: int) -> np.float32 | None:
    """What a round of so many rows and drafts yields per time, None where no width holds it."""
    steps = max((int(args[COUNT][s]) for s in args[ROWS].tolist() if not args[FINISHED][s]), default=0)
    draft_cost = args[DRAFT_COST].numpy()[max(0, steps)]
    for width, cost in zip(WIDTHS, args[VERIFY_COST].numpy(), strict=True):
        if width >= rows + drafts:
            return np.array([rows * 2**40 + tokens]).astype(np.float32)[0] / (draft_cost + cost)
    return None


@given(**CASES, levels=st.sampled_from([0, 1, 2, 4]))
@settings(max_examples=120, deadline=None)
def test_the_budget_is_the_best_of_all_prefix_allocations(seed, rows, num_drafts, levels):
    """Ties: the narrowest width, and of one width the most drafts."""
    args = choosing(seed, rows=rows, num_drafts=num_drafts, levels=levels)
    args[ROUNDS][0] = 0  # none that looks further
    of_rows = masses(args)
    choose_budget(*args)
    budget, live = int(args[BUDGET]), len(of_rows)
    if not live:
        assert (budget, float(args[RATE])) == (0, 0.0)
        return
    best = most_by_budget(of_rows)
    value = [objective(args, live, drafts, tokens) for drafts, tokens in enumerate(best)]
    top = max(v for v in value if v is not None)
    assert value[budget] == top
    assert float(args[RATE]) == np.float32(top * np.float32(2.0**-40))

    def width_of(drafts: int) -> int:
        return next(width for width in WIDTHS if width >= live + drafts)

    narrowest = min(width_of(drafts) for drafts, v in enumerate(value) if v == top)
    assert width_of(budget) == narrowest
    assert budget == min(narrowest - live, len(best) - 1)

    # What `budget_topk` makes of it is one of the allocations that reach it, within the width; no row is left out.
    shared = [*args[: ROWS + 2], args[ACCEPTANCE], args[BUDGET], torch.zeros(len(args[ROWS]) + 1, dtype=torch.int32)]
    index = torch.zeros(1, dtype=torch.int32)
    budget_topk(*shared, torch.zeros(len(args[ROWS]), dtype=torch.int32), index)
    ends = shared[-1].tolist()
    sizes = [b - a for a, b in itertools.pairwise(ends)]
    given_rows = [size for size, slot in zip(sizes, args[ROWS].tolist(), strict=True) if not args[FINISHED][slot]]
    assert all(size >= 1 for size in given_rows)
    assert sum(size - 1 for size in given_rows) == budget
    assert sum(sum(of_row[: size - 1]) for of_row, size in zip(of_rows, given_rows, strict=True)) == best[budget]
    assert ends[-1] <= WIDTHS[int(index)]


@given(seed=st.integers(0, 10**6), rows=st.integers(1, 4), num_drafts=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_joining_rows_leaves_no_allocation_out(seed, rows, num_drafts):
    of_rows = masses(choosing(seed, rows=rows, num_drafts=num_drafts))
    best = most_by_budget(of_rows)
    for total in range(len(best)):
        ways = itertools.product(*(range(len(of_row) + 1) for of_row in of_rows))
        sums = [
            sum(sum(of_row[:k]) for of_row, k in zip(of_rows, way, strict=True)) for way in ways if sum(way) == total
        ]
        assert best[total] == max(sums)


def one_row(acceptance: list[float], verify: list[float], draft: float = 0.0, rounds: int = 0) -> list[Any]:
    args = choosing(0, rows=1, num_drafts=len(acceptance))
    slot = int(args[ROWS][0])
    args[FINISHED][:-1], args[LENGTH][:], args[LIMIT][:], args[COUNT][:] = False, 5, 40, len(acceptance)
    args[ROWS] = args[ROWS][:1]
    args[DRAFT_LIMIT][:] = len(acceptance)
    args[ACCEPTANCE][slot] = torch.tensor(acceptance)
    args[6], args[VERIFY_COST] = torch.tensor([1, 2, 4, 8], dtype=torch.int32), torch.tensor(verify)
    args[DRAFT_COST], args[ROUNDS][0] = torch.full((len(acceptance) + 1,), draft), rounds
    return args


@BOTH_CHOOSE
@pytest.mark.parametrize(
    ("acceptance", "verify", "draft", "wanted"),
    [
        ([0.9, 0.9, 0.9], [10.0, 10.0, 10.0, 10.0], 0.0, 3),  # verifying costs nothing more
        ([0.1, 0.9, 0.9], [10.0, 12.0, 14.0, 20.0], 0.0, 0),  # 1/10 against 1.1/12 and 1.271/14
        ([0.5, 0.5, 0.5], [10.0, 12.0, 20.0, 20.0], 0.0, 1),
        ([0.5, 0.5, 0.5], [10.0, 12.0, 20.0, 20.0], 30.0, 3),  # what drafting cost is spent: use more of it
        ([0.5, 0.5, 0.5], [10.0, 15.0, 30.0, 30.0], 0.0, 0),  # equal at widths 1 and 2: the narrowest
    ],
)
def test_budgets_by_hand(run, acceptance, verify, draft, wanted):
    args = one_row(acceptance, verify, draft)
    run(*args)
    assert int(args[BUDGET]) == wanted


@BOTH_CHOOSE
def test_some_rounds_look_one_width_further(run):
    budgets = []
    for rounds in (6, 7, 255, 263, 511, 512):
        args = one_row([0.1, 0.1, 0.1], [10.0, 15.0, 30.0, 60.0], rounds=rounds)
        run(*args)
        budgets.append(int(args[BUDGET]))
        assert float(args[RATE]) == pytest.approx(0.1)
    assert budgets == [0, 1, 1, 0, 1, 0]


# Drafting on


@pytest.mark.parametrize("run", [keep_drafting, keep_drafting_reference], ids=["op", "reference"])
@pytest.mark.parametrize(
    ("acceptance", "step_cost", "step", "rounds", "goes"),
    [
        ([0.8, 0.5, 0.5], 0.5, 1, 0, True),  # 2.2 tokens in 3 ms against 1.8 in 2.5
        ([0.8, 0.5, 0.5], 2.0, 1, 0, False),  # 2.2 in 6 against 1.8 in 4
        ([0.8, 0.5, 0.5], 2.0, 1, 7, False),
        ([0.8, 0.5, 0.5], 2.0, 1, 15, True),  # looks two drafts far
        ([0.8, 0.1, 1.0], 0.1, 1, 0, False),  # 1.88 in 2.2 would not do, nor would 1.96 in 2.3
        ([0.1, 0.9, 0.9], 0.1, 0, 0, True),
        ([0.1, 0.9, 0.9], 0.5, 0, 0, False),
    ],
)
def test_drafting_goes_on_where_it_pays(run, acceptance, step_cost, step, rounds, goes):
    """One row, verified for 2 ms whatever the width."""
    args = keeping(1, rows=1, num_drafts=3)
    slot = int(args[4][0])
    args[0][:], args[1][:], args[2][:], args[3][:] = True, 5, 20, 3
    args[0][slot] = False
    args[5][slot] = torch.tensor(acceptance)
    args[7], args[8] = torch.full((len(WIDTHS),), 2.0), 1e-6 + step_cost * torch.arange(4)
    args[9][0], args[10] = rounds, step
    run(*args)
    assert args[11].tolist() == [0 if goes else 1]


@given(seed=st.integers(0, 10**6), rows=st.integers(1, 6), num_drafts=st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_drafting_goes_on_where_some_greater_depth_has_a_better_budget(seed, rows, num_drafts):
    """By every allocation of every depth."""
    args = keeping(seed, rows=rows, num_drafts=num_drafts)
    keep_drafting(*args)
    live = [slot for slot in args[4].tolist() if not args[0][slot]]
    room = [min(int(args[3][len(live)]), int(args[2][slot] - args[1][slot]) - 1) for slot in live]
    step, value = args[10], []
    for depth in range(num_drafts + 1):
        of_rows = []
        for slot, most in zip(live, room, strict=True):
            product, own = np.float32(1.0), []
            for factor in args[5][slot, : max(0, min(depth, most))].tolist():
                product = product * np.float32(min(factor, 1.0) if factor > 0 else 0.0)
                own.append(int(product * np.float32(2.0**19)))
            of_rows.append(own)
        best = most_by_budget(of_rows)
        value.append(
            max(
                (len(live) * 2**19 + best[min(width - len(live), len(best) - 1)]) / (float(args[8][depth]) + cost)
                for width, cost in zip(WIDTHS, args[7].tolist(), strict=True)
                if width >= len(live)
            )
        )
    usable, rounds = any(most > step for most in room), int(args[9])
    often = 8 if rounds < 256 else 256
    probes = rounds % often == often - 1 and rounds // often % num_drafts >= step
    margin = max(value[step + 1 :]) / value[step] - 1 if live else 0.0
    if abs(margin) > 1e-6:  # else rounding decides
        assert int(args[11]) == int(not (usable and (margin > 0 or probes)))


@pytest.mark.parametrize("run", [keep_drafting, keep_drafting_reference], ids=["op", "reference"])
def test_depth_and_room_end_drafting(run):
    for depth, limit, step, goes in ((0, 20, 0, False), (1, 20, 0, True), (1, 20, 1, False), (3, 7, 1, False)):
        args = keeping(1, rows=1, num_drafts=3, adaptive=False)
        args[0][:], args[1][:], args[2][:], args[3][:] = True, 5, limit, depth
        args[0][int(args[4][0])] = False
        args[10] = step
        run(*args)
        assert args[11].tolist() == [0 if goes else 1], (depth, limit, step)


# The estimate


def test_estimates_by_hand_and_forecasts():
    args = estimating(0, rows=1, num_drafts=4)
    slot = int(args[2][0])
    args[0][slot], args[1][slot] = torch.tensor([0.9, 0.25, 0.7, 0.7]), 2
    args[3] = torch.tensor([2.0, 0.0, 1.0, -1.0, 3.0])
    args[4][slot] = torch.tensor([0.5, 0.5, 0.5, 2.0])
    estimate_acceptance(*args)
    seen, expected, acceptance = (args[index][slot].tolist() for index in (5, 6, 7))
    logit = [2 * math.log(0.9 / 0.1), 2 * math.log(1 / 3) + 1, -1.0]
    assert acceptance == pytest.approx([*(1 / (1 + math.exp(-x)) for x in logit), 1.0], rel=1e-5)
    assert expected == pytest.approx([*(1 / (1 + math.exp(-x)) for x in (0.0, 1.0, -1.0)), 1.0], rel=1e-5)
    assert seen == pytest.approx([0.9, 0.25, 0.5, 2.0])
    args[3] = None
    estimate_acceptance(*args)
    assert args[7][slot].tolist() == pytest.approx([0.9, 0.25, 0.5, 1.0])
    args[1][slot] = 0
    estimate_acceptance(*args)
    assert torch.equal(args[7][slot], args[6][slot])


def synthetic_rounds(seed: int, rounds: int, accept: Any, *, rows: int = 16, num_drafts: int = 4) -> list[Any]:
    """The arguments of `learn_acceptance` after so many rounds of `accept(confidence, position, uniform)`."""
    rng = np.random.default_rng(seed)
    args = learning(1, rows=rows, num_drafts=num_drafts)
    slots = args[6].tolist()[:rows]
    args[6] = args[6][:rows]
    args[2][:], args[3][:], args[4][:], args[7][:] = 0, False, False, True
    args[5] = torch.arange(rows + 1, dtype=torch.int32) * (num_drafts + 1)
    args[9][0] = 0
    args[10].zero_()
    args[11].copy_(torch.tensor([FIRST_OMEGA, *[FIRST_BETA] * num_drafts]))
    position = np.arange(num_drafts)
    for _ in range(rounds):
        sure = 1 / (1 + np.exp(-rng.normal(0.5, 1.5, (rows, num_drafts))))
        stands = accept(sure, position, rng.random((rows, num_drafts)))
        args[0][slots] = torch.from_numpy(sure).float()
        args[2][slots] = torch.from_numpy(np.cumprod(stands, 1).sum(1)).int()
        learn_acceptance(*args)
        assert bool(args[11].isfinite().all())
    return args


@pytest.mark.parametrize("omega", [0.0, 0.6, 1.5])
def test_the_weights_of_the_labels_are_found_again(omega):
    beta = np.array([1.0, 0.3, -0.4, 0.0])

    def accept(sure, position, uniform):
        return uniform < 1 / (1 + np.exp(-(omega * np.log(sure / (1 - sure)) + beta[position])))

    weights = synthetic_rounds(0, 1000, accept)[11].numpy()
    # A step sees 1600 labels of the first position, and ever fewer of the next.
    assert weights[0] == pytest.approx(omega, abs=0.15)
    assert weights[1:3] == pytest.approx(beta[:2], abs=0.3)
    assert weights[3:] == pytest.approx(beta[2:], abs=0.6)


@pytest.mark.parametrize("confidence", [None, 0.0, 1.0, float("nan"), 0.5])
@pytest.mark.parametrize("stands", [0.0, 1.0])
def test_streams_of_one_outcome_stay_finite_and_are_believed(confidence, stands):
    def accept(sure, position, uniform):
        if confidence is not None:
            sure[:] = confidence
        return np.full(sure.shape, stands)

    args = synthetic_rounds(1, 800, accept, rows=2, num_drafts=3)
    weights = args[11]
    if confidence in (None, 0.5):
        learned = torch.sigmoid(weights[1])
        assert learned > 0.95 if stands else learned < 0.05
    # And back again, from as far as it went.
    flip = clone(args)
    flip[2][:] = 0 if stands else 3
    flip[0][:] = 0.5
    for _ in range(1500):
        learn_acceptance(*flip)
    assert bool(flip[11].isfinite().all())
    learned = torch.sigmoid(flip[11][1])
    assert learned < 0.1 if stands else learned > 0.9


def test_labels_by_hand():
    """Of four verified drafts one was accepted: two labels. A failed row gives none, nor does a draft without
    confidence, nor any row while the loop is not running.
    """
    args = learning(1, rows=1, num_drafts=4)
    slot = int(args[6][0])
    args[6], args[5] = args[6][:1], torch.tensor([0, 5], dtype=torch.int32)
    args[3][:], args[4][:], args[7][:], args[9][0] = False, False, True, 0
    args[0][slot], args[2][slot] = torch.tensor([0.9, 0.5, 0.5, 0.5]), 1
    args[1][slot], args[8][slot] = 0.5, torch.tensor([2.0, 0.5, 0.1, 2.0])
    args[10].zero_()
    args[11].copy_(torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0]))
    learn_acceptance(*args)
    assert (args[10][0] >> 24).tolist() == [1, 1, 0, 0]
    assert (args[10][1] / 2**24).tolist() == pytest.approx([0.1, -0.5, 0.0, 0.0], abs=1e-6)
    assert args[8][slot].tolist() == pytest.approx([0.5, 0.5, 0.2, 0.5])
    for change in ({3: True}, {7: False}, {4: True}):
        other = clone(args)
        before = other[10].clone()
        for index, value in change.items():
            other[index][:] = value
        learn_acceptance(*other)
        assert torch.equal(other[10], before)
        assert int(other[9]) == (2 if 3 in change else 1)
    args[0][slot, 0] = 0.0
    learn_acceptance(*args)
    assert (args[10][0] >> 24).tolist() == [1, 2, 0, 0]


REFERENCES = {
    "choose_budget": (choose_budget, choose_budget_reference, choosing),
    "keep_drafting": (keep_drafting, keep_drafting_reference, keeping),
    "estimate_acceptance": (estimate_acceptance, estimate_acceptance_reference, estimating),
    "learn_acceptance": (learn_acceptance, learn_acceptance_reference, learning),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_references_are_capture_safe_and_ops_registered(name):
    op, reference, make = REFERENCES[name]
    check_capture_safe(reference, make(2))
    check_registration(op, make(3))


def test_positions_that_were_never_judged_follow_those_that_were():
    """All drafts of the first position stand, and no others are verified."""
    args = learning(1, rows=1, num_drafts=3)
    slot = int(args[6][0])
    args[6], args[5] = args[6][:1], torch.tensor([0, 2], dtype=torch.int32)
    args[3][:], args[4][:], args[7][:], args[9][0] = False, False, True, 0
    args[0][slot], args[2][slot] = 0.5, 1
    args[10].zero_()
    args[11].copy_(torch.tensor([FIRST_OMEGA, *[FIRST_BETA] * 3]))
    for _ in range(100):
        learn_acceptance(*args)
    omega, *beta = args[11].tolist()
    assert omega == pytest.approx(FIRST_OMEGA)  # the feature was 0 throughout
    assert beta[0] > 1.0
    assert beta[1:] == [beta[0]] * 2
