"""The Triton kernels of a drafting model's step against their references."""

from __future__ import annotations

import pytest
import torch
from draft_cases import (
    advance_arguments,
    argmax_arguments,
    block_arguments,
    distribution_arguments,
    merge_arguments,
    tail_arguments,
    unseen_arguments,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from round_cases import assert_same_effect, refuses

from draftgraph.kernels import vocabulary_parts as sizes
from draftgraph.kernels.advance_draft import advance_draft_reference, advance_draft_triton
from draftgraph.kernels.draft_argmax import draft_argmax_reference, draft_argmax_triton
from draftgraph.kernels.draft_distribution import draft_distribution_reference, draft_distribution_triton
from draftgraph.kernels.merge_drafts import merge_drafts_reference, merge_drafts_triton
from draftgraph.kernels.pack_block import pack_block_reference, pack_block_triton
from draftgraph.kernels.pack_tail import pack_tail_reference, pack_tail_triton
from draftgraph.kernels.pack_unseen import pack_unseen_reference, pack_unseen_triton

SEEDS = st.integers(0, 10**6)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    monkeypatch.setattr(sizes, "LEAST_PART", 32)


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, rows=st.integers(1, 14), tail=st.integers(1, 4), mapped=st.booleans(), spare=st.integers(0, 3))
def test_pack_tail(seed, rows, tail, mapped, spare):
    arguments = tail_arguments(seed, rows=rows, tail=tail, mapped=mapped, spare=spare)
    assert_same_effect(pack_tail_triton, pack_tail_reference, arguments)


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, rows=st.sampled_from([1, 3, 14]), size=st.integers(1, 12), spare=st.integers(0, 3))
def test_pack_block(seed, rows, size, spare):
    arguments = block_arguments(seed, rows=rows, size=size, spare=spare)
    assert_same_effect(pack_block_triton, pack_block_reference, arguments)


@settings(max_examples=20, deadline=None)
@given(
    seed=SEEDS,
    rows=st.sampled_from([1, 3, 14]),
    masks=st.integers(0, 5),
    spare=st.integers(0, 3),
    ring=st.sampled_from([0, 8]),
)
def test_pack_unseen(seed, rows, masks, spare, ring):
    arguments = unseen_arguments(seed, rows=rows, masks=masks, spare=spare, ring=ring)
    assert_same_effect(pack_unseen_triton, pack_unseen_reference, arguments)


def test_pack_unseen_of_more_tokens_than_a_chunk():
    assert_same_effect(pack_unseen_triton, pack_unseen_reference, unseen_arguments(5, rows=14, masks=9))


@settings(max_examples=30, deadline=None)
@given(
    seed=SEEDS,
    rows=st.integers(1, 4),
    vocab=st.sampled_from([1, 7, 31, 32, 33, 130]),
    dtype=DTYPES,
    constrained=st.booleans(),
    coarse=st.booleans(),
    renamed=st.booleans(),
    spare=st.sampled_from([0, 1, 5]),
)
def test_draft_argmax(seed, rows, vocab, dtype, constrained, coarse, renamed, spare):
    options = {"constrained": constrained, "coarse": coarse, "renamed": renamed, "spare": spare}
    arguments = argmax_arguments(seed, rows=rows, vocab=vocab, dtype=dtype, **options)
    assert_same_effect(draft_argmax_triton, draft_argmax_reference, arguments)


def test_draft_argmax_where_nothing_is_allowed():
    arguments = argmax_arguments(1, rows=2)
    arguments[1] = torch.zeros(40, dtype=torch.bool)
    assert_same_effect(draft_argmax_triton, draft_argmax_reference, arguments)


@settings(max_examples=30, deadline=None)
@given(
    seed=SEEDS,
    rows=st.integers(1, 4),
    vocab=st.sampled_from([7, 33, 70]),
    dtype=DTYPES,
    step=st.integers(0, 2),
    spare=st.sampled_from([0, 1, 5]),
)
def test_draft_distribution(seed, rows, vocab, dtype, step, spare):
    arguments = distribution_arguments(seed, rows=rows, vocab=vocab, dtype=dtype, step=step, spare=spare)
    assert_same_effect(draft_distribution_triton, draft_distribution_reference, arguments)


@settings(max_examples=30, deadline=None)
@given(
    seed=SEEDS,
    rows=st.integers(1, 14),
    step=st.integers(0, 2),
    shift=st.sampled_from([-9, -2, 1]),
    margin=st.integers(0, 1),
    mapped=st.booleans(),
    spare=st.integers(0, 3),
)
def test_advance_draft(seed, rows, step, shift, margin, mapped, spare):
    arguments = advance_arguments(seed, rows=rows, step=step, shift=shift, margin=margin, mapped=mapped, spare=spare)
    assert_same_effect(advance_draft_triton, advance_draft_reference, arguments)


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, rows=st.integers(1, 14), members=st.integers(1, 4), num_drafts=st.sampled_from([1, 3, 5, 16, 17]))
def test_merge_drafts(seed, rows, members, num_drafts):
    arguments = merge_arguments(seed, rows=rows, members=members, num_drafts=num_drafts)
    assert_same_effect(merge_drafts_triton, merge_drafts_reference, arguments)


def finite_logits(seed):
    return argmax_arguments(seed, rows=2)


@pytest.mark.parametrize(
    ("launch", "arguments", "index", "change", "message"),
    [
        (pack_tail_triton, tail_arguments, 0, lambda x: x.long(), "tokens has dtype int64; accepted: int32"),
        (pack_tail_triton, tail_arguments, 1, lambda x: x[1:], "length has shape"),
        (pack_tail_triton, tail_arguments, 2, lambda x: x.int(), "finished has dtype int32; accepted: bool"),
        (pack_tail_triton, tail_arguments, 3, lambda x: x.to("meta"), "slot_of_row is on meta"),
        (pack_tail_triton, tail_arguments, 5, lambda x: 0, "tail is 0; accepted: 1 to 2, so that"),
        (pack_tail_triton, tail_arguments, 5, lambda x: 3, "tail is 3; accepted: 1 to 2, so that"),
        (pack_tail_triton, tail_arguments, 8, lambda x: x[1:], "window_slots has shape"),
        (pack_tail_triton, tail_arguments, 10, lambda x: x[1:], "cu_tokens has shape"),
        (pack_tail_triton, tail_arguments, 12, lambda x: x[1:], "last has . entries; accepted: at least"),
        (pack_block_triton, block_arguments, 1, lambda x: x[1:], "length has shape"),
        (pack_block_triton, block_arguments, 4, lambda x: 0, "size is 0; accepted: 1 to 4"),
        (pack_block_triton, block_arguments, 4, lambda x: 5, "size is 5; accepted: 1 to 4"),
        (pack_block_triton, block_arguments, 8, lambda x: x[1:], "window_slots has shape"),
        (pack_block_triton, block_arguments, 11, lambda x: x.long(), "window_slot_of_row has dtype int64"),
        (pack_unseen_triton, unseen_arguments, 2, lambda x: x[1:], "limit has shape"),
        (pack_unseen_triton, unseen_arguments, 5, lambda x: x.long(), "seen has dtype int64"),
        (pack_unseen_triton, unseen_arguments, 7, lambda x: -1, "masks is -1; accepted: 0 or more"),
        (pack_unseen_triton, unseen_arguments, 7, lambda x: 9, "queries has . entries; accepted: at least"),
        (pack_unseen_triton, unseen_arguments, 10, lambda x: -1, "ring is -1; accepted: 0 for none, or more"),
        (pack_unseen_triton, unseen_arguments, 18, lambda x: x[1:], "states has shape"),
        (draft_argmax_triton, finite_logits, 0, lambda x: x.double(), "logits has dtype float64"),
        (draft_argmax_triton, finite_logits, 0, lambda x: x[:, :0], "logits has no token"),
        (draft_argmax_triton, finite_logits, 1, lambda x: torch.zeros(3).bool(), r"allowed has shape \[3\]"),
        (draft_argmax_triton, finite_logits, 2, lambda x: torch.zeros(3).int(), r"ids has shape \[3\]"),
        (draft_argmax_triton, finite_logits, 3, lambda x: x.long(), "chosen has dtype int64"),
        (draft_argmax_triton, finite_logits, 5, lambda x: x.int(), "failed has dtype int32"),
        (draft_distribution_triton, distribution_arguments, 0, lambda x: x[:1], "sampled has shape"),
        (draft_distribution_triton, distribution_arguments, 4, lambda x: x.double(), "temperature has dtype float64"),
        (draft_distribution_triton, distribution_arguments, 7, lambda x: 3, "step is 3; accepted: 0 to 2"),
        (draft_distribution_triton, distribution_arguments, 8, lambda x: x[:, :, 1:], "draft_probs has shape"),
        (advance_draft_triton, advance_arguments, 0, lambda x: x.long(), "chosen has dtype int64"),
        (advance_draft_triton, advance_arguments, 4, lambda x: x[1:], "limit has shape"),
        (advance_draft_triton, advance_arguments, 7, lambda x: torch.zeros(0).int(), "target_ids has no token; acc"),
        (advance_draft_triton, advance_arguments, 8, lambda x: -1, "step is -1; accepted: 0 to 2"),
        (advance_draft_triton, advance_arguments, 10, lambda x: -1, "margin is -1; accepted: 0 or more"),
        (advance_draft_triton, advance_arguments, 12, lambda x: x.double(), "confidence has dtype float64"),
        (advance_draft_triton, advance_arguments, 16, lambda x: x[1:], "window_slots has shape"),
        (advance_draft_triton, advance_arguments, 18, lambda x: x[1:], "base has shape"),
        (merge_drafts_triton, merge_arguments, 0, lambda x: x.long(), "member_tokens has dtype int64"),
        (merge_drafts_triton, merge_arguments, 1, lambda x: x[1:], "member_count has shape"),
        (merge_drafts_triton, merge_arguments, 2, lambda x: x.double(), "member_confidence has dtype float64"),
        (merge_drafts_triton, merge_arguments, 3, lambda x: x.int(), "finished has dtype int32; accepted: bool"),
        (merge_drafts_triton, merge_arguments, 5, lambda x: x[:, 1:], "draft_tokens has shape"),
        (merge_drafts_triton, merge_arguments, 6, lambda x: x[1:], "draft_count has shape"),
    ],
)
def test_what_the_kernels_cannot_take_is_refused(launch, arguments, index, change, message):
    refuses(launch, arguments(4), index, change, message)


def test_windows_without_room_for_the_rows_are_refused():
    """By the window's name, not by that of a number for which nothing would be accepted."""
    tail, block = tail_arguments(4), block_arguments(4)
    tail[6:10] = [x[:1] for x in tail[6:10]]
    refuses(pack_tail_triton, tail, 5, lambda x: 1, "window_tokens has 1 entries; accepted: at least")
    block[6:10] = [x[:1] for x in block[6:10]]
    refuses(pack_block_triton, block, 4, lambda x: 1, "window_tokens has 1 entries; accepted: at least")
