"""The Triton kernels of adaptive verification against their references."""

from __future__ import annotations

import pytest
from adaptive_cases import choosing, estimating, keeping, learning
from hypothesis import given, settings
from hypothesis import strategies as st
from round_cases import assert_same_effect, refuses

from draftgraph.kernels.choose_budget import choose_budget_reference, choose_budget_triton
from draftgraph.kernels.estimate_acceptance import estimate_acceptance_reference, estimate_acceptance_triton
from draftgraph.kernels.keep_drafting import keep_drafting_reference, keep_drafting_triton
from draftgraph.kernels.learn_acceptance import learn_acceptance_reference, learn_acceptance_triton

SIZES = {"seed": st.integers(0, 10**6), "rows": st.integers(1, 16), "num_drafts": st.integers(1, 9)}


@settings(max_examples=40, deadline=None)
@given(**SIZES, levels=st.sampled_from([0, 1, 2, 4]), probing=st.booleans())
def test_choose_budget(seed, rows, num_drafts, levels, probing):
    args = choosing(seed, rows=rows, num_drafts=num_drafts, levels=levels, probing=probing)
    assert_same_effect(choose_budget_triton, choose_budget_reference, args)


@settings(max_examples=40, deadline=None)
@given(**SIZES, adaptive=st.booleans())
def test_keep_drafting(seed, rows, num_drafts, adaptive):
    args = keeping(seed, rows=rows, num_drafts=num_drafts, adaptive=adaptive)
    assert_same_effect(keep_drafting_triton, keep_drafting_reference, args)


@settings(max_examples=40, deadline=None)
@given(**SIZES, learned=st.booleans())
def test_estimate_acceptance(seed, rows, num_drafts, learned):
    args = estimating(seed, rows=rows, num_drafts=num_drafts, learned=learned)
    assert_same_effect(estimate_acceptance_triton, estimate_acceptance_reference, args)


@settings(max_examples=60, deadline=None)
@given(**SIZES, learns=st.sampled_from([True, True, False]))
def test_learn_acceptance(seed, rows, num_drafts, learns):
    args = learning(seed, rows=rows, num_drafts=num_drafts, learns=learns)
    assert_same_effect(learn_acceptance_triton, learn_acceptance_reference, args)


@pytest.mark.parametrize(
    ("launch", "args", "index", "change", "message"),
    [
        (choose_budget_triton, choosing(4), 0, lambda x: x.int(), "finished has dtype int32; accepted: bool"),
        (choose_budget_triton, choosing(4), 4, lambda x: x[:2], "draft_limit has 2 entries"),
        (choose_budget_triton, choosing(4), 7, lambda x: x.double(), "acceptance has dtype float64"),
        (choose_budget_triton, choosing(4), 7, lambda x: x.repeat(1, 1000), "draft_cost has shape"),
        (choose_budget_triton, choosing(4), 8, lambda x: x[:-1], "verify_cost has shape"),
        (choose_budget_triton, choosing(4), 10, lambda x: x.long(), "rounds has dtype int64"),
        (keep_drafting_triton, keeping(4), 6, lambda x: None, "go together; some of them are None"),
        (keep_drafting_triton, keeping(4), 10, lambda x: 3, "step is 3; accepted: 0 to 2"),
        (keep_drafting_triton, keeping(4), 3, lambda x: x[:1], "draft_limit has 1 entries"),
        (estimate_acceptance_triton, estimating(4), 3, lambda x: x[:-1], "weights has shape"),
        (estimate_acceptance_triton, estimating(4), 7, lambda x: x.half(), "acceptance has dtype float16"),
        (learn_acceptance_triton, learning(4), 10, lambda x: None, "sums and weights go together"),
        (learn_acceptance_triton, learning(4), 10, lambda x: x.int(), "sums has dtype int32"),
        (learn_acceptance_triton, learning(4), 8, lambda x: x[:-1], "forecast has shape"),
    ],
)
def test_what_a_kernel_cannot_take_is_refused(launch, args, index, change, message):
    refuses(launch, args, index, change, message)
