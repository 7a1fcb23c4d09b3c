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
from draftgraph.kernels.gather_rows import column_block, gather_rows_triton
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


OF_ROWS = ["put_rows", "gather_window", "keep_states", "keep_ring"]
# At the edges of a kernel's range over rows, and of what one of its programs moves.
ROWS = st.sampled_from([1, 2, 7, 8, 9, 14])
EDGES = st.sampled_from([1, 15, 16, 17, 1023, 1024, 1025, 1030])


@pytest.mark.parametrize("case", OF_ROWS)
@settings(max_examples=12, deadline=None)
@given(seed=SEEDS, rows=ROWS, size=EDGES, dtype=st.sampled_from(DTYPES))
def test_rows_and_columns(case, seed, rows, size, dtype):
    assert_same_effect(*launch_and_reference(case), FLOAT_CASES[case](seed, rows=rows, size=size, dtype=dtype))


@pytest.mark.parametrize("case", ["gather_rows", "keep_prompt_state"])
@settings(max_examples=12, deadline=None)
@given(seed=SEEDS, size=EDGES, dtype=st.sampled_from(DTYPES))
def test_columns(case, seed, size, dtype):
    assert_same_effect(*launch_and_reference(case), FLOAT_CASES[case](seed, size=size, dtype=dtype))


@settings(max_examples=12, deadline=None)
@given(
    seed=SEEDS,
    vocab=st.sampled_from([1, 2, 1023, 1024, 1025, 2100]),
    spare=st.sampled_from([0, 1, 7]),
    dtype=st.sampled_from(DTYPES),
)
def test_widen_logits(seed, vocab, spare, dtype):
    arguments = widening(seed, vocab=vocab, spare=spare, dtype=dtype)
    assert_same_effect(*launch_and_reference("widen_logits"), arguments)


@settings(max_examples=20, deadline=None)
@given(
    seed=SEEDS,
    rows=ROWS,
    num_drafts=st.sampled_from([1, 3, 16]),
    width=st.sampled_from([0, 1, 127, 128, 129, 300]),
)
def test_tokens_after(seed, rows, num_drafts, width):
    arguments = following_tokens(seed, rows=rows, num_drafts=num_drafts, width=width)
    assert_same_effect(*launch_and_reference("tokens_after"), arguments)


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, rows=ROWS, num_drafts=st.sampled_from([1, 15, 16, 17, 33, 64]))
def test_drop_unknown_drafts(seed, rows, num_drafts):
    arguments = dropping(seed, rows=rows, num_drafts=num_drafts)
    assert_same_effect(*launch_and_reference("drop_unknown_drafts"), arguments)


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, rows=ROWS, num_drafts=st.sampled_from([1, 9, 16, 43, 127, 128, 129]))
def test_draft_positions(seed, rows, num_drafts):
    arguments = placing_drafts(seed, rows=rows, num_drafts=num_drafts)
    assert_same_effect(*launch_and_reference("draft_positions"), arguments)


def of_one_row(make):
    """Arguments of a bucket of one row, for which kernels have a range of their own."""
    return next(args for args in (make(seed, rows=1) for seed in range(2, 200, 2)) if args[4].shape[0] == 1)


def test_a_bucket_of_one_row():
    assert_same_effect(*launch_and_reference("keep_states"), of_one_row(keeping_states))


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
        (keep_states_triton, keeping_states, 7, lambda x: x[:, :3].contiguous(), "kept has 3 columns; accepted: at"),
        (keep_prompt_state_triton, keeping_prompts, 1, lambda x: x.repeat(2), "base has shape"),
        (keep_prompt_state_triton, keeping_prompts, 4, lambda x: 5, "first is 5; accepted: 0 to 4"),
        (keep_prompt_state_triton, keeping_prompts, 5, lambda x: x[:2], "kept has 2 rows; accepted: at least 4"),
        (keep_ring_triton, keeping_rings, 2, lambda x: x[1:], "slots has shape"),
        (keep_ring_triton, keeping_rings, 8, lambda x: 0, "ring is 0; accepted: 1 or more"),
        (keep_ring_triton, keeping_rings, 8, lambda x: 9, "kept has .* rows; accepted: more than"),
        (keep_ring_triton, keeping_rings, 9, lambda x: -1, "again is -1; accepted: 0 or more"),
        (tokens_after_triton, following_tokens, 2, lambda x: x[:, :0], "draft_tokens has no draft"),
        (tokens_after_triton, following_tokens, 5, lambda x: -1, "distance is -1; accepted: 0 to 2147483623"),
        (tokens_after_triton, following_tokens, 5, lambda x: 2**31 - 24, "distance is 2147483624; accepted: 0 to"),
        (tokens_after_triton, following_tokens, 5, lambda x: 2**40, "distance is 1099511627776; accepted: 0 to"),
        (tokens_after_triton, following_tokens, 6, lambda x: x[1:], "out has shape"),
        (pack_turn_triton, packing_turns, 3, lambda x: 1, "step is 1; accepted: at least 2"),
        (pack_turn_triton, packing_turns, 4, lambda x: 0, "modules is 0; accepted: 1 to 2, so that"),
        (pack_turn_triton, packing_turns, 5, lambda x: 1, "stride is 1; accepted: at least"),
        (pack_turn_triton, packing_turns, 13, lambda x: x[:1], "queries has 1 entries; accepted: at least"),
        (widen_logits_triton, widening, 1, lambda x: x.long(), "places has dtype int64"),
        (widen_logits_triton, widening, 2, lambda x: x[:, 1:], "out has shape"),
        (draft_positions_triton, placing_drafts, 2, lambda x: x[:, 1:], "out has shape"),
        (drop_unknown_drafts_triton, dropping, 2, lambda x: 0, "vocab_size is 0; accepted: 1 to 2147483647"),
        (
            drop_unknown_drafts_triton,
            dropping,
            2,
            lambda x: 2**31,
            "vocab_size is 2147483648; accepted: 1 to 2147483647",
        ),
    ],
)
def test_what_the_kernels_cannot_take_is_refused(launch, arguments, index, change, message):
    refuses(launch, arguments(4), index, change, message)


def narrow_turn(seed):
    """Windows that have no place for each of the rows."""
    args = packing_turns(seed)
    return [*args[:6], *(x[:1] for x in args[6:9]), *args[9:12], args[12][:1], args[13]]


def no_rows(seed):
    """Of `keep_ring`, tokens without a row that they could belong to."""
    args = keeping_rings(seed)
    return [*args[:4], args[4][:0], args[5][:1], args[6][:0], *args[7:]]


def no_tokens(make, count):
    """Of an op whose first arguments have the packed tokens."""
    return lambda seed: [x[:0] if index < count else x for index, x in enumerate(make(seed))]


def no_columns(make, index):
    return lambda seed: [x[:, :0] if at in (0, index) else x for at, x in enumerate(make(seed))]


@pytest.mark.parametrize(
    ("launch", "arguments", "message"),
    [
        (pack_turn_triton, narrow_turn, "window_positions has 1 entries; accepted: at least"),
        (keep_ring_triton, no_rows, "slot_of_row has no row; accepted: at least 1"),
        (keep_ring_triton, no_tokens(keeping_rings, 4), "values has no row; accepted: at least 1"),
        (keep_states_triton, no_tokens(keeping_states, 2), "values has no row; accepted: at least 1"),
        (keep_prompt_state_triton, no_tokens(keeping_prompts, 1), "values has no row; accepted: at least 1"),
        (keep_states_triton, no_columns(keeping_states, 7), "values has no column; accepted: at least 1"),
        (keep_prompt_state_triton, no_columns(keeping_prompts, 5), "values has no column; accepted: at least 1"),
    ],
)
def test_sizes_that_fit_but_hold_nothing_are_refused(launch, arguments, message):
    refuses(launch, arguments(4), 0, lambda x: x, message)


def test_few_columns_have_one_kernel():
    """Such as drafts' confidences, of any number."""
    assert {column_block(columns) for columns in range(1, 17)} == {16}
    assert [column_block(columns) for columns in (17, 1024, 4096)] == [32, 1024, 1024]
