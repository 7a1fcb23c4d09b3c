from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import assert_same_effect, check_capture_safe, check_registration, random_round

from draftgraph.graphs.state import DecodeState
from draftgraph.kernels.plan_window import plan_window, plan_window_reference

WIDTHS = torch.tensor([1, 2, 4, 8, 16, 32], dtype=torch.int32)


def arguments(state: DecodeState, bucket: int) -> list[Any]:
    return [
        state.finished,
        state.length,
        state.limit,
        state.draft_count,
        state.draft_limit,
        state.slot_of_row[:bucket],
        WIDTHS,
        state.cu_tokens[: bucket + 1],
        state.base[:bucket],
        state.width_index,
    ]


@given(seed=st.integers(0, 10**6), rows=st.integers(1, 5), num_drafts=st.integers(0, 4))
@settings(max_examples=150, deadline=None)
def test_cpu_equals_reference(seed: int, rows: int, num_drafts: int) -> None:
    assert_same_effect(
        plan_window, plan_window_reference, arguments(*random_round(seed, rows=rows, num_drafts=num_drafts))
    )


@pytest.mark.parametrize("plan", [plan_window, plan_window_reference])
def test_by_hand(plan: Any) -> None:
    state, _ = random_round(0, rows=3, num_drafts=3)
    state.finished[:3] = torch.tensor([False, True, False])
    state.length[:3] = torch.tensor([5, 9, 7])
    state.limit[:3] = torch.tensor([20, 20, 9])
    state.draft_count[:3] = torch.tensor([3, 3, 3])
    state = dataclasses.replace(
        state,
        slot_of_row=torch.tensor([2, 0, 1, state.reserved_slot], dtype=torch.int32),
        draft_limit=torch.tensor([3, 3, 2, 1, 0], dtype=torch.int32),
        cu_tokens=torch.full((5,), 99, dtype=torch.int32),
        base=torch.full((4,), 99, dtype=torch.int32),
    )
    plan(*arguments(state, 4))
    # Slot 2 has room for one draft (limit 9), slot 0 is held to the two drafts of two live rows.
    assert state.draft_count[:3].tolist() == [2, 0, 1]
    assert state.cu_tokens.tolist() == [0, 2, 5, 5, 5]
    assert state.base.tolist() == [6, 4, 8, 0]
    assert state.width_index.tolist() == [3]


def test_row_without_room_still_has_its_anchor() -> None:
    state, _ = random_round(1, rows=1)
    slot = int(state.slot_of_row[0])
    state.finished[slot] = False
    state.limit[slot] = state.length[slot]
    plan_window(*arguments(state, 1))
    assert state.cu_tokens[:2].tolist() == [0, 1]
    assert state.draft_count[slot] == 0


def test_reference_is_capture_safe() -> None:
    check_capture_safe(plan_window_reference, arguments(*random_round(2)))


def test_registration() -> None:
    check_registration(plan_window, arguments(*random_round(3)))
