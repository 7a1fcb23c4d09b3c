"""The Triton kernel of `budget_topk` against its reference."""

from __future__ import annotations

import pytest
from budget_cases import BUDGET, CONFIDENCE, COUNT, FINISHED, LENGTH, LIMIT, budget_arguments
from hypothesis import given, settings
from hypothesis import strategies as st
from round_cases import assert_same_effect, refuses

from draftgraph.kernels.budget_topk import budget_topk_reference, budget_topk_triton


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 16),
    num_drafts=st.integers(0, 9),
    budget=st.integers(-1, 60),
    levels=st.sampled_from([0, 1, 2, 4]),
)
def test_random_rounds(seed, rows, num_drafts, budget, levels):
    args = budget_arguments(seed, rows=rows, num_drafts=num_drafts, budget=budget, levels=levels)
    assert_same_effect(budget_topk_triton, budget_topk_reference, args)


@pytest.mark.parametrize("budget", [0, 1, 17, 23, 24, 1000, -5, 2**31 - 1])
@pytest.mark.parametrize("value", [1.0, 0.0, 0.5, 1e-30])
def test_ties_everywhere(budget, value):
    """The products of 1e-30 sink through the denormal numbers to zero."""
    args = budget_arguments(1, rows=6, num_drafts=4)
    args[FINISHED][:-1], args[LENGTH][:], args[LIMIT][:], args[COUNT][:] = False, 5, 48, 4
    args[CONFIDENCE].fill_(value)
    args[BUDGET][0] = budget
    assert_same_effect(budget_topk_triton, budget_topk_reference, args)


def test_many_rows_of_many_drafts():
    for seed in range(3):
        args = budget_arguments(seed, rows=32, num_drafts=64, budget=500)
        assert_same_effect(budget_topk_triton, budget_topk_reference, args)


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (FINISHED, lambda x: x.int(), "finished has dtype int32; accepted: bool"),
        (CONFIDENCE, lambda x: x.bfloat16(), "confidence has dtype bfloat16; accepted: float32"),
        (CONFIDENCE, lambda x: x[:-1], "confidence has shape"),
        (CONFIDENCE, lambda x: x.t().contiguous().t(), "confidence has strides"),
        (CONFIDENCE, lambda x: x.repeat(1, 1000), "rows of 3000 drafts; accepted: at most 4096"),
        (BUDGET, lambda x: x.long(), "budget has dtype int64"),
        (BUDGET, lambda x: x.repeat(2), "budget has shape"),
        (BUDGET, lambda x: x.to("meta"), "budget is on meta"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused(index, change, message):
    refuses(budget_topk_triton, budget_arguments(4), index, change, message)
