"""The Triton kernels of `sample_target` against its reference."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import assert_same_effect, random_round, set_sampling_parameters

from draftgraph.kernels import vocabulary_parts as kernels
from draftgraph.kernels.sample_target import sample_target_reference
from draftgraph.kernels.sample_target_triton import sample_target_triton


def arguments(state, bucket):
    return [
        state.logits,
        state.window_rows,
        state.window_positions,
        state.cu_tokens[: bucket + 1],
        state.slot_of_row[:bucket],
        state.temperature,
        state.top_k,
        state.top_p,
        state.min_p,
        state.seed,
        state.sampled,
        state.log_normalizer,
        state.threshold,
        state.token_failed,
    ]


def check(state, bucket):
    # Where the smallest kept number is a zero, either sign is right.
    state.logits.copy_(torch.where(state.logits == 0, 0.0, state.logits))
    assert_same_effect(sample_target_triton, sample_target_reference, arguments(state, bucket))


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    monkeypatch.setattr(kernels, "LEAST_PART", 32)


def random_case(seed, vocab, dtype, coarse, num_drafts=1, rows=2):
    state, bucket = random_round(seed, vocab=vocab, dtype=dtype, num_drafts=num_drafts, rows=rows)
    set_sampling_parameters(state, seed)
    if coarse:  # many ties
        state.logits.copy_(state.logits.round() + 0.0)
    return state, bucket


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from([1, 2, 7, 31, 32, 33, 64, 65, 95, 130]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    coarse=st.booleans(),
    spoil=st.sampled_from([None, None, math.nan, math.inf, -math.inf]),
)
def test_random_rounds(seed, vocab, dtype, coarse, spoil):
    state, bucket = random_case(seed, vocab, dtype, coarse)
    if spoil is not None:
        generator = torch.Generator().manual_seed(seed)
        state.logits[torch.rand(state.logits.shape, generator=generator) < 0.2] = spoil
    check(state, bucket)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("coarse", [False, True])
def test_all_filters_together(dtype, coarse):
    for seed in range(2):
        state, bucket = random_case(seed, 67, dtype, coarse)
        state.temperature[:] = torch.tensor([0.7, 1.3, 0.05, 8.0]).repeat(3)[: len(state.temperature)]
        state.top_k[:] = torch.tensor([40, 3, 1, 66]).repeat(3)[: len(state.top_k)]
        state.top_p[:] = torch.tensor([0.9, 0.3, 0.999999, 0.0]).repeat(3)[: len(state.top_p)]
        state.min_p[:] = torch.tensor([0.001, 0.0, 0.2]).repeat(4)[: len(state.min_p)]
        check(state, bucket)


def test_logits_that_the_temperature_makes_equal():
    """Different subnormal numbers become one z; so do large ones that overflow below."""
    state, bucket = random_case(5, 64, torch.float32, False)
    state.logits[:] *= 1e-44
    state.temperature[:] = 3.0
    for k, p in ((5, 1.0), (5, 0.5), (0, 0.4)):
        state.top_k[:], state.top_p[:], state.min_p[:] = k, p, 0.0
        check(state, bucket)
    state.logits[:] = -2e38 - 1e38 * torch.rand(state.logits.shape)
    state.logits[:, 3] = -1.0
    state.temperature[:] = 0.25
    check(state, bucket)


def test_parts_of_the_real_size(monkeypatch):
    """Several blocks of the mass kernel in a part, and several parts."""
    monkeypatch.setattr(kernels, "LEAST_PART", 1024)
    state, bucket = random_case(3, 2 * 1024 + 1, torch.bfloat16, False, num_drafts=0)
    state.temperature[:], state.top_k[:], state.top_p[:] = 0.8, 700, 0.95
    check(state, bucket)


def test_the_largest_vocabulary_has_64_parts(monkeypatch):
    monkeypatch.setattr(kernels, "LEAST_PART", 1024)
    assert kernels.part_size(262_144) == 4096
    assert kernels.part_size(128_256) == 2048
    assert kernels.part_size(1) == 1024


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda x: x.double(), "logits has dtype float64; accepted: float32 or bfloat16 or float16"),
        (0, lambda x: x.t().contiguous().t(), "logits has strides"),
        (0, lambda x: x[:, :0], "logits has no token"),
        (1, lambda x: x.long(), "rows has dtype int64; accepted: int32"),
        (2, lambda x: x[1:], "positions has shape"),
        (3, lambda x: x[1:], "cu_tokens has shape"),
        (5, lambda x: x.double(), "temperature has dtype float64"),
        (6, lambda x: x[1:], "top_k has shape"),
        (9, lambda x: x.int(), "seed has dtype int32; accepted: int64"),
        (10, lambda x: x.long(), "sampled has dtype int64"),
        (13, lambda x: x.int(), "failed has dtype int32; accepted: bool"),
        (4, lambda x: x.to("meta"), "slot_of_row is on meta"),
    ],
)
def test_what_the_kernels_cannot_take_is_refused(index, change, message):
    args = arguments(*random_round(1))
    args[index] = change(args[index])
    with pytest.raises(ValueError, match=message):
        sample_target_triton(*args)
