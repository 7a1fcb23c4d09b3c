"""The Triton kernel of `accept_synthetic` against its reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import assert_same_effect, random_round

from draftgraph.kernels.accept_synthetic import accept_synthetic_reference, accept_synthetic_triton


def arguments(state, bucket, seed):
    generator = torch.Generator().manual_seed(seed)
    rates = (2 * torch.rand(state.draft_tokens.shape[1], generator=generator) - 0.25).clamp(0.0, 1.0)
    return [
        state.sampled,
        state.token_failed,
        state.window_positions,
        state.draft_tokens,
        rates,
        state.seed,
        state.cu_tokens[: bucket + 1],
        state.slot_of_row[:bucket],
        state.accepted,
        state.emitted,
        state.failed,
    ]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), num_drafts=st.sampled_from([0, 1, 2, 3, 4, 7, 8]))
def test_random_rounds(seed, num_drafts):
    state, bucket = random_round(seed, num_drafts=num_drafts)
    assert_same_effect(accept_synthetic_triton, accept_synthetic_reference, arguments(state, bucket, seed))


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda x: x.long(), "sampled has dtype int64; accepted: int32"),
        (1, lambda x: x[1:], "token_failed has shape"),
        (2, lambda x: x[1:], "positions has shape"),
        (3, lambda x: x[:, ::2], "draft_tokens has strides"),
        (4, lambda x: x.double(), "rates has dtype float64; accepted: float32"),
        (5, lambda x: x.int(), "seed has dtype int32; accepted: int64"),
        (6, lambda x: x[1:], "cu_tokens has shape"),
        (7, lambda x: x.to("meta"), "slot_of_row is on meta"),
        (9, lambda x: x[:, 1:].contiguous(), "emitted has shape"),
        (10, lambda x: x.int(), "row_failed has dtype int32; accepted: bool"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused(index, change, message):
    args = arguments(*random_round(1), 1)
    args[index] = change(args[index])
    with pytest.raises(ValueError, match=message):
        accept_synthetic_triton(*args)
