"""The Triton kernels of `pack_window` and `pack_prefill` against their references."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import random_round
from round_cases import assert_same_effect, refuses

from draftgraph.kernels.pack_window import (
    pack_prefill_reference,
    pack_prefill_triton,
    pack_window_reference,
    pack_window_triton,
)


def window_arguments(seed, rows=3, num_drafts=3):
    state, bucket = random_round(seed, rows=rows, num_drafts=num_drafts)
    return [
        state.tokens,
        state.length,
        state.draft_tokens,
        state.cu_tokens[: bucket + 1],
        state.slot_of_row[:bucket],
        state.window_tokens,
        state.window_positions,
        state.window_slots,
        state.window_rows,
    ]


def prefill_arguments(seed, width, start, count, context=24):
    state, _ = random_round(seed, context=context)
    window = [torch.full((width,), 99, dtype=torch.int32) for _ in range(4)]
    place = [torch.full((size,), 99, dtype=torch.int32) for size in (2, 1, 1)]
    slot = torch.tensor([seed % state.shape.slots], dtype=torch.int32)
    return [state.tokens, slot, torch.tensor([start, count], dtype=torch.int32), *window, *place]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**20), rows=st.integers(1, 16), num_drafts=st.integers(0, 7))
def test_random_windows(seed, rows, num_drafts):
    assert_same_effect(pack_window_triton, pack_window_reference, window_arguments(seed, rows, num_drafts))


@pytest.mark.parametrize("width", [1, 63, 64, 65, 200])
def test_padding_over_several_blocks(width):
    args = window_arguments(3, 4, 3)
    args[3].clamp_(max=width)
    args[5:] = [torch.full((width,), 99, dtype=torch.int32) for _ in range(4)]
    assert_same_effect(pack_window_triton, pack_window_reference, args)


def test_no_window_at_all():
    args = window_arguments(5)
    args[3].zero_()
    assert_same_effect(pack_window_triton, pack_window_reference, args)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**20), width=st.integers(1, 24), start=st.integers(0, 23), count=st.integers(0, 24))
def test_random_chunks(seed, width, start, count):
    args = prefill_arguments(seed, width, start, min(count, width, 24 - start))
    assert_same_effect(pack_prefill_triton, pack_prefill_reference, args)


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 600])
def test_chunks_over_several_blocks(count):
    args = prefill_arguments(1, 600, 7, count, context=640)
    assert_same_effect(pack_prefill_triton, pack_prefill_reference, args)


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda x: x.long(), "tokens has dtype int64; accepted: int32"),
        (0, lambda x: x.t().contiguous().t(), "tokens has strides"),
        (1, lambda x: x[:1], r"length has shape \[1\]; accepted: \["),
        (2, lambda x: x[:-1], "draft_tokens has shape"),
        (3, lambda x: x[:-1], "cu_tokens has shape"),
        (4, lambda x: x.to("meta"), "slot_of_row is on meta"),
        (6, lambda x: x[:-1], "window_positions has shape"),
        (8, lambda x: x.long(), "window_rows has dtype int64"),
    ],
)
def test_what_the_window_kernel_cannot_take_is_refused(index, change, message):
    refuses(pack_window_triton, window_arguments(4), index, change, message)


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda x: x[0], "tokens has shape"),
        (1, lambda x: x.repeat(2), r"prefill_slot has shape \[2\]; accepted: \[1\]"),
        (2, lambda x: x.long(), "prefill_range has dtype int64"),
        (3, lambda x: x[None], "window_tokens has shape"),
        (7, lambda x: x[:1], "cu_tokens has shape"),
        (8, lambda x: x.to("meta"), "base is on meta"),
        (9, lambda x: x.repeat(2), "slot_of_row has shape"),
    ],
)
def test_what_the_prefill_kernel_cannot_take_is_refused(index, change, message):
    refuses(pack_prefill_triton, prefill_arguments(4, 8, 0, 4), index, change, message)
