"""The Triton kernels of `moe_experts` against their reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftgraph.kernels.moe_experts import moe_experts_reference
from draftgraph.kernels.moe_experts_triton import moe_experts_triton


def arguments(seed, width=5, padding=2, experts=6, top=2, hidden=40, intermediate=24, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    total = width + padding
    chosen = torch.stack([torch.randperm(experts, generator=generator)[:top] for _ in range(total)]).int()
    rows = torch.zeros(total, dtype=torch.int32)
    rows[width:] = -1
    return [
        normal(total, hidden) * hidden**0.5,
        chosen,
        torch.rand(total, top, generator=generator),
        rows,
        normal(experts, 2 * intermediate, hidden),
        normal(experts, hidden, intermediate),
        "silu",
    ]


def check(args):
    result, expected = moe_experts_triton(*args), moe_experts_reference(*args)
    assert result.dtype == expected.dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[result.dtype]
    assert (result.float() - expected.float()).abs().max() <= tolerance * expected.float().abs().max()


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 2**20),
    st.integers(0, 9),
    st.integers(0, 3),
    st.sampled_from([(1, 1), (5, 2), (8, 3), (13, 8)]),
    st.sampled_from([(16, 16), (40, 24), (72, 50)]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_random_choices(seed, width, padding, choice, sizes, dtype):
    if width + padding:
        check(arguments(seed, width, padding, *choice, *sizes, dtype=dtype))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_activations(activation):
    check([*arguments(1)[:-1], activation])


def test_an_expert_with_several_tiles():
    args = arguments(2, width=40, padding=3, experts=4, top=2)
    args[1][:] = torch.tensor([3, 1], dtype=torch.int32)
    check(args)


def test_larger_tiles_for_many_tokens():
    check(arguments(3, width=150, padding=0, experts=4, top=2, dtype=torch.float16))


def test_a_token_depends_on_no_other():
    args = arguments(4, width=9, padding=0)
    alone = [tensor[3:4].contiguous() for tensor in args[:4]] + args[4:]
    assert torch.equal(moe_experts_triton(*args)[3], moe_experts_triton(*alone)[0])


def test_padding_reads_nothing():
    """What only padding tokens chose may hold anything."""
    args = arguments(5, width=2, padding=3, experts=8, top=1)
    args[1][:, 0] = torch.tensor([0, 1, 2, 3, 4])
    expected = moe_experts_reference(*args)
    for weights in (args[4], args[5]):
        weights[2:] = float("nan")
    result = moe_experts_triton(*args)
    assert torch.allclose(result, expected, atol=1e-5)
    assert not result[2:].any()


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda x: x.double(), "x has dtype float64"),
        (1, lambda x: x.long(), "experts has dtype int64; accepted: int32"),
        (2, lambda x: x[:, :1], r"weights has shape \[7, 1\]; accepted: \[7, 2\]"),
        (3, lambda x: x[:3], r"rows has shape \[3\]"),
        (4, lambda x: x.half(), "gate_up has dtype float16; accepted: float32"),
        (5, lambda x: x.transpose(1, 2), "down has shape"),
        (6, lambda x: "relu", "activation is 'relu'; accepted: silu"),
    ],
)
def test_what_the_kernels_cannot_take_is_refused(index, change, message):
    args = arguments(6)
    args[index] = change(args[index])
    with pytest.raises(ValueError, match=message):
        moe_experts_triton(*args)
