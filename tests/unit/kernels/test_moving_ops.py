"""The ops that move hidden states, tokens and logits between the parts of a round: by hand, and on the CPU."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moving_cases import CASES, FLOAT_CASES, op_of, packing_turns
from op_checks import assert_same_effect, check_capture_safe, check_registration, random_round

from draftgraph.kernels.gather_rows import gather_rows, gathered
from draftgraph.kernels.gather_window import gather_window
from draftgraph.kernels.keep_prompt_state import keep_prompt_state
from draftgraph.kernels.keep_ring import keep_ring
from draftgraph.kernels.keep_states import keep_states
from draftgraph.kernels.pack_turn import pack_turn, pack_turn_reference
from draftgraph.kernels.put_rows import put_rows
from draftgraph.kernels.tokens_after import tokens_after
from draftgraph.kernels.widen_logits import widen_logits, widening_places

SEEDS = st.integers(0, 10**6)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def op_and_reference(case):
    module = importlib.import_module(f"draftgraph.kernels.{op_of(case)}")
    return getattr(module, op_of(case)), getattr(module, f"{op_of(case)}_reference")


@pytest.mark.parametrize("case", CASES)
def test_references_are_capture_safe_and_ops_are_registered(case):
    op, reference = op_and_reference(case)
    for seed in (2, 3):
        check_capture_safe(reference, CASES[case](seed))
    check_registration(op, CASES[case](4))


@pytest.mark.parametrize("case", CASES)
def test_the_cpu_has_the_references_effect(case):
    op, reference = op_and_reference(case)
    for seed in range(12):
        assert_same_effect(op, reference, CASES[case](seed))


@pytest.mark.parametrize("case", FLOAT_CASES)
def test_the_cpu_has_it_in_bfloat16(case):
    op, reference = op_and_reference(case)
    for seed in range(2):
        assert_same_effect(op, reference, FLOAT_CASES[case](seed, dtype=torch.bfloat16))


@given(seed=SEEDS, rows=st.integers(1, 5), modules=st.integers(1, 4), spare=st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_pack_turn_equals_its_reference(seed, rows, modules, spare):
    arguments = packing_turns(seed, rows=rows, modules=modules, spare=spare)
    assert_same_effect(pack_turn, pack_turn_reference, arguments)


def test_rows_are_gathered_by_one_index_and_by_two():
    source = torch.arange(8.0).view(4, 2)
    assert gathered(source, ints(3, 0)).tolist() == [[6, 7], [0, 1]]
    out = torch.empty(2, 2)
    gather_rows(source, ints(1, 0), ints(2, 3), out)
    assert out.tolist() == [[6, 7], [4, 5]]


def test_rows_are_put_at_their_slots_and_padding_nowhere():
    out = torch.zeros(3, 2, 2)
    put_rows(torch.tensor([[1.0, 2], [3, 4], [5, 6]]), ints(1, 2), 1, out)
    assert out.tolist() == [[[0, 0], [0, 0]], [[0, 0], [1, 2]], [[0, 0], [0, 0]]]


def test_a_window_gets_what_was_kept_of_its_anchor_and_drafts():
    kept = torch.arange(6.0).view(2, 3, 1)
    out = torch.empty(5, 1)
    gather_window(kept, ints(5, 9), ints(0, 0, 0, 1, 1), ints(4, 5, 9, 8, 0), out)
    assert out.flatten().tolist() == [0, 1, 2, 3, 3]


def test_states_of_live_rows_are_kept_and_nothing_of_a_round_that_is_dropped():
    kept, seen, start = torch.zeros(4, 4), ints(9, 9, 9), ints(9, 9, 9)
    values = torch.tensor([[1.0, 2], [3, 4], [5, 6]])
    window = (ints(0, 0, -1), ints(7, 0), ints(0, 2, 2), ints(1, 2))
    keep_states(values, *window, torch.tensor([False]), 2, kept, seen, start)
    assert not kept.any()
    assert seen.tolist() == [9, 9, 9] == start.tolist()
    keep_states(values, *window, torch.tensor([True]), 2, kept, seen, start)
    assert kept.tolist() == [[0, 0, 1, 2], [0, 0, 3, 4], [0] * 4, [0] * 4]
    # The second row is padding, on the reserved slot.
    assert seen.tolist() == [9, 7, 9]
    assert start.tolist() == [9, 0, 9]


def test_of_a_prompts_chunk_the_last_state_is_kept():
    kept, seen, start = torch.zeros(5, 1), ints(9, 9), ints(9, 9)
    keep_prompt_state(torch.tensor([[1.0], [2], [3], [4]]), ints(10), ints(0, 3), ints(1), 2, kept, seen, start)
    assert kept.flatten().tolist() == [0, 0, 0, 3, 0]
    assert (seen.tolist(), start.tolist()) == ([9, 12], [9, 3])


def test_a_ring_keeps_the_last_positions():
    kept, seen = torch.zeros(9, 1), ints(9, 9)
    values = torch.tensor([[1.0], [2], [3], [4], [5], [6]])
    # Positions 3 to 7 of slot 0, of which a ring of four keeps the last four; then padding.
    window = (ints(3, 4, 5, 6, 7, 0), ints(0, 0, 0, 0, 0, 1), ints(0, 0, 0, 0, 0, -1), ints(3), ints(0, 5), ints(0))
    keep_ring(values, *window, None, 4, 2, kept, seen)
    assert kept.flatten().tolist() == [2, 3, 4, 5, 0, 0, 0, 0, 0]
    assert seen.tolist() == [5, 9]
    keep_ring(values, *window, torch.tensor([True]), 4, 2, kept, seen)
    assert seen.tolist() == [1, 9]


def test_a_token_after_a_position_is_committed_or_a_draft():
    state, _ = random_round(0, rows=2)
    state.tokens[0, :6] = ints(10, 11, 12, 13, 14, 15)
    state.length[0], state.draft_tokens[0] = 5, ints(20, -1, 22)
    out = ints(0, 0, 0, 0, 0)
    tokens_after(state.tokens, state.length, state.draft_tokens, ints(0, 0, 0, 0, 0), ints(2, 3, 4, 5, 6), 1, out)
    assert out.tolist() == [13, 14, 20, 0, 22]
    tokens_after(state.tokens, state.length, None, ints(0, 0, 0, 0, 0), ints(0, 1, 2, 3, 4), 1, out)
    assert out.tolist() == [11, 12, 13, 14, 15]


@pytest.mark.parametrize("op", [pack_turn, pack_turn_reference])
def test_pack_turn_by_hand(op):
    length, limit = ints(10, 7, 4, 0), ints(20, 10, 30, 0)
    window = [torch.full((8,), 99, dtype=torch.int32) for _ in range(3)]
    ends, base, owners, states = (torch.full((size,), 99, dtype=torch.int32) for size in (4, 3, 3, 8))
    queries = torch.full((4,), 99, dtype=torch.int32)
    # A row with room for a third draft, one without, and one that has nothing to draft from.
    op(length, limit, ints(0, 1, 3), 2, 2, 5, *window, ends, base, owners, states, queries)
    assert window[0].tolist() == [9, 10, 0, 1, 0, 1, 0, 0]
    assert window[1].tolist() == [0, 0, 3, 3, 3, 3, 3, 3]
    assert window[2].tolist() == [0, 0, 1, 1, 2, 2, -1, -1]
    assert ends.tolist() == [0, 2, 4, 6]
    assert (base.tolist(), owners.tolist()) == ([9, 0, 0], [0, 3, 3])
    assert states.tolist() == [0, 5, 1, 6, 2, 7, 0, 0]
    assert queries.tolist() == [1, 3, 5, 0]


def test_logits_are_widened_to_the_targets_vocabulary():
    places = widening_places(ints(3, 0), 5)
    assert places.tolist() == [1, -1, -1, 0, -1]
    out = torch.zeros(1, 5)
    widen_logits(torch.tensor([[1.0, torch.nan]]), places, out)
    assert out[0, 1:].tolist() == [-torch.inf, -torch.inf, 1.0, -torch.inf]
    assert out[0, 0].isnan()
