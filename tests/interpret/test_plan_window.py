"""The Triton kernel of `plan_window` against its reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import random_round
from round_cases import assert_same_effect, refuses

from draftgraph.kernels.plan_window import plan_window_reference, plan_window_triton


def arguments(seed, rows=3, num_drafts=3, widths=(1, 2, 4, 8, 16, 32, 64, 128)):
    state, bucket = random_round(seed, rows=rows, num_drafts=num_drafts)
    return [
        state.finished,
        state.length,
        state.limit,
        state.draft_count,
        state.draft_limit,
        state.slot_of_row[:bucket],
        torch.tensor(widths, dtype=torch.int32),
        state.cu_tokens[: bucket + 1],
        state.base[:bucket],
        state.width_index,
    ]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**20), rows=st.integers(1, 16), num_drafts=st.integers(0, 4))
def test_random_rounds(seed, rows, num_drafts):
    assert_same_effect(plan_window_triton, plan_window_reference, arguments(seed, rows, num_drafts))


@pytest.mark.parametrize("widths", [(64,), (1, 3, 64), (16, 17, 18, 19, 64)])
def test_any_number_of_widths(widths):
    for seed in range(4):
        assert_same_effect(plan_window_triton, plan_window_reference, arguments(seed, 5, 3, widths))


def test_all_rows_are_finished():
    args = arguments(1)
    args[0].fill_(True)
    assert_same_effect(plan_window_triton, plan_window_reference, args)
    plan_window_triton(*args)
    assert not args[7].any()


def test_rows_at_their_limit_keep_their_anchor():
    args = arguments(2)
    args[0][:-1] = False
    args[2].copy_(args[1] - torch.arange(len(args[1])) % 3)
    assert_same_effect(plan_window_triton, plan_window_reference, args)


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda x: x.int(), "finished has dtype int32; accepted: bool"),
        (1, lambda x: x.long(), "length has dtype int64; accepted: int32"),
        (2, lambda x: x[:2], r"limit has shape \[2\]; accepted: \["),
        (3, lambda x: x.repeat(2)[::2], "draft_count has strides"),
        (4, lambda x: x[:2], "draft_limit has 2 entries; accepted: at least"),
        (5, lambda x: x.to("meta"), "slot_of_row is on meta"),
        (6, lambda x: x[None], "widths has shape"),
        (7, lambda x: x[:-1], "cu_tokens has shape"),
        (8, lambda x: x.float(), "base has dtype float32"),
        (9, lambda x: x.repeat(2), "width_index has shape"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused(index, change, message):
    refuses(plan_window_triton, arguments(4), index, change, message)
