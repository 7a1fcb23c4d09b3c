"""The Triton kernel of `embed_tokens` against its reference: the same bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import bits

from draftgraph.kernels.embed_tokens import embed_tokens_reference, embed_tokens_triton

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    width=st.sampled_from([0, 1, 3, 16]),
    hidden=st.sampled_from([1, 7, 64, 1023, 1024, 1025, 2100]),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([1.0, 0.3, 33.9411]),
)
def test_random_tables(seed, width, hidden, dtype, scale):
    torch.manual_seed(seed)
    table = torch.randn(20, hidden).to(dtype)
    tokens = torch.randint(0, 20, (width,), dtype=torch.int32)
    scale = float(torch.tensor(scale).to(dtype))
    ours, theirs = embed_tokens_triton(tokens, table, scale), embed_tokens_reference(tokens, table, scale)
    assert ours.dtype == dtype
    assert torch.equal(bits(ours), bits(theirs))


@pytest.mark.parametrize(
    ("tokens", "table", "message"),
    [
        (torch.zeros(3), torch.zeros(4, 8), "tokens has dtype float32; accepted: int32"),
        (torch.zeros(3, 1, dtype=torch.int32), torch.zeros(4, 8), r"tokens has shape \[3, 1\]; accepted: \[any\]"),
        (torch.zeros(3, dtype=torch.int32), torch.zeros(4, 8).double(), "table has dtype float64"),
        (torch.zeros(3, dtype=torch.int32), torch.zeros(8, 4).t(), "table has strides"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused(tokens, table, message):
    with pytest.raises(ValueError, match=message):
        embed_tokens_triton(tokens, table, 1.0)
