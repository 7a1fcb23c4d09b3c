"""config.json files of every family, new and old, read as transformers reads them."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from tiny_models import MODELS, tiny_model

from draftgraph.model_zoo import CheckpointError, DecoderConfig, UnsupportedModelError, read_config
from draftgraph.model_zoo.registry import FAMILIES, family_of
from draftgraph.model_zoo.rope import RopeConfig

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
ROPE = RopeConfig(dim=16, theta=10_000.0)
BASE = DecoderConfig(
    model_type="llama",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    norm_eps=1e-6,
    max_position_embeddings=256,
    rope=(("full_attention", ROPE),),
    layer_types=("full_attention", "full_attention"),
    attention_scale=0.25,
)


def _read(hf: dict) -> DecoderConfig:
    return family_of(hf).read_config(hf)


def test_bare_llama() -> None:
    assert _read(LLAMA) == BASE


@pytest.mark.parametrize("name", MODELS)
def test_sizes_of_tiny_models(name) -> None:
    hf = tiny_model(name).config
    config = _read(json.loads(hf.to_json_string()))
    assert config.num_layers == hf.num_hidden_layers
    if config.full_heads is not None:
        assert (config.num_kv_heads, config.head_dim, config.full_heads.head_dim) == (2, 16, 32)
    elif config.mla is None:
        assert config.num_kv_heads == hf.num_key_value_heads
        assert config.head_dim == (hf.head_dim if hasattr(hf, "head_dim") else 16)
    else:
        assert (config.num_kv_heads, config.head_dim) == (1, hf.kv_lora_rank + hf.qk_rope_head_dim)
    assert config.max_position_embeddings == 512
    assert config.eos_token_ids == (2,)
    assert config.tie_word_embeddings == hf.tie_word_embeddings
    assert config.norm_eps == hf.rms_norm_eps


def test_old_rope_keys() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 64
    config = _read({**LLAMA, "rope_theta": 500_000.0, "rope_scaling": scaling})
    rope = config.rope_by_type["full_attention"]
    assert (rope.theta, rope.rope_type, rope.factor) == (500_000.0, "llama3", 8.0)
    assert rope.original_max_position_embeddings == 64
    new = {**LLAMA, "rope_parameters": {**scaling, "rope_theta": 500_000.0}}
    assert _read(new) == config


def test_old_gemma3_keys() -> None:
    hf = {"model_type": "gemma3_text", "rope_theta": 2e6, "rope_local_base_freq": 3e4, "num_hidden_layers": 7}
    config = _read({**hf, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window_pattern": 3})
    sliding, full = "sliding_attention", "full_attention"
    assert config.layer_types == (sliding, sliding, full, sliding, sliding, full, sliding)
    assert config.rope_by_type[full] == RopeConfig(dim=256, theta=2e6, rope_type="linear", factor=8.0)
    assert config.rope_by_type[sliding] == RopeConfig(dim=256, theta=3e4)


def test_multimodal_gemma3_gives_its_text_part() -> None:
    text = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "sliding_window": 32}
    hf = {
        "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text", **text},
        "eos_token_id": [1, 106],
    }
    config = _read(hf)
    assert config.model_type == "gemma3_text"
    assert (config.hidden_size, config.num_heads, config.num_kv_heads, config.vocab_size) == (
        128,
        8,
        4,
        262_208,
    )
    assert config.eos_token_ids == (1, 106)
    assert config.tie_word_embeddings


def test_mistral_window_null_and_absent() -> None:
    hf = {**LLAMA, "model_type": "mistral", "num_key_value_heads": 4}
    assert _read({**hf, "sliding_window": None}).layer_types == ("full_attention",) * 2
    absent = _read(hf)
    assert absent.layer_types == ("sliding_attention",) * 2
    assert absent.sliding_window == 4096


def test_generation_config_names_the_end_tokens(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 2}))
    assert read_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert read_config(tmp_path).eos_token_ids == (7, 8)


@pytest.mark.parametrize(
    ("hf", "error", "message"),
    [
        ({}, CheckpointError, "config.json lacks model_type"),
        ({"model_type": "gpt2"}, UnsupportedModelError, "config.json: model type 'gpt2'; supported"),
        (
            {"speculators_model_type": "eagle3"},
            CheckpointError,
            "config.json is that of a draft head, not of a model: it has speculators_model_type; name the model",
        ),
        ({"model_type": "llama", "draft_vocab_size": 9}, CheckpointError, "config.json is that of a draft head"),
        ({"model_type": "medusa", "medusa_num_heads": 2}, CheckpointError, "config.json is that of a draft head"),
    ],
)
def test_what_is_no_model_is_named_with_its_path(tmp_path, hf, error, message) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf))
    with pytest.raises(error, match=f"^{re.escape(f'{tmp_path}/{message}')}"):
        read_config(tmp_path)


def test_unknown_family_lists_the_known_ones() -> None:
    with pytest.raises(UnsupportedModelError, match="gpt2") as caught:
        family_of({"model_type": "gpt2"})
    for name in FAMILIES:
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model_type": None}, CheckpointError, "lacks model_type"),
        ({"hidden_size": None}, CheckpointError, "lacks hidden_size"),
        ({"num_key_value_heads": 3}, ValueError, "multiple of num_kv_heads"),
        (
            {"num_attention_heads": 0},
            CheckpointError,
            "num_attention_heads .* must be a positive integer, got 0",
        ),
        ({"num_attention_heads": 1000}, CheckpointError, "is not enough for 1000 attention heads"),
        ({"model_type": ["llama"]}, UnsupportedModelError, r"model type \['llama'\]; supported"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 0}, CheckpointError, "decoder_sparse_step .* got 0"),
        ({"model_type": "ernie4_5_moe", "moe_layer_interval": 0}, CheckpointError, "moe_layer_interval .* got 0"),
        ({"model_type": "gemma3_text", "query_pre_attn_scalar": 0}, CheckpointError, "query_pre_attn_scalar .* got 0"),
        ({"hidden_act": "relu"}, UnsupportedModelError, "'relu'; supported: silu"),
        ({"quantization_config": {"quant_method": "gptq"}}, UnsupportedModelError, "gptq"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, UnsupportedModelError, "dynamic"),
        ({"head_dim": 15}, ValueError, "head_dim must be even|even number"),
        (
            {"model_type": "gemma3_text", "use_bidirectional_attention": True},
            UnsupportedModelError,
            "bidirectional",
        ),
    ],
)
def test_errors(changes, error, message) -> None:
    with pytest.raises(error, match=message):
        _read({**LLAMA, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be a positive integer"),
        ({"layer_types": ("full_attention",)}, "1 layer_types for 2 layers"),
        ({"layer_types": ("full_attention", "sliding_attention")}, "positive sliding_window"),
        ({"layer_types": ("full_attention", "chunked")}, "chunked"),
        ({"rope": ()}, "no rotary embedding"),
        ({"rope": (("full_attention", RopeConfig(dim=32, theta=1e4)),)}, "turns 32 of 16"),
        ({"attention_scale": 0.0}, "attention_scale must be positive"),
        ({"activation": "tanh"}, "supported: silu, gelu, gelu_tanh"),
    ],
)
def test_validation(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BASE, **changes)
