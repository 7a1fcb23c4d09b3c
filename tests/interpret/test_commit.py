"""The Triton kernel of `commit` against its reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import random_round
from round_cases import assert_same_effect, refuses

from draftgraph.kernels.commit import commit_reference
from draftgraph.kernels.commit_triton import commit_triton
from draftgraph.kernels.finish_reasons import (
    FINISH_CANCELLED,
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_NONE,
    FINISH_STOP,
    REASON_SHIFT,
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
    "leave_on_finish",
    "taken",
    "tokens",
    "length",
    "finished",
    "finish_reason",
    "ring_tokens",
    "ring_count",
    "published",
    "rounds",
    "histogram",
    "round_pairs",
    "rounds_left",
    "running",
]
AT = {name: index for index, name in enumerate(NAMES)}


def arguments(seed, rows=3, num_drafts=3, context=24):
    state, bucket = random_round(seed, rows=rows, num_drafts=num_drafts, context=context)
    args = [getattr(state, name) for name in NAMES]
    args[AT["cu_tokens"]], args[AT["slot_of_row"]] = state.cu_tokens[: bucket + 1], state.slot_of_row[:bucket]
    return args


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**20), rows=st.integers(1, 16), num_drafts=st.integers(0, 7))
def test_random_rounds(seed, rows, num_drafts):
    args = arguments(seed, rows, num_drafts)
    args[AT["running"]].fill_(bool(seed % 2))
    if seed % 3 == 0:
        args[AT["round_pairs"]] = None
    assert_same_effect(commit_triton, commit_reference, args)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**20), ring=st.integers(4, 9))
def test_a_small_ring_wraps(seed, ring):
    args = arguments(seed, 4, 3)
    args[AT["ring_tokens"]] = args[AT["ring_tokens"]][:, :ring].contiguous()
    assert_same_effect(commit_triton, commit_reference, args)


def test_more_rows_than_one_tile():
    for num_drafts in (300, 600):
        args = arguments(num_drafts, 6, num_drafts, context=700)
        args[AT["running"]].fill_(True)
        assert_same_effect(commit_triton, commit_reference, args)


def test_every_finish_reason_and_the_running_flag():
    """One row for each reason and one that goes on, in one launch."""
    args = arguments(1, rows=5, num_drafts=3)
    of = dict(zip(NAMES, args, strict=True))
    slots = of["slot_of_row"][:5].long()
    ends = [0, 4, 8, 12, 16, 20]
    args[AT["cu_tokens"]] = torch.tensor(ends + [20] * (len(of["slot_of_row"]) - 5), dtype=torch.int32)
    of["emitted"][slots] = torch.tensor([4, 5, 6, 3], dtype=torch.int32)
    of["accepted"][slots], of["failed"][slots], of["cancel"][slots], of["pause"][0] = 3, False, False, False
    of["stop_token_ids"][slots], of["limit"][slots], of["length"][slots] = -1, 20, 5
    of["finished"][slots], of["leave_on_finish"][0], of["rounds_left"][0] = False, False, 5
    of["taken"].copy_(of["ring_count"])
    of["failed"][slots[0]] = True
    of["cancel"][slots[:2]] = True
    of["stop_token_ids"][slots[:3], 1] = 6
    of["limit"][slots[:4]] = 9
    counts = of["ring_count"][slots]
    assert_same_effect(commit_triton, commit_reference, args)
    commit_triton(*args)
    wanted = [FINISH_ERROR, FINISH_CANCELLED, FINISH_STOP, FINISH_LENGTH, FINISH_NONE]
    assert of["finish_reason"][slots].tolist() == wanted
    assert of["length"][slots].tolist() == [5, 8, 8, 9, 9]
    assert (of["published"][slots] >> REASON_SHIFT).tolist() == wanted
    assert (of["published"][slots] % 2**REASON_SHIFT - counts).tolist() == [0, 3, 3, 4, 4]
    assert of["running"].item()


@pytest.mark.parametrize(
    "flag", [None, "pause", "leave_on_finish", "rounds_left", "taken"], ids=lambda flag: flag or "none of them"
)
def test_each_reason_to_leave_the_loop(flag):
    """Two rows of three go on, the third finishes."""
    args = arguments(5, rows=3, num_drafts=3)
    of = dict(zip(NAMES, args, strict=True))
    slots = of["slot_of_row"][:3].long()
    args[AT["cu_tokens"]] = torch.tensor([0, 4, 8, 12] + [12] * (len(of["slot_of_row"]) - 3), dtype=torch.int32)
    of["accepted"][slots], of["failed"][slots], of["cancel"][slots], of["pause"][0] = 0, False, False, False
    of["stop_token_ids"][slots], of["limit"][slots], of["length"][slots] = -1, 20, 5
    of["finished"][slots], of["leave_on_finish"][0], of["rounds_left"][0] = False, False, 2
    of["limit"][slots[2]] = 6
    of["ring_count"][slots], of["taken"][slots] = 100, 81  # 20 of 24 places in use after the round
    of["taken"][slots[2]] = 0  # the finished row's ring needs no more room
    if flag == "rounds_left":
        of[flag][0] = 1
    elif flag == "taken":
        of[flag][slots[1]] = 80
    elif flag is not None:
        of[flag][0] = True
    assert_same_effect(commit_triton, commit_reference, args)
    commit_triton(*args)
    assert of["running"].item() == (flag is None)


def test_a_bucket_of_padding_leaves_the_loop():
    args = arguments(3)
    args[AT["cu_tokens"]].zero_()
    args[AT["slot_of_row"]].fill_(args[0].shape[0] - 1)
    args[AT["rounds_left"]].fill_(5)
    args[AT["pause"]].fill_(False)
    args[AT["running"]].fill_(True)
    assert_same_effect(commit_triton, commit_reference, args)
    commit_triton(*args)
    assert not args[AT["running"]].item()


@pytest.mark.parametrize("stops", [0, 1, 5])
def test_any_number_of_stop_tokens(stops):
    for seed in range(5):
        args = arguments(seed, 4, 5)
        args[AT["stop_token_ids"]] = torch.randint(-1, 7, (args[0].shape[0], stops), dtype=torch.int32)
        assert_same_effect(commit_triton, commit_reference, args)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("emitted", lambda x: x.long(), "emitted has dtype int64; accepted: int32"),
        ("accepted", lambda x: x[:1], r"accepted has shape \[1\]; accepted: \["),
        ("failed", lambda x: x.int(), "row_failed has dtype int32; accepted: bool"),
        ("cu_tokens", lambda x: x[:-1], "cu_tokens has shape"),
        ("stop_token_ids", lambda x: x[0], "stop_token_ids has shape"),
        ("pause", lambda x: x.repeat(2), "pause has shape"),
        ("leave_on_finish", lambda x: x.int(), "leave_on_finish has dtype int32; accepted: bool"),
        ("taken", lambda x: x[1:], "taken has shape"),
        ("tokens", lambda x: x.t().contiguous().t(), "tokens has strides"),
        ("finished", lambda x: x.to("meta"), "finished is on meta"),
        ("ring_tokens", lambda x: x[:, :3].contiguous(), "the ring holds 3 tokens, fewer than the 4"),
        ("ring_count", lambda x: x.int(), "ring_count has dtype int32; accepted: int64"),
        ("published", lambda x: x.int(), "published has dtype int32; accepted: int64"),
        ("histogram", lambda x: x[:, :2].contiguous(), "histogram has shape"),
        ("round_pairs", lambda x: x[:, 1:].contiguous(), "round_pairs has shape"),
        ("rounds_left", lambda x: x.repeat(2), "rounds_left has shape"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused(name, change, message):
    refuses(commit_triton, arguments(4), AT[name], change, message)
