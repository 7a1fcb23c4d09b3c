"""The Triton kernels of `record_logprobs` against its reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import assert_same_effect, random_round

from draftgraph.kernels import vocabulary_parts as sizes
from draftgraph.kernels.record_logprobs import record_logprobs, record_logprobs_reference
from draftgraph.kernels.record_logprobs_triton import record_logprobs_triton


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    monkeypatch.setattr(sizes, "LEAST_PART", 32)


def arguments(state, bucket, count):
    shape = (*state.tokens.shape, count + 1)
    return [
        state.logits,
        state.emitted,
        state.accepted,
        state.failed,
        state.cu_tokens[: bucket + 1],
        state.slot_of_row[:bucket],
        state.length,
        torch.full(shape, 7.0),
        torch.full(shape, -7, dtype=torch.int32),
    ]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from([1, 7, 31, 32, 33, 65, 130]),
    num_drafts=st.integers(0, 4),
    count=st.integers(0, 20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    coarse=st.booleans(),
)
def test_random_rounds(seed, vocab, num_drafts, count, dtype, coarse):
    state, bucket = random_round(seed, vocab=vocab, num_drafts=num_drafts, dtype=dtype)
    if coarse:  # many ties
        state.logits.copy_(state.logits.round())
    state.logits[:, 1:2] = -torch.inf
    state.emitted[0, 0] = -1
    # One row close to the end of its context.
    state.length[0] = state.shape.context - 1
    args = arguments(state, bucket, min(count, vocab))
    assert_same_effect(record_logprobs_triton, record_logprobs_reference, args)


def test_a_logit_of_negative_zero_has_the_log_probability_zero():
    state, bucket = random_round(6, vocab=1, num_drafts=2, dtype=torch.float32)
    state.logits.fill_(-0.0)
    for count in (0, 1):
        args = arguments(state, bucket, count)
        assert_same_effect(record_logprobs_triton, record_logprobs_reference, args)
        assert_same_effect(record_logprobs, record_logprobs_reference, args)


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda x: x.double(), "logits has dtype float64; accepted: float32 or bfloat16 or float16"),
        (1, lambda x: x.long(), "emitted has dtype int64; accepted: int32"),
        (2, lambda x: x[1:], "accepted has shape"),
        (3, lambda x: x.int(), "row_failed has dtype int32; accepted: bool"),
        (4, lambda x: x[1:], "cu_tokens has shape"),
        (5, lambda x: x.to("meta"), "slot_of_row is on meta"),
        (7, lambda x: x.double(), "logprobs has dtype float64"),
        (8, lambda x: x[:, :, 1:].contiguous(), "logprob_tokens has shape"),
    ],
)
def test_what_the_kernels_cannot_take_is_refused(index, change, message):
    args = arguments(*random_round(1), 3)
    args[index] = change(args[index])
    with pytest.raises(ValueError, match=message):
        record_logprobs_triton(*args)


def test_more_entries_than_tokens_are_refused():
    with pytest.raises(ValueError, match="logprobs has 9 entries; accepted: 1 to one more than the 7 tokens"):
        record_logprobs_triton(*arguments(*random_round(1), 8))
