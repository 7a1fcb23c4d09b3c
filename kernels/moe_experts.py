"""The chosen experts of a mixture: gated feed-forwards of which each token uses a few."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .moe_experts_triton import (
    OPERANDS,
    down_kernel,
    gate_up_kernel,
    launch_config,
    moe_experts_triton,
    sort_kernel,
    sum_kernel,
)
from .registration import define_op
from .triton_support import KernelSpec, next_power_of_2

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
"""Of the gate."""

# Rows of a product on the CPU, by the most tokens of a window: an expert's tokens are taken so many at a time and
# filled up with zeros, since the bits of a product depend on its number of rows.
_ROWS = ((16, 4), (128, 16))
_MOST_ROWS = 32


def activate(gate: torch.Tensor, activation: str) -> torch.Tensor:
    """One of `ACTIVATIONS`, by element."""
    if activation == "silu":
        return F.silu(gate)
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")


def moe_experts_reference(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    rows: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """The specification of `moe_experts`: no host read; it copies the chosen experts' weights for every token."""
    chosen = experts.long()
    products = torch.einsum("whf,wf->wh", gate_up[chosen].flatten(1, 2).float(), x.float())
    gate, up = products.unflatten(1, (experts.shape[1], -1)).chunk(2, dim=-1)
    inner = (activate(gate, activation) * up).to(x.dtype)
    outputs = torch.einsum("wkhi,wki->wkh", down[chosen].float(), inner.float())
    result = (outputs * weights[:, :, None]).sum(1)
    return torch.where(rows[:, None] < 0, 0.0, result).to(x.dtype)


def _moe_experts_cpu(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    rows: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """The CPU implementation: expert by expert, those that some token chose.

    A token's result depends, bit for bit, on that token and on `W` only: products have a fixed number of rows, and the
    experts of a token are summed in ascending order.
    """
    width, hidden = x.shape
    size = next((rows for most, rows in _ROWS if width <= most), _MOST_ROWS)
    tokens_of: dict[int, list[int]] = {}
    for token, (row, chosen) in enumerate(zip(rows.tolist(), experts.tolist(), strict=True)):
        if row >= 0:
            for expert in chosen:
                tokens_of.setdefault(expert, []).append(token)
    weight_of = torch.zeros((gate_up.shape[0], width), dtype=torch.float32)
    weight_of.scatter_(0, experts.t().long(), weights.t())
    output = torch.zeros((width, hidden), dtype=torch.float32)
    for expert in sorted(tokens_of):
        tokens = torch.tensor(tokens_of[expert])
        filled = x.new_zeros((-(-len(tokens) // size) * size, hidden))
        filled[: len(tokens)] = x[tokens]
        for begin in range(0, len(tokens), size):
            gate, up = F.linear(filled[begin : begin + size], gate_up[expert]).chunk(2, dim=-1)
            inner = (activate(gate.float(), activation) * up.float()).to(x.dtype)
            part = tokens[begin : begin + size]
            result = F.linear(inner, down[expert])[: len(part)].float()
            output[part] += result * weight_of[expert, part, None]
    return output.to(x.dtype)


def kernel_specs() -> list[KernelSpec]:
    """The four kernels at the shapes of published mixtures, for verifies and prefill chunks."""
    qwen: dict[str, Any] = {"hidden": 2048, "intermediate": 768, "experts": 128, "top": 8}
    deepseek: dict[str, Any] = {"hidden": 7168, "intermediate": 2048, "experts": 256, "top": 8}
    gemma: dict[str, Any] = {"hidden": 2816, "intermediate": 704, "experts": 128, "top": 8, "activation": "gelu_tanh"}
    # Elsewhere the first kernel and the last are like these.
    specs = _specs("2048 x 768, bf16", "bf16", width=8, whole=True, **qwen)
    specs += _specs("2048 x 768, bf16, prefill", "bf16", width=512, whole=True, **qwen)
    specs += _specs("2048 x 768, fp16", "fp16", width=8, **qwen)
    specs += _specs("2048 x 768, fp32", "fp32", width=8, **qwen)
    specs += _specs("7168 x 2048, bf16", "bf16", width=8, **deepseek)
    specs += _specs("2816 x 704, bf16, gelu_tanh", "bf16", width=8, **gemma)
    return specs


def _specs(
    variant: str,
    kind: str,
    *,
    width: int,
    hidden: int,
    intermediate: int,
    experts: int,
    top: int,
    activation: str = "silu",
    whole: bool = False,
) -> list[KernelSpec]:
    pairs, element = width * top, 4 if kind == "fp32" else 2
    blocks = launch_config(pairs=pairs, num_experts=experts, bytes_each=element)
    sizes = {"HIDDEN": hidden, "INTERMEDIATE": intermediate, "NUM_EXPERTS": experts}
    sizes["EXPERTS"] = next_power_of_2(experts)
    # As many experts as tokens that choose independently touch on average.
    touched = round(experts * (1 - (1 - top / experts) ** width))
    shape = f"{width} tokens, {top} of {experts} experts"
    pointers = {"order": "*i32", "offsets": "*i32"}
    products: dict[str, Any] = {"OPERAND": OPERANDS.get(kind), **sizes, **blocks}
    specs = [
        KernelSpec(
            op="moe_experts",
            variant=f"{variant}: sort",
            kernel=sort_kernel,
            arguments={**pointers, "experts": "*i32", "rows": "*i32", "num_pairs": "i32"},
            constants={"TOP": top, "BLOCK": min(1024, next_power_of_2(pairs))},
            num_stages=3,
            shape=shape,
            bytes_moved=4 * (2 * pairs + width + experts + 1),
        ),
        KernelSpec(
            op="moe_experts",
            variant=f"{variant}: gate, up",
            kernel=gate_up_kernel,
            arguments={**pointers, "x": f"*{kind}", "gate_up": f"*{kind}", "inner": f"*{kind}", "x_stride": "i32:16"},
            constants={"TOP": top, "ACTIVATION": activation, **products},
            num_stages=3,
            shape=shape,
            bytes_moved=element * (touched * 2 * intermediate * hidden + width * hidden + pairs * intermediate),
        ),
        KernelSpec(
            op="moe_experts",
            variant=f"{variant}: down",
            kernel=down_kernel,
            arguments={
                **pointers,
                "inner": f"*{kind}",
                "weights": "*fp32",
                "down": f"*{kind}",
                "partial": "*fp32",
            },
            constants=products,
            num_stages=3,
            shape=shape,
            bytes_moved=element * (touched * intermediate * hidden + pairs * intermediate) + 4 * pairs * (hidden + 1),
        ),
        KernelSpec(
            op="moe_experts",
            variant=f"{variant}: sum",
            kernel=sum_kernel,
            arguments={"partial": "*fp32", "rows": "*i32", "output": f"*{kind}"},
            constants={"HIDDEN": hidden, "TOP": top, "BLOCK": min(1024, next_power_of_2(hidden))},
            num_stages=3,
            shape=shape,
            bytes_moved=4 * pairs * hidden + width * (element * hidden + 4),
        ),
    ]
    return specs if whole else specs[1:3]


def _moe_experts_fake(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    rows: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    return torch.empty_like(x)


_moe_experts = define_op(
    "moe_experts(Tensor x, Tensor experts, Tensor weights, Tensor rows, Tensor gate_up, Tensor down, "
    "str activation) -> Tensor",
    cpu=_moe_experts_cpu,
    fake=_moe_experts_fake,
    cuda=moe_experts_triton,
)


def moe_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    rows: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """The weighted sum of each token's experts, `sum_k weight_k * down_k (act(gate_k x) * up_k x)`.

    That is equation 1 of Shazeer et al. 2017 with gated feed-forwards (Shazeer 2020) for experts.

    Only the weights of experts that some token chose are read; padding tokens choose none. Products are summed in
    float32, `act(gate) * up` is rounded to the type of `x`, and so is the sum over a token's experts; the CPU rounds
    each product too. A token's result depends, bit for bit, on no other token.

    Args:
        x: [W, hidden].
        experts: int32 [W, k], different ones for each token.
        weights: float32 [W, k].
        rows: int32 [W], the row of each token, -1 in padding.
        gate_up: [E, 2 * intermediate, hidden], of each expert gate, then up.
        down: [E, hidden, intermediate].
        activation: of the gate, one of `ACTIVATIONS`.

    Returns:
        [W, hidden], zero in padding.
    """
    return _moe_experts(x, experts, weights, rows, gate_up, down, activation)
