"""The Triton kernel of `suffix_propose` against its reference: the same drafts, and the same index bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from round_cases import assert_same_effect, refuses
from suffix_cases import (
    BUDGET,
    CONFIDENCE,
    DRAFTS,
    FINISHED,
    G_HEADS,
    G_TREE,
    HEADS,
    INDEXED,
    LENGTH,
    ROWS,
    TOKENS,
    TREE,
    suffix_arguments,
)

from draftgraph.kernels.suffix_propose import (
    reset_suffix,
    suffix_propose,
    suffix_propose_reference,
    suffix_propose_triton,
)


def random_sequences(rng, alphabet, sizes):
    return [rng.integers(0, alphabet, size).tolist() for size in sizes]


@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    alphabet=st.integers(1, 5),
    depth=st.sampled_from([1, 2, 5, 9]),
    num_drafts=st.integers(1, 5),
    buckets=st.sampled_from([1, 2, 64]),
    growth=st.sampled_from([1, 3, 20]),
    others=st.booleans(),
)
def test_growing_sequences(seed, alphabet, depth, num_drafts, buckets, growth, others):
    """Three slots grow by random amounts, one of them pausing as finished, one starting anew half-way."""
    rng = np.random.default_rng(seed)
    args = suffix_arguments(
        slots=3,
        context=80,
        num_drafts=num_drafts,
        depth=depth,
        buckets=buckets,
        finished=random_sequences(rng, alphabet, [30, 1, 15]) if others else None,
        factor=float(rng.choice([0.5, 1.0, 2.0])),
        min_probability=float(rng.choice([0.0, 0.1, 0.4])),
    )
    args[ROWS] = torch.tensor([2, 0, 1, 3, 3], dtype=torch.int32)
    args[FINISHED][3] = True
    args[TOKENS][:3] = torch.from_numpy(rng.integers(0, alphabet, (3, 80)))
    for step in range(4):
        for slot in range(3):
            args[LENGTH][slot] = min(80, args[LENGTH][slot] + int(rng.integers(0, growth + 1)))
        args[FINISHED][1] = step in (1, 2)
        if step == 2:
            args[TOKENS][0] = torch.from_numpy(rng.integers(0, alphabet, 80))
            args[LENGTH][0] = 1 + int(rng.integers(0, growth))
            reset_suffix(args[HEADS], args[INDEXED], 0)
        assert_same_effect(suffix_propose_triton, suffix_propose_reference, args)
        suffix_propose_triton(*args)


@pytest.mark.parametrize("depth", [24, 64])
def test_deep_trees_and_large_tokens(depth):
    """The op on the CPU, which its own tests hold to the reference, is faster."""
    rng = np.random.default_rng(depth)
    phrase = [2**31 - 1, *rng.integers(0, 262144, 40).tolist()]
    args = suffix_arguments(slots=1, context=300, num_drafts=24, depth=depth, buckets=64, finished=[phrase * 2])
    row = torch.tensor([7, *phrase, 8, *phrase, 9, *phrase[:30]], dtype=torch.int32)
    args[TOKENS][0, : len(row)] = row
    for length in (70, len(row) - 3, len(row)):
        args[LENGTH][0] = length
        assert_same_effect(suffix_propose_triton, suffix_propose, args)
        suffix_propose_triton(*args)
        assert_same_effect(suffix_propose_triton, suffix_propose, args)
    assert args[DRAFTS][0, 0] == phrase[30], "the test would prove little without drafts"


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (TOKENS, lambda x: x.long(), "tokens has dtype int64; accepted: int32"),
        (LENGTH, lambda x: x[:1], r"length has shape \[1\]; accepted: \[3\]"),
        (ROWS, lambda x: x.to("meta"), "slot_of_row is on meta"),
        (HEADS, lambda x: x[:, :, :6].contiguous(), "the number of buckets must be a power of two, got 6"),
        (HEADS, lambda x: x[:, :0].contiguous(), "the tree must be 1 to 64 tokens deep, got 0"),
        (TREE, lambda x: x[:, :3].contiguous(), "tree has shape"),
        (G_HEADS, lambda x: x[:2].contiguous(), "global_heads has shape"),
        (G_TREE, lambda x: x[:, :, :0].contiguous(), "global_tree has shape"),
        (BUDGET, lambda x: x[:2].contiguous(), "budget has shape"),
        (CONFIDENCE, lambda x: x.double(), "confidence has dtype float64"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused(index, change, message):
    refuses(suffix_propose_triton, suffix_arguments(), index, change, message)
