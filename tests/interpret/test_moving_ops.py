"""The Triton kernels that move hidden states, tokens and logits against their references, bit by bit."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moving_cases import (
    CASES,
    FLOAT_CASES,
    INTEGER_CASES,
    dropping,
    following_tokens,
    gathering,
    gathering_windows,
    keeping_prompts,
    keeping_rings,
    keeping_states,
    op_of,
    packing_turns,
    placing_drafts,
    putting,
    widening,
)
from round_cases import assert_same_effect, refuses

from draftgraph.kernels.draft_positions import draft_positions_triton
from draftgraph.kernels.drop_unknown_drafts import drop_unknown_drafts_triton
from draftgraph.kernels.gather_rows import gather_rows_triton
from draftgraph.kernels.gather_window import gather_window_triton
from draftgraph.kernels.keep_prompt_state import keep_prompt_state_triton
from draftgraph.kernels.keep_ring import keep_ring_triton
from draftgraph.kernels.keep_states import keep_states_triton
from draftgraph.kernels.pack_turn import pack_turn_reference, pack_turn_triton
from draftgraph.kernels.put_rows import put_rows_triton
from draftgraph.kernels.tokens_after import tokens_after_triton
from draftgraph.kernels.widen_logits import widen_logits_triton

SEEDS = st.integers(0, 10**6)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def launch_and_reference(case):
    module = importlib.import_module(f"draftgraph.kernels.{op_of(case)}")
    return getattr(module, f"{op_of(case)}_triton"), getattr(module, f"{op_of(case)}_reference")


@pytest.mark.parametrize("case", INTEGER_CASES)
def test_kernels_of_integers(case):
    for seed in range(14):
        assert_same_effect(*launch_and_reference(case), CASES[case](seed))


@pytest.mark.parametrize("case", FLOAT_CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_of_numbers(case, dtype):
    for seed in range(8):
        assert_same_effect(*launch_and_reference(case), FLOAT_CASES[case](seed, dtype=dtype))


@pytest.mark.parametrize("case", [case for case in FLOAT_CASES if case != "widen_logits"])
def test_more_columns_than_a_program_moves(case):
    assert_same_effect(*launch_and_reference(case), FLOAT_CASES[case](2, size=1030))
    assert_same_effect(*launch_and_reference(case), FLOAT_CASES[case](5, size=1030))


def test_more_tokens_than_a_program_widens():
    assert_same_effect(*launch_and_reference("widen_logits"), widening(2, vocab=1100))


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, rows=st.sampled_from([1, 3, 14]), modules=st.integers(1, 4), spare=st.integers(0, 3))
def test_pack_turn(seed, rows, modules, spare):
    arguments = packing_turns(seed, rows=rows, modules=modules, spare=spare)
    assert_same_effect(pack_turn_triton, pack_turn_reference, arguments)


@pytest.mark.parametrize(
    ("launch", "arguments", "index", "change", "message"),
    [
        (gather_rows_triton, gathering, 0, lambda x: x.double(), "source has dtype float64"),
        (gather_rows_triton, gathering, 1, lambda x: x.long(), "index has dtype int64"),
        (gather_rows_triton, gathering, 3, lambda x: x[1:], "out has shape"),
        (put_rows_triton, putting, 0, lambda x: x[:1], "source has 1 rows; accepted: at least"),
        (put_rows_triton, putting, 2, lambda x: 4, "place is 4; accepted: 0 to 3"),
        (put_rows_triton, putting, 3, lambda x: x[..., 1:], "out has shape"),
        (gather_window_triton, gathering_windows, 1, lambda x: x[1:], "length has shape"),
        (gather_window_triton, gathering_windows, 4, lambda x: x[1:], "out has shape"),
        (keep_states_triton, keeping_states, 1, lambda x: x[1:], "rows has shape"),
        (keep_states_triton, keeping_states, 5, lambda x: x.int(), "running has dtype int32; accepted: bool"),
        (keep_states_triton, keeping_states, 6, lambda x: 6, "column is 6; accepted: 0 to 5"),
        (keep_states_triton, keeping_states, 7, lambda x: x[:2], "kept has 2 rows; accepted: at least"),
        (keep_prompt_state_triton, keeping_prompts, 1, lambda x: x.repeat(2), "base has shape"),
        (keep_prompt_state_triton, keeping_prompts, 4, lambda x: 5, "first is 5; accepted: 0 to 4"),
        (keep_ring_triton, keeping_rings, 2, lambda x: x[1:], "slots has shape"),
        (keep_ring_triton, keeping_rings, 8, lambda x: 0, "ring is 0; accepted: 1 or more"),
        (keep_ring_triton, keeping_rings, 8, lambda x: 9, "kept has .* rows; accepted: more than"),
        (keep_ring_triton, keeping_rings, 9, lambda x: -1, "again is -1; accepted: 0 or more"),
        (tokens_after_triton, following_tokens, 2, lambda x: x[:, :0], "draft_tokens has no draft"),
        (tokens_after_triton, following_tokens, 5, lambda x: -1, "distance is -1; accepted: 0 or more"),
        (tokens_after_triton, following_tokens, 6, lambda x: x[1:], "out has shape"),
        (pack_turn_triton, packing_turns, 3, lambda x: 1, "step is 1; accepted: at least 2"),
        (pack_turn_triton, packing_turns, 4, lambda x: 0, "modules is 0; accepted: 1 to 2, so that"),
        (pack_turn_triton, packing_turns, 5, lambda x: 1, "stride is 1; accepted: at least"),
        (pack_turn_triton, packing_turns, 13, lambda x: x[:1], "queries has 1 entries; accepted: at least"),
        (widen_logits_triton, widening, 1, lambda x: x.long(), "places has dtype int64"),
        (widen_logits_triton, widening, 2, lambda x: x[:, 1:], "out has shape"),
        (draft_positions_triton, placing_drafts, 2, lambda x: x[:, 1:], "out has shape"),
        (drop_unknown_drafts_triton, dropping, 2, lambda x: 0, "vocab_size is 0; accepted: 1 or more"),
    ],
)
def test_what_the_kernels_cannot_take_is_refused(launch, arguments, index, change, message):
    refuses(launch, arguments(4), index, change, message)
