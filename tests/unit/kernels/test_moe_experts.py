"""The chosen experts of a mixture: the reference against a loop, and the CPU implementation against the reference."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from draftgraph.kernels.moe_experts import moe_experts, moe_experts_reference

HIDDEN, INTERMEDIATE, EXPERTS, TOP = 32, 24, 7, 3


def arguments(width, padding=0, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    total = width + padding

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    chosen = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP] for _ in range(total)]).int()
    rows = torch.tensor([0] * width + [-1] * padding, dtype=torch.int32)
    gate_up, down = normal(EXPERTS, 2 * INTERMEDIATE, HIDDEN) / 6, normal(EXPERTS, HIDDEN, INTERMEDIATE) / 5
    return [normal(total, HIDDEN), chosen, torch.rand(total, TOP, generator=generator), rows, gate_up, down]


def by_hand(x, experts, weights, rows, gate_up, down, act):
    result = torch.zeros_like(x)
    for token in range(x.shape[0]):
        if rows[token] < 0:
            continue
        for expert, weight in zip(experts[token].tolist(), weights[token], strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            result[token] += weight * (down[expert] @ (act(gate) * up))
    return result


@pytest.mark.parametrize(
    ("activation", "act"),
    [("silu", F.silu), ("gelu", F.gelu), ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"))],
)
def test_reference_equals_a_loop(activation, act):
    args = arguments(6, padding=2)
    assert torch.allclose(moe_experts_reference(*args, activation), by_hand(*args, act), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "padding"), [(1, 0), (5, 3), (0, 4), (70, 2), (150, 0)])
def test_cpu_equals_reference(width, padding, dtype):
    args = arguments(width, padding, seed=width, dtype=dtype)
    result, expected = moe_experts(*args, "silu"), moe_experts_reference(*args, "silu")
    assert result.dtype == dtype
    error = (result.float() - expected.float()).abs().max()
    # In bfloat16 each product is rounded on the CPU: four roundings of 2^-9 each, of terms that may cancel.
    assert error <= (1e-5 if dtype == torch.float32 else 2e-2) * expected.float().abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_depends_on_no_other_bit_for_bit(dtype):
    args = arguments(16, dtype=dtype)
    together = moe_experts(*args, "silu")
    alone = [tensor.clone() for tensor in args]
    alone[3][:] = -1
    alone[3][9] = 0
    assert torch.equal(moe_experts(*alone, "silu")[9], together[9])
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    turned = [tensor[order] for tensor in args[:4]] + args[4:]
    assert torch.equal(moe_experts(*turned, "silu"), together[order])


def test_only_chosen_experts_are_read():
    args = arguments(2, padding=1)
    args[1][:] = torch.tensor([[0, 1, 2], [2, 1, 4], [3, 5, 6]])
    expected = moe_experts_reference(*args, "silu")
    for weights in args[4:]:
        weights[torch.tensor([3, 5, 6])] = float("nan")
    result = moe_experts(*args, "silu")
    assert torch.allclose(result, expected, atol=1e-5)
    assert not result[2].any()
