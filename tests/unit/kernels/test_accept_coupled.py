from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import assert_same_effect, check_capture_safe, check_registration, random_round

from draftgraph.graphs.state import DecodeState
from draftgraph.kernels.accept_coupled import accept_coupled, accept_coupled_reference

BOTH = pytest.mark.parametrize("accept", [accept_coupled, accept_coupled_reference])


def arguments(state: DecodeState, bucket: int) -> list[Any]:
    return [
        state.sampled,
        state.token_failed,
        state.draft_tokens,
        state.cu_tokens[: bucket + 1],
        state.slot_of_row[:bucket],
        state.accepted,
        state.emitted,
        state.failed,
    ]


@given(seed=st.integers(0, 10**6), rows=st.integers(1, 5), num_drafts=st.integers(0, 4))
@settings(max_examples=200, deadline=None)
def test_cpu_equals_reference(seed: int, rows: int, num_drafts: int) -> None:
    state, bucket = random_round(seed, rows=rows, num_drafts=num_drafts, vocab=2)
    assert_same_effect(accept_coupled, accept_coupled_reference, arguments(state, bucket))


@BOTH
@pytest.mark.parametrize(
    ("drafts", "verified", "accepted", "emitted"),
    [
        ([1, 2, 3], 3, 3, [1, 2, 3, 4]),
        ([1, 2, 0], 3, 2, [1, 2, 3]),
        ([0, 2, 3], 3, 0, [1]),
        ([1, 2, 3], 1, 1, [1, 2]),
        ([1, 2, 3], 0, 0, [1]),
        ([1, -1, 3], 3, 1, [1, 2]),
    ],
)
def test_by_hand(accept: Any, drafts: list[int], verified: int, accepted: int, emitted: list[int]) -> None:
    """The target's tokens are 1, 2, 3, 4; what lies past the emitted tokens keeps its old content."""
    state, _ = random_round(0, rows=1, num_drafts=3)
    slot = int(state.slot_of_row[0])
    state.cu_tokens[:2] = torch.tensor([0, verified + 1])
    state.sampled[:4] = torch.tensor([1, 2, 3, 4])
    state.token_failed[:] = False
    state.draft_tokens[slot] = torch.tensor(drafts)
    state.emitted[slot] = 9
    accept(*arguments(state, 1))
    assert state.accepted[slot] == accepted
    assert state.emitted[slot].tolist() == emitted + [9] * (4 - len(emitted))
    assert not state.failed[slot]


@BOTH
@pytest.mark.parametrize(("position", "failed"), [(0, True), (1, True), (2, False)])
def test_only_used_positions_fail_the_row(accept: Any, position: int, failed: bool) -> None:
    state, _ = random_round(0, rows=1, num_drafts=3)
    slot = int(state.slot_of_row[0])
    state.cu_tokens[:2] = torch.tensor([0, 4])
    state.sampled[:4] = torch.tensor([1, 2, 3, 4])
    state.draft_tokens[slot] = torch.tensor([1, 0, 3])
    state.token_failed[:] = False
    state.token_failed[position] = True
    accept(*arguments(state, 1))
    assert state.failed[slot] == failed


@BOTH
def test_empty_window(accept: Any) -> None:
    state, _ = random_round(0, rows=1, num_drafts=3)
    slot = int(state.slot_of_row[0])
    state.cu_tokens[:2] = 0
    state.accepted[slot], state.failed[slot] = 2, True
    before = state.emitted.clone()
    accept(*arguments(state, 1))
    assert state.accepted[slot] == 0
    assert state.failed[slot]
    assert torch.equal(state.emitted, before)


def test_reference_is_capture_safe() -> None:
    check_capture_safe(accept_coupled_reference, arguments(*random_round(2)))


def test_registration() -> None:
    check_registration(accept_coupled, arguments(*random_round(3)))
