from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import assert_same_effect, check_capture_safe, check_registration, random_round

from draftgraph.graphs.state import DecodeState
from draftgraph.kernels.accept_synthetic import accept_synthetic, accept_synthetic_reference

BOTH = pytest.mark.parametrize("accept", [accept_synthetic, accept_synthetic_reference])


def arguments(state: DecodeState, bucket: int, rates: list[float]) -> list[Any]:
    return [
        state.sampled,
        state.token_failed,
        state.window_positions,
        state.draft_tokens,
        torch.tensor(rates, dtype=torch.float32),
        state.seed,
        state.cu_tokens[: bucket + 1],
        state.slot_of_row[:bucket],
        state.accepted,
        state.emitted,
        state.failed,
    ]


def random_rates(seed: int, count: int) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    rates = torch.rand(count, generator=generator)
    extreme = torch.rand(count, generator=generator)
    return torch.where(extreme < 0.2, 0.0, torch.where(extreme > 0.6, 1.0, rates)).tolist()


@given(seed=st.integers(0, 10**6), rows=st.integers(1, 5), num_drafts=st.integers(0, 4))
@settings(max_examples=200, deadline=None)
def test_cpu_equals_reference(seed: int, rows: int, num_drafts: int) -> None:
    state, bucket = random_round(seed, rows=rows, num_drafts=num_drafts)
    args = arguments(state, bucket, random_rates(seed, num_drafts))
    assert_same_effect(accept_synthetic, accept_synthetic_reference, args)


@BOTH
@pytest.mark.parametrize(
    ("drafts", "rates", "verified", "emitted"),
    [
        ([5, 6, 5], [1.0, 1.0, 1.0], 3, [5, 6, 5, 4]),
        ([5, 6, 5], [1.0, 0.0, 1.0], 3, [5, 2]),
        ([5, 6, 5], [0.0, 1.0, 1.0], 3, [1]),
        ([5, 6, 5], [1.0, 1.0, 1.0], 1, [5, 2]),
        ([5, -1, 5], [1.0, 1.0, 1.0], 3, [5, 2]),
        ([5, 6, 5], [1.0, 1.0, 1.0], 0, [1]),
    ],
)
def test_by_hand(accept: Any, drafts: list[int], rates: list[float], verified: int, emitted: list[int]) -> None:
    """The target's tokens are 1, 2, 3, 4: none of them is a draft."""
    state, _ = random_round(0, rows=1, num_drafts=3)
    slot = int(state.slot_of_row[0])
    state.cu_tokens[:2] = torch.tensor([0, verified + 1])
    state.sampled[:4] = torch.tensor([1, 2, 3, 4])
    state.token_failed[:] = False
    state.draft_tokens[slot] = torch.tensor(drafts)
    state.emitted[slot] = 9
    accept(*arguments(state, 1, rates))
    assert state.accepted[slot] == len(emitted) - 1
    assert state.emitted[slot].tolist() == emitted + [9] * (4 - len(emitted))
    assert not state.failed[slot]


def test_the_rates_are_met() -> None:
    """Over 20,000 positions, the shares that accept one, two and three drafts, within 5 standard deviations."""
    rates, rounds = [0.9, 0.5, 0.2], 20_000
    state, _ = random_round(0, rows=1, num_drafts=3)
    slot = int(state.slot_of_row[0])
    state.cu_tokens[:2] = torch.tensor([0, 4])
    state.draft_tokens[slot] = 1
    counts = torch.zeros(4)
    args = arguments(state, 1, rates)
    for index in range(rounds):
        state.window_positions[:4] = torch.arange(4 * index, 4 * index + 4)
        accept_synthetic(*args)
        counts[int(state.accepted[slot])] += 1
    wanted = 1.0
    for drafts, rate in enumerate(rates, 1):
        wanted *= rate
        share = float(counts[drafts:].sum()) / rounds
        assert abs(share - wanted) < 5 * (wanted * (1 - wanted) / rounds) ** 0.5


@BOTH
@pytest.mark.parametrize(("position", "failed"), [(0, True), (1, True), (2, False)])
def test_only_used_positions_fail_the_row(accept: Any, position: int, failed: bool) -> None:
    state, _ = random_round(0, rows=1, num_drafts=3)
    slot = int(state.slot_of_row[0])
    state.cu_tokens[:2] = torch.tensor([0, 4])
    state.draft_tokens[slot] = 1
    state.token_failed[:] = False
    state.token_failed[position] = True
    accept(*arguments(state, 1, [1.0, 0.0, 1.0]))
    assert state.failed[slot] == failed


@BOTH
def test_empty_window(accept: Any) -> None:
    state, _ = random_round(0, rows=1, num_drafts=3)
    slot = int(state.slot_of_row[0])
    state.cu_tokens[:2] = 0
    state.accepted[slot], state.failed[slot] = 2, True
    before = state.emitted.clone()
    accept(*arguments(state, 1, [1.0, 1.0, 1.0]))
    assert state.accepted[slot] == 0
    assert state.failed[slot]
    assert torch.equal(state.emitted, before)


def test_reference_is_capture_safe() -> None:
    check_capture_safe(accept_synthetic_reference, arguments(*random_round(2), [0.5, 0.5, 0.5]))


def test_registration() -> None:
    check_registration(accept_synthetic, arguments(*random_round(3), [0.5, 0.5, 0.5]))
