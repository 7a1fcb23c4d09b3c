from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import assert_same_effect, check_capture_safe, check_registration, random_round

from draftgraph.graphs.state import DecodeState
from draftgraph.kernels.pack_window import (
    pack_prefill,
    pack_prefill_reference,
    pack_window,
    pack_window_reference,
)


def window_arguments(state: DecodeState, bucket: int) -> list[Any]:
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


def prefill_arguments(state: DecodeState, slot: int, start: int, count: int) -> list[Any]:
    state.prefill_slot[0] = slot
    state.prefill_range.copy_(torch.tensor([start, count]))
    return [
        state.tokens,
        state.prefill_slot,
        state.prefill_range,
        state.window_tokens,
        state.window_positions,
        state.window_slots,
        state.window_rows,
        state.cu_tokens[:2],
        state.base[:1],
        state.slot_of_row[:1],
    ]


@given(seed=st.integers(0, 10**6), rows=st.integers(1, 5), num_drafts=st.integers(0, 4))
@settings(max_examples=150, deadline=None)
def test_cpu_equals_reference(seed: int, rows: int, num_drafts: int) -> None:
    state, bucket = random_round(seed, rows=rows, num_drafts=num_drafts)
    assert_same_effect(pack_window, pack_window_reference, window_arguments(state, bucket))


@given(seed=st.integers(0, 10**6), start=st.integers(0, 23), count=st.integers(0, 12))
@settings(max_examples=100, deadline=None)
def test_prefill_cpu_equals_reference(seed: int, start: int, count: int) -> None:
    state, _ = random_round(seed)
    assert_same_effect(
        pack_prefill,
        pack_prefill_reference,
        prefill_arguments(state, seed % state.shape.slots, start, min(count, 24 - start)),
    )


@pytest.mark.parametrize("pack", [pack_window, pack_window_reference])
def test_by_hand(pack: Any) -> None:
    state, _ = random_round(0, rows=2, num_drafts=3)
    state = dataclasses.replace(
        state,
        slot_of_row=torch.tensor([1, 3, 0, state.reserved_slot], dtype=torch.int32),
        cu_tokens=torch.tensor([0, 3, 3, 4, 4], dtype=torch.int32),
    )
    state.tokens[1, 4], state.tokens[0, 6] = 5, 6
    state.length[1], state.length[0] = 5, 7
    state.draft_tokens[1] = torch.tensor([2, -1, 4])
    pack(*window_arguments(state, 4))
    reserved, width = state.reserved_slot, state.window_tokens.shape[0]
    padding = width - 4
    assert state.window_tokens.tolist() == [5, 2, 0, 6] + [0] * padding
    assert state.window_positions.tolist() == [4, 5, 6, 6] + [0] * padding
    assert state.window_slots.tolist() == [1, 1, 1, 0] + [reserved] * padding
    assert state.window_rows.tolist() == [0, 0, 0, 2] + [-1] * padding


@pytest.mark.parametrize("pack", [pack_prefill, pack_prefill_reference])
def test_prefill_by_hand(pack: Any) -> None:
    state, _ = random_round(0, rows=2)
    pack(*prefill_arguments(state, 1, 4, 5))
    reserved, padding = state.reserved_slot, state.window_tokens.shape[0] - 5
    assert state.window_tokens.tolist() == state.tokens[1, 4:9].tolist() + [0] * padding
    assert state.window_positions.tolist() == [4, 5, 6, 7, 8] + [0] * padding
    assert state.window_slots.tolist() == [1] * 5 + [reserved] * padding
    assert state.window_rows.tolist() == [0] * 5 + [-1] * padding
    assert state.cu_tokens[:2].tolist() == [0, 5]
    assert state.base[0] == 4
    assert state.slot_of_row[0] == 1


def test_references_are_capture_safe() -> None:
    state, bucket = random_round(2)
    check_capture_safe(pack_window_reference, window_arguments(state, bucket))
    check_capture_safe(pack_prefill_reference, prefill_arguments(state, 0, 2, 3))


def test_registration() -> None:
    state, bucket = random_round(3)
    check_registration(pack_window, window_arguments(state, bucket))
    check_registration(pack_prefill, prefill_arguments(state, 0, 2, 3))
