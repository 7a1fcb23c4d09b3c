"""The Triton kernel of `accept_coupled` against its reference."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import assert_same_effect, random_round

from draftgraph.kernels.accept_coupled import accept_coupled_reference, accept_coupled_triton


def arguments(state, bucket):
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


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), vocab=st.sampled_from([1, 2, 7]), num_drafts=st.sampled_from([0, 1, 2, 3, 4, 7, 8]))
def test_random_rounds(seed, vocab, num_drafts):
    state, bucket = random_round(seed, vocab=vocab, num_drafts=num_drafts)
    assert_same_effect(accept_coupled_triton, accept_coupled_reference, arguments(state, bucket))


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda x: x.long(), "sampled has dtype int64; accepted: int32"),
        (1, lambda x: x[1:], "token_failed has shape"),
        (2, lambda x: x[:, ::2], "draft_tokens has strides"),
        (3, lambda x: x[1:], "cu_tokens has shape"),
        (6, lambda x: x[:, 1:].contiguous(), "emitted has shape"),
        (7, lambda x: x.int(), "row_failed has dtype int32; accepted: bool"),
        (4, lambda x: x.to("meta"), "slot_of_row is on meta"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused(index, change, message):
    args = arguments(*random_round(1))
    args[index] = change(args[index])
    with pytest.raises(ValueError, match=message):
        accept_coupled_triton(*args)
