"""What Inductor fuses in a decoder layer, since that is why some kernels need not be written (see kernels/README.md).

The CPU's generated code is read: its scheduler decides on fusion before a backend writes loops or Triton.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from draftgraph.kernels.window import Window
from draftgraph.model_zoo.decoder import LayerConstants, LayerWeights, decoder_layer

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, SIZE, CONTEXT, WIDTH = 64, 96, 4, 2, 16, 128, 8


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def code(request):
    """The generated Python of one compiled layer, with its C++ kernels."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(request.param)

    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    weights = LayerWeights(
        attention_norm=normal(HIDDEN),
        qkv=normal((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN),
        output=normal(HIDDEN, HEADS * SIZE),
        mlp_norm=normal(HIDDEN),
        gate_up=normal(2 * INTERMEDIATE, HIDDEN),
        down=normal(HIDDEN, INTERMEDIATE),
    )
    window = Window(
        tokens=ints(WIDTH),
        positions=ints(WIDTH),
        slots=ints(WIDTH),
        rows=ints(WIDTH),
        cu_tokens=torch.tensor([0, WIDTH], dtype=torch.int32),
        base=ints(1),
        slot_of_row=ints(1),
    )
    constants = LayerConstants(
        num_heads=HEADS,
        norm_eps=1e-6,
        norm_unit_offset=False,
        activation="silu",
        attention_scale=0.25,
        sliding_window=0,
        soft_cap=0.0,
    )
    cos, sin = torch.randn(2, CONTEXT, SIZE // 2)
    caches = [normal(3, KV_HEADS, CONTEXT, SIZE) for _ in range(2)]
    compiled = torch.compile(decoder_layer, fullgraph=True, dynamic=False)
    with torch.inference_mode():
        _, codes = run_and_get_code(compiled, normal(WIDTH, HIDDEN), weights, *caches, cos, sin, window, constants)
    return "\n".join(codes)


def launches(code):
    """What a layer runs, in order: the names of its fused kernels and of the ops between them."""
    body = code[code.index("def call(") :]
    return re.findall(r"^ +(cpp_fused\w*)\(|torch\.ops\.draftgraph\.(\w+)\.default\(", body, re.MULTILINE)


def test_a_layer_has_one_fused_kernel_between_two_ops(code):
    kinds = ["fused" if fused else op for fused, op in launches(code)]
    assert kinds == [
        "fused",  # the norm
        "linear",
        "fused",  # rope_and_cache, whose reference Inductor takes on the CPU
        "window_attention",
        "linear",
        "fused",  # the residual sum and the norm
        "linear",
        "fused",  # the gate's activation and the product
        "linear",
        "fused",  # the residual sum
    ]


@pytest.mark.parametrize(
    ("position", "parts"),
    [(0, ("mean", "mul", "rsqrt")), (2, ("add", "mean", "mul", "rsqrt")), (3, ("silu", "mul"))],
    ids=["rms_norm", "residual and rms_norm", "silu and mul"],
)
def test_it_is_one_loop_over_the_tokens(code, position, parts):
    name = [fused for fused, _ in launches(code) if fused][position]
    assert all(part in name for part in parts), name
    source = code[code.index(f"{name} = async_compile") :].split("''')", 1)[0]
    assert len(re.findall(r"for\(int64_t x0=", source)) == 1
