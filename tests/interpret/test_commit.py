"""The Triton kernel of `commit` against its reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import random_round
from round_cases import assert_same_effect, refuses

from draftgraph.kernels.commit import (
    FINISH_CANCELLED,
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_NONE,
    FINISH_STOP,
    commit_reference,
    commit_triton,
)

NAMES = [
    "emitted",
    "accepted",
    "failed",
    "cu_tokens",
    "slot_of_row",
    "stop_token_ids",
    "limit",
    "cancel",
    "pause",
    "tokens",
    "length",
    "finished",
    "finish_reason",
    "ring_tokens",
    "ring_count",
    "rounds",
    "histogram",
    "running",
]


def arguments(seed, rows=3, num_drafts=3, context=24):
    state, bucket = random_round(seed, rows=rows, num_drafts=num_drafts, context=context)
    args = [getattr(state, name) for name in NAMES]
    args[3], args[4] = state.cu_tokens[: bucket + 1], state.slot_of_row[:bucket]
    return args


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**20), rows=st.integers(1, 16), num_drafts=st.integers(0, 7))
def test_random_rounds(seed, rows, num_drafts):
    args = arguments(seed, rows, num_drafts)
    args[17].fill_(bool(seed % 2))
    assert_same_effect(commit_triton, commit_reference, args)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**20), ring=st.integers(4, 9))
def test_a_small_ring_wraps(seed, ring):
    args = arguments(seed, 4, 3)
    args[13] = args[13][:, :ring].contiguous()
    assert_same_effect(commit_triton, commit_reference, args)


def test_more_rows_than_one_tile():
    for num_drafts in (300, 600):
        assert_same_effect(commit_triton, commit_reference, arguments(num_drafts, 6, num_drafts, context=700))


def test_every_finish_reason_and_the_running_flag():
    """One row for each reason and one that goes on, in one launch."""
    args = arguments(1, rows=5, num_drafts=3)
    slots = args[4][:5].long()
    args[3] = torch.tensor([0, 4, 8, 12, 16, 20] + [20] * (len(args[4]) - 5), dtype=torch.int32)
    args[0][slots] = torch.tensor([4, 5, 6, 3], dtype=torch.int32)
    args[1][slots], args[2][slots], args[7][slots], args[8][0] = 3, False, False, False
    args[5][slots], args[6][slots], args[10][slots] = -1, 20, 5
    args[11][slots] = False
    args[2][slots[0]] = True
    args[7][slots[:2]] = True
    args[5][slots[:3], 1] = 6
    args[6][slots[:4]] = 9
    assert_same_effect(commit_triton, commit_reference, args)
    commit_triton(*args)
    wanted = [FINISH_ERROR, FINISH_CANCELLED, FINISH_STOP, FINISH_LENGTH, FINISH_NONE]
    assert args[12][slots].tolist() == wanted
    assert args[10][slots].tolist() == [5, 8, 8, 9, 9]
    assert args[17].item()


def test_a_pause_and_a_bucket_of_padding_leave_the_loop():
    args = arguments(2)
    args[8][0] = True
    assert_same_effect(commit_triton, commit_reference, args)
    args = arguments(3)
    args[3].zero_()
    args[4].fill_(args[0].shape[0] - 1)
    args[17].fill_(True)
    assert_same_effect(commit_triton, commit_reference, args)
    commit_triton(*args)
    assert not args[17].item()


@pytest.mark.parametrize("stops", [0, 1, 5])
def test_any_number_of_stop_tokens(stops):
    for seed in range(5):
        args = arguments(seed, 4, 5)
        args[5] = torch.randint(-1, 7, (args[0].shape[0], stops), dtype=torch.int32)
        assert_same_effect(commit_triton, commit_reference, args)


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda x: x.long(), "emitted has dtype int64; accepted: int32"),
        (1, lambda x: x[:1], r"accepted has shape \[1\]; accepted: \["),
        (2, lambda x: x.int(), "row_failed has dtype int32; accepted: bool"),
        (3, lambda x: x[:-1], "cu_tokens has shape"),
        (5, lambda x: x[0], "stop_token_ids has shape"),
        (8, lambda x: x.repeat(2), "pause has shape"),
        (9, lambda x: x.t().contiguous().t(), "tokens has strides"),
        (11, lambda x: x.to("meta"), "finished is on meta"),
        (13, lambda x: x[:, :3].contiguous(), "the ring holds 3 tokens, fewer than the 4"),
        (14, lambda x: x.int(), "ring_count has dtype int32; accepted: int64"),
        (16, lambda x: x[:, :2].contiguous(), "histogram has shape"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused(index, change, message):
    refuses(commit_triton, arguments(4), index, change, message)
