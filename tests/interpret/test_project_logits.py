"""The Triton kernel of the soft cap against the reference's formula."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftgraph.kernels.project_logits import project_logits_cuda, soft_cap_triton

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    size=st.sampled_from([(1, 1), (3, 341), (1, 1024), (5, 205), (2, 1500)]),
    dtype=st.sampled_from(list(TOLERANCE)),
    cap=st.sampled_from([0.5, 30.0]),
    spread=st.sampled_from([1e-4, 1.0, 30.0]),
)
def test_random_logits(seed, size, dtype, cap, spread):
    torch.manual_seed(seed)
    logits = (spread * torch.randn(size)).to(dtype)
    expected = (cap * torch.tanh(logits.double() / cap)).to(dtype)
    soft_cap_triton(logits, cap)
    torch.testing.assert_close(logits, expected, rtol=TOLERANCE[dtype], atol=0)


def test_where_the_two_formulas_meet_and_at_the_ends():
    cap = 4.0
    logits = torch.tensor([[0.0, -0.0, 0.99999, 1.0, 1.00001, -0.99999, -1.0, 1e30, -1e30, math.inf, -math.inf]])
    expected = (cap * torch.tanh(logits.double() / cap)).float()
    soft_cap_triton(logits, cap)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=0)
    broken = torch.full((1, 3), math.nan)
    soft_cap_triton(broken, cap)
    assert broken.isnan().all()


@pytest.mark.parametrize("cap", [0.0, 30.0])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_product_and_its_cap(cap, dtype):
    hidden, weight = torch.randn(5, 32).to(dtype), torch.randn(70, 32).to(dtype)
    out = torch.full((5, 70), 9.0, dtype=dtype)
    project_logits_cuda(hidden, weight, cap, out)
    expected = hidden.double() @ weight.double().T
    expected = cap * torch.tanh(expected / cap) if cap else expected
    torch.testing.assert_close(out.double(), expected, rtol=2 * TOLERANCE[dtype] + 1e-5, atol=20 * TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("hidden", "weight", "cap", "out", "message"),
    [
        (torch.zeros(2, 4), torch.zeros(9, 5), 0.0, torch.zeros(2, 9), r"weight has shape \[9, 5\]; accepted"),
        (torch.zeros(2, 4), torch.zeros(9, 4).half(), 0.0, torch.zeros(2, 9), "weight has dtype float16"),
        (torch.zeros(2, 4), torch.zeros(9, 4), 0.0, torch.zeros(3, 9), r"out has shape \[3, 9\]; accepted: \[2, 9\]"),
        (torch.zeros(2, 4), torch.zeros(9, 4), 0.0, torch.zeros(9, 2).t(), "out has strides"),
        (torch.zeros(2, 4), torch.zeros(9, 4), -1.0, torch.zeros(2, 9), "soft_cap is -1.0; accepted: 0"),
    ],
)
def test_what_it_cannot_take_is_refused(hidden, weight, cap, out, message):
    with pytest.raises(ValueError, match=message):
        project_logits_cuda(hidden, weight, cap, out)
