"""The Triton kernel of `ngram_propose` against its reference: the same drafts, the same chains."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from round_cases import assert_same_effect, refuses

from draftgraph.kernels.ngram_propose import ngram_propose, ngram_propose_reference, ngram_propose_triton, reset_ngram

TOKENS, LENGTH, FINISHED, ROWS, HEADS, LINKS, INDEXED, DRAFTS, COUNT = range(9)


def arguments(rng, *, slots=2, context=64, num_drafts=3, min_n=1, max_n=3, buckets=8, alphabet=3):
    tables = max_n - min_n + 1

    def zeros(*shape):
        return torch.zeros(shape, dtype=torch.int32)

    return [
        torch.from_numpy(rng.integers(0, alphabet, (slots + 1, context), dtype=np.int32)),
        zeros(slots + 1) + 1,
        torch.zeros(slots + 1, dtype=torch.bool),
        torch.arange(slots, dtype=torch.int32),
        zeros(slots + 1, tables, buckets),
        zeros(slots + 1, tables, context),
        zeros(slots + 1),
        zeros(slots + 1, num_drafts) + 9,
        zeros(slots + 1) + 9,
        min_n,
        max_n,
    ]


@settings(max_examples=14, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    alphabet=st.integers(1, 5),
    min_n=st.integers(1, 4),
    extra_n=st.integers(0, 3),
    num_drafts=st.integers(0, 5),
    buckets=st.sampled_from([1, 2, 8, 64]),
    growth=st.sampled_from([1, 3, 8, 45]),
)
def test_growing_sequences(seed, alphabet, min_n, extra_n, num_drafts, buckets, growth):
    """Three slots grow by random amounts, one of them pausing as finished, one starting anew half-way."""
    rng = np.random.default_rng(seed)
    sizes = {"num_drafts": num_drafts, "min_n": min_n, "max_n": min_n + extra_n, "buckets": buckets}
    args = arguments(rng, slots=3, context=150, alphabet=alphabet, **sizes)
    args[ROWS] = torch.tensor([2, 0, 1, 3, 3], dtype=torch.int32)
    args[FINISHED][3] = True
    for step in range(4):
        for slot in range(3):
            args[LENGTH][slot] = min(150, args[LENGTH][slot] + int(rng.integers(0, growth + 1)))
        args[FINISHED][1] = step in (1, 2)
        if step == 2:
            args[TOKENS][0] = torch.from_numpy(rng.integers(0, alphabet, 150))
            args[LENGTH][0] = 1 + int(rng.integers(0, growth))
            reset_ngram(args[HEADS], args[INDEXED], 0)
        assert_same_effect(ngram_propose_triton, ngram_propose_reference, args)
        ngram_propose_triton(*args)


@pytest.mark.parametrize(("alphabet", "buckets"), [(4000, 8192), (50, 256)])
def test_a_prompt_of_thousands_of_tokens(alphabet, buckets):
    """The reference is slow; the op on the CPU is held to it in its own tests."""
    args = arguments(
        np.random.default_rng(0), slots=1, context=4000, num_drafts=7, max_n=4, buckets=buckets, alphabet=alphabet
    )
    args[LENGTH][0] = 3000
    for _ in range(2):
        assert_same_effect(ngram_propose_triton, ngram_propose, args)
        ngram_propose_triton(*args)
        assert args[INDEXED][0] == args[LENGTH][0] - 1
        args[LENGTH][0] += 5


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 34, 64, 65, 66])
def test_block_edges(length):
    args = arguments(np.random.default_rng(length), context=96)
    args[LENGTH][0] = length
    assert_same_effect(ngram_propose_triton, ngram_propose_reference, args)


@pytest.mark.parametrize(("min_n", "max_n"), [(1, 16), (5, 5), (9, 20), (1, 64)])
def test_many_and_long_ngrams(min_n, max_n):
    args = arguments(np.random.default_rng(1), context=160, min_n=min_n, max_n=max_n, alphabet=2)
    args[TOKENS][0, 80:] = args[TOKENS][0, :80]
    args[LENGTH][:2] = torch.tensor([150, 40])
    assert_same_effect(ngram_propose_triton, ngram_propose_reference, args)


def test_large_token_ids_hash_as_32_bits():
    args = arguments(np.random.default_rng(2), context=48, alphabet=2, buckets=32)
    args[TOKENS] = torch.where(args[TOKENS] > 0, 2**31 - 1, 262143).int()
    args[LENGTH][:2] = 40
    assert_same_effect(ngram_propose_triton, ngram_propose_reference, args)


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (TOKENS, lambda x: x.long(), "tokens has dtype int64; accepted: int32"),
        (LENGTH, lambda x: x[:1], r"length has shape \[1\]; accepted: \[3\]"),
        (FINISHED, lambda x: x.int(), "finished has dtype int32; accepted: bool"),
        (ROWS, lambda x: x.to("meta"), "slot_of_row is on meta"),
        (HEADS, lambda x: x[:, :, :6].contiguous(), "the number of buckets must be a power of two, got 6"),
        (HEADS, lambda x: x[:, :2].contiguous(), "1 to 3 tokens do not fit 2 tables"),
        (LINKS, lambda x: x[:, :, ::2], "links has shape"),
        (LINKS, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), "links has strides"),
        (DRAFTS, lambda x: x[0], "draft_tokens has shape"),
        (COUNT, lambda x: x.float(), "draft_count has dtype float32"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused(index, change, message):
    refuses(ngram_propose_triton, arguments(np.random.default_rng(3)), index, change, message)


def test_too_long_ngrams_are_refused():
    args = arguments(np.random.default_rng(3), max_n=65)
    with pytest.raises(ValueError, match="max_n is 65; accepted: at most 64"):
        ngram_propose_triton(*args)
