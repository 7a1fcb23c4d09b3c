"""Reads a Gemma 4 config.json, of a text model or of a multimodal one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import LAYER_TYPES, DecoderConfig, HeadsConfig, MoeConfig, PerLayerInputConfig
from ..errors import UnsupportedModelError
from ..hf_config import decoder_config
from ..rope import RopeConfig

# Multimodal checkpoints leave out what equals transformers' defaults.
DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
}
_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
_SLIDING_PER_FULL = 5


def _layer_types(hf: Mapping[str, Any]) -> list[str]:
    count = hf["num_hidden_layers"]
    types = list(hf.get("layer_types") or ())
    if not types:
        period = _SLIDING_PER_FULL + 1
        types = ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(count)]
    unknown = sorted(set(types) - set(LAYER_TYPES))
    if unknown:
        raise UnsupportedModelError(f"layer types {unknown}; supported: {', '.join(LAYER_TYPES)}")
    # Whatever the file says, the last layer sees everything, as in transformers.
    types[-1:] = ["full_attention"]
    return types


def _full_heads(hf: Mapping[str, Any], layer_types: list[str]) -> HeadsConfig:
    """The heads of full layers, in the words of the hub's files or in those that transformers 5 writes."""
    shared = bool(hf.get("attention_k_eq_v"))
    kv_heads = (hf.get("num_global_key_value_heads") if shared else None) or hf["num_key_value_heads"]
    head_dim = hf.get("global_head_dim") or 512
    overrides = hf.get("per_layer_config")
    if overrides is not None:
        full = [layer for layer, kind in enumerate(layer_types) if kind == "full_attention"]
        of_layer = {int(layer): values for layer, values in overrides.items()}
        first = of_layer.get(full[0], {})
        if set(of_layer) - set(full) or any(of_layer.get(layer, {}) != first for layer in full):
            raise UnsupportedModelError(
                f"per_layer_config {overrides!r}; supported: the same for all full_attention layers, and no others"
            )
        unknown = sorted(set(first) - {"head_dim", "num_key_value_heads"})
        if unknown:
            raise UnsupportedModelError(f"per_layer_config sets {unknown}; supported: head_dim, num_key_value_heads")
        kv_heads = first.get("num_key_value_heads", hf["num_key_value_heads"])
        head_dim = first.get("head_dim", hf["head_dim"])
    return HeadsConfig(num_kv_heads=kv_heads, head_dim=head_dim, keys_are_values=shared)


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Makes the configuration; of a multimodal model that of its text part.

    Raises:
        UnsupportedModelError: text tokens attend in both directions, or heads differ within a kind of layer.
    """
    text = hf.get("text_config")
    if text is not None:
        shared = {name: hf[name] for name in ("eos_token_id", "tie_word_embeddings") if hf.get(name) is not None}
        hf = {**text, **shared, "model_type": "gemma4_text"}
    hf = {**DEFAULTS, **hf}
    if hf.get("use_bidirectional_attention") == "all":
        raise UnsupportedModelError("use_bidirectional_attention 'all' does not generate text; supported: vision, null")
    sharing, count = hf.get("num_kv_shared_layers") or 0, hf["num_hidden_layers"]
    if not 0 <= sharing < count:
        raise ValueError(f"num_kv_shared_layers must be 0 to {count - 1}, got {sharing}")
    return text_config(hf)


def text_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Makes the configuration of text layers, of which all may read another model's keys and values.

    Args:
        hf: a text model's config.json, with every field that `read_config` has defaults for.
    """
    layer_types = _layer_types(hf)
    full = _full_heads(hf, layer_types)
    rope = hf.get("rope_parameters") or _ROPE
    head_dims = {"sliding_attention": hf["head_dim"], "full_attention": full.head_dim}
    moe = None
    if hf.get("enable_moe_block"):
        moe = MoeConfig(
            layers=tuple(range(hf["num_hidden_layers"])),
            num_experts=hf["num_experts"],
            experts_per_token=hf["top_k_experts"],
            intermediate_size=hf["moe_intermediate_size"],
            normalize=True,
            beside_dense=True,
        )
    per_layer = None
    if hf["hidden_size_per_layer_input"]:
        per_layer = PerLayerInputConfig(
            vocab_size=hf["vocab_size_per_layer_input"], size=hf["hidden_size_per_layer_input"]
        )
    attention_bias = bool(hf.get("attention_bias"))
    return decoder_config(
        {**hf, "hidden_act": hf["hidden_activation"]},
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
        post_norms=True,
        value_norm=True,
        full_heads=full,
        layer_types=layer_types,
        sliding_window=hf["sliding_window"] or 0,
        rope=tuple(
            (
                kind,
                RopeConfig.from_parameters(
                    rope[kind],
                    head_dim=head_dims[kind],
                    theta=10_000.0,
                    max_position_embeddings=hf["max_position_embeddings"],
                ),
            )
            for kind in sorted(set(layer_types))
        ),
        attention_scale=1.0,
        final_soft_cap=hf.get("final_logit_softcapping") or 0.0,
        embedding_scale=hf["hidden_size"] ** 0.5,
        num_shared_layers=hf.get("num_kv_shared_layers") or 0,
        shared_mlp_factor=2 if hf.get("use_double_wide_mlp") else 1,
        layer_scale=True,
        per_layer_input=per_layer,
        moe=moe,
    )
