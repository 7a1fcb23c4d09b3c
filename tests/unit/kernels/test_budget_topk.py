from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from budget_cases import (
    BASE,
    BUDGET,
    CONFIDENCE,
    COUNT,
    CU_TOKENS,
    DRAFT_LIMIT,
    FINISHED,
    LENGTH,
    LIMIT,
    ROWS,
    WIDTH_INDEX,
    WIDTHS,
    budget_arguments,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import assert_same_effect, check_capture_safe, check_registration, clone

from draftgraph.kernels.budget_topk import budget_topk, budget_topk_reference
from draftgraph.kernels.plan_window import plan_window

BOTH = pytest.mark.parametrize("run", [budget_topk, budget_topk_reference])
CASES = {
    "seed": st.integers(0, 10**6),
    "rows": st.integers(1, 5),
    "num_drafts": st.integers(0, 5),
    "budget": st.integers(-1, 20),
    "levels": st.sampled_from([0, 1, 2, 4]),
}


def survivals(args: list[Any]) -> list[list[float]]:
    """What each row of the bucket may verify: the survival of each draft, as a float32 product."""
    live = [not args[FINISHED][slot] for slot in args[ROWS].tolist()]
    most = int(args[DRAFT_LIMIT][sum(live)])
    result = []
    for slot, is_live in zip(args[ROWS].tolist(), live, strict=True):
        room = int(args[LIMIT][slot] - args[LENGTH][slot]) - 1
        count = max(0, min(int(args[COUNT][slot]), most, room, args[CONFIDENCE].shape[1])) if is_live else 0
        factors = np.clip(np.nan_to_num(args[CONFIDENCE][slot, :count].numpy(), nan=0.0), 0, 1).astype(np.float32)
        product = np.float32(1)
        row = []
        for factor in factors:
            product = np.float32(product * factor)
            row.append(float(product))
        result.append(row)
    return result


def chosen(args: list[Any]) -> list[int]:
    """How many drafts of each row of the bucket the op chose, read from its windows."""
    sizes = (args[CU_TOKENS][1:] - args[CU_TOKENS][:-1]).tolist()
    live = [not args[FINISHED][slot] for slot in args[ROWS].tolist()]
    assert all(size == 0 for size, is_live in zip(sizes, live, strict=True) if not is_live)
    return [size - is_live for size, is_live in zip(sizes, live, strict=True)]


@given(**CASES)
@settings(max_examples=200, deadline=None)
def test_cpu_equals_reference(seed: int, rows: int, num_drafts: int, budget: int, levels: int) -> None:
    args = budget_arguments(seed, rows=rows, num_drafts=num_drafts, budget=budget, levels=levels)
    assert_same_effect(budget_topk, budget_topk_reference, args)


@given(**CASES)
@settings(max_examples=150, deadline=None)
def test_the_largest_survivals_are_chosen_and_they_are_prefixes(
    seed: int, rows: int, num_drafts: int, budget: int, levels: int
) -> None:
    """Sorting all candidates by survival, position and row, and taking the first: each row's are its first ones."""
    args = budget_arguments(seed, rows=rows, num_drafts=num_drafts, budget=budget, levels=levels)
    survival = survivals(args)
    ranked = sorted((-s, k, row) for row, of_row in enumerate(survival) for k, s in enumerate(of_row))
    taken = ranked[: max(budget, 0)]
    budget_topk_reference(*args)
    counts = chosen(args)
    for row, count in enumerate(counts):
        assert sorted(k for _, k, r in taken if r == row) == list(range(count))
    for row, slot in enumerate(args[ROWS].tolist()):
        assert args[COUNT][slot] == counts[row]
    total = int(args[CU_TOKENS][-1])
    assert args[WIDTH_INDEX] == next(i for i, width in enumerate(args[WIDTHS].tolist()) if width >= total)


@given(seed=st.integers(0, 10**6), rows=st.integers(1, 4), num_drafts=st.integers(0, 4), budget=st.integers(0, 9))
@settings(max_examples=80, deadline=None)
def test_no_other_share_of_the_budget_expects_more(seed: int, rows: int, num_drafts: int, budget: int) -> None:
    """Against every way to give each row some of its first drafts, the expected number of accepted drafts."""
    args = budget_arguments(seed, rows=rows, num_drafts=num_drafts, budget=budget)
    survival = survivals(args)
    shares = itertools.product(*(range(len(of_row) + 1) for of_row in survival))
    best = max(
        math.fsum(s for of_row, count in zip(survival, share, strict=True) for s in of_row[:count])
        for share in shares
        if sum(share) <= budget
    )
    budget_topk_reference(*args)
    counts = chosen(args)
    assert sum(counts) == min(budget, sum(map(len, survival)))
    expected = math.fsum(s for of_row, count in zip(survival, counts, strict=True) for s in of_row[:count])
    assert expected >= best * (1 - 1e-12)


@given(**CASES)
@settings(max_examples=60, deadline=None)
def test_a_larger_budget_takes_nothing_away(seed: int, rows: int, num_drafts: int, budget: int, levels: int) -> None:
    args = budget_arguments(seed, rows=rows, num_drafts=num_drafts, budget=budget, levels=levels)
    more = clone(args)
    more[BUDGET] += 1
    budget_topk(*args)
    budget_topk(*more)
    assert all(a <= b for a, b in zip(chosen(args), chosen(more), strict=True))


@given(**CASES)
@settings(max_examples=60, deadline=None)
def test_a_lone_row_takes_what_the_budget_allows(
    seed: int, rows: int, num_drafts: int, budget: int, levels: int
) -> None:
    """Whatever its confidences are: nothing competes with it."""
    args = budget_arguments(seed, rows=1, num_drafts=num_drafts, budget=budget, levels=levels)
    candidates = sum(map(len, survivals(args)))
    budget_topk(*args)
    assert sum(chosen(args)) == min(max(budget, 0), candidates)


@given(seed=st.integers(0, 10**6), rows=st.integers(1, 5), num_drafts=st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_a_budget_for_all_is_plan_window(seed: int, rows: int, num_drafts: int) -> None:
    args = budget_arguments(seed, rows=rows, num_drafts=num_drafts, budget=rows * num_drafts)
    plain = clone(args[: WIDTHS + 1] + args[CU_TOKENS:])
    budget_topk(*args)
    plan_window(*plain)
    for a, b in zip(args[: WIDTHS + 1] + args[CU_TOKENS:], plain, strict=True):
        assert torch.equal(a, b)


@BOTH
def test_by_hand(run: Any) -> None:
    args = budget_arguments(0, rows=2, num_drafts=3, budget=4)
    args[ROWS] = torch.tensor([1, 0, args[FINISHED].shape[0] - 1], dtype=torch.int32)
    args[CU_TOKENS], args[BASE] = torch.zeros(4, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    args[DRAFT_LIMIT] = torch.full((4,), 3, dtype=torch.int32)
    args[FINISHED][:2], args[LENGTH][:2], args[LIMIT][:2], args[COUNT][:2] = False, 5, 20, 3
    # Survivals 0.9, 0.72, 0.36 and 0.8, 0.8, 0.08: the third draft of slot 0 is the weakest but one.
    args[CONFIDENCE][0] = torch.tensor([0.9, 0.8, 0.5])
    args[CONFIDENCE][1] = torch.tensor([0.8, 1.0, 0.1])
    run(*args)
    assert chosen(args) == [2, 2, 0]
    assert args[CU_TOKENS].tolist() == [0, 3, 6, 6]
    assert args[WIDTH_INDEX].tolist() == [3]
    args[COUNT][:2], args[BUDGET][0] = 3, 5
    run(*args)
    assert chosen(args) == [2, 3, 0]
    args[COUNT][:2], args[BUDGET][0] = 3, 0
    run(*args)
    assert chosen(args) == [0, 0, 0]
    assert args[CU_TOKENS].tolist() == [0, 1, 2, 2]


@BOTH
def test_equal_rows_share_position_by_position(run: Any) -> None:
    args = budget_arguments(0, rows=3, num_drafts=3)
    args[FINISHED][args[ROWS][:3].long()] = False
    args[CONFIDENCE][:], args[LIMIT][:], args[COUNT][:] = 1.0, 48, 3
    args[LENGTH][:], args[DRAFT_LIMIT][:] = 5, 3
    for budget, wanted in ((1, [1, 0, 0]), (4, [2, 1, 1]), (8, [3, 3, 2])):
        args[COUNT][:], args[BUDGET][0] = 3, budget
        run(*args)
        assert chosen(args)[:3] == wanted


def test_reference_is_capture_safe() -> None:
    check_capture_safe(budget_topk_reference, budget_arguments(2))


def test_registration() -> None:
    check_registration(budget_topk, budget_arguments(3))
