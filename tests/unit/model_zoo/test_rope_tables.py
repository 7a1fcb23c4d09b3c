"""Rotary tables against transformers' `ROPE_INIT_FUNCTIONS`."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftgraph.model_zoo.errors import UnsupportedModelError
from draftgraph.model_zoo.rope import RopeConfig, inverse_frequencies, rope_tables

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
PARAMETERS = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
    {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "attention_factor": 0.8},
    {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
]


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("parameters", PARAMETERS)
def test_equals_transformers(parameters, theta) -> None:
    hf = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=1024,
        rope_parameters={**parameters, "rope_theta": theta},
    )
    if parameters["rope_type"] == "default":
        expected, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(hf)
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](hf, device="cpu")
    rope = RopeConfig.from_parameters(parameters, head_dim=64, theta=theta, max_position_embeddings=1024)
    torch.testing.assert_close(inverse_frequencies(rope), expected, rtol=1e-6, atol=0.0)
    assert rope.attention_factor == pytest.approx(factor)

    cos, sin = rope_tables(rope, 100, "cpu")
    angles = torch.arange(100.0)[:, None] * expected
    torch.testing.assert_close(cos, angles.cos() * factor, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sin, angles.sin() * factor, rtol=1e-4, atol=1e-4)
    assert cos.shape == (100, rope.dim // 2)
    assert cos.dtype == torch.float32


def test_old_key_and_default_theta() -> None:
    rope = RopeConfig.from_parameters(
        {"type": "linear", "factor": 3.0}, head_dim=32, theta=5e5, max_position_embeddings=128
    )
    assert rope == RopeConfig(dim=32, theta=5e5, rope_type="linear", factor=3.0)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "axial"])
def test_other_types_are_refused(kind) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{kind}.*default, linear, llama3, yarn"):
        RopeConfig.from_parameters(
            {"rope_type": kind, "factor": 2.0}, head_dim=32, theta=1e4, max_position_embeddings=128
        )


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "linear"}, "lacks factor"),
        ({"rope_type": "llama3", "factor": 2.0}, "lacks low_freq_factor, high_freq_factor"),
        ({"rope_type": "llama3", "factor": 2.0, **LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor above"),
        ({"rope_type": "default", "partial_rotary_factor": 0.1}, "even number"),
    ],
)
def test_bad_parameters(parameters, message) -> None:
    with pytest.raises(ValueError, match=message):
        RopeConfig.from_parameters(parameters, head_dim=32, theta=1e4, max_position_embeddings=128)
