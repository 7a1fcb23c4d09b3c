"""The Triton kernels of `accept_standard` against its reference."""

from __future__ import annotations

import pytest
import torch
from acceptance_cases import REFUSED, random_arguments
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import assert_same_effect

from draftgraph.kernels import vocabulary_parts as sizes
from draftgraph.kernels.accept_standard import accept_standard_reference
from draftgraph.kernels.accept_standard_triton import accept_standard_triton


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    monkeypatch.setattr(sizes, "LEAST_PART", 32)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from([1, 2, 7, 31, 32, 33, 64, 65, 130]),
    num_drafts=st.integers(0, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    kind=st.sampled_from(["one-hot", "random", "near"]),
    spoil=st.booleans(),
)
def test_random_rounds(seed, vocab, num_drafts, dtype, kind, spoil):
    args = random_arguments(seed, vocab=vocab, num_drafts=num_drafts, dtype=dtype, kind=kind, spoil=spoil)
    assert_same_effect(accept_standard_triton, accept_standard_reference, args)


def test_a_residual_without_mass_leaves_the_target():
    args = random_arguments(3, vocab=40, num_drafts=3, dtype=torch.float32, kind="random", spoil=False)
    args[7] = torch.full_like(args[7], 4.0)  # no distribution: above any p
    args[8][:] = 1.0
    assert_same_effect(accept_standard_triton, accept_standard_reference, args)


@pytest.mark.parametrize(("index", "change", "message"), REFUSED)
def test_what_the_kernels_cannot_take_is_refused(index, change, message):
    args = random_arguments(1, vocab=7, num_drafts=3, dtype=torch.float32, kind="random", spoil=False)
    args[index] = change(args[index])
    with pytest.raises(ValueError, match=message):
        accept_standard_triton(*args)
