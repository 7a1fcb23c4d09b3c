"""Reads a Gemma 3 config.json, of a text model or of a multimodal one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import DecoderConfig
from ..errors import CheckpointError, UnsupportedModelError
from ..hf_config import decoder_config
from ..rope import RopeConfig

# Multimodal checkpoints leave out what equals transformers' defaults.
_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}


def _rope(hf: Mapping[str, Any]) -> dict[str, RopeConfig]:
    nested = hf.get("rope_parameters") or {}
    # Before transformers 5 the scaling was given apart and held for the full layers.
    scaling = hf.get("rope_scaling") or {}
    bases = {
        "full_attention": hf.get("rope_theta") or 1_000_000.0,
        "sliding_attention": hf.get("rope_local_base_freq") or 10_000.0,
    }
    return {
        kind: RopeConfig.from_parameters(
            {**(nested.get(kind) or {}), **(scaling if kind == "full_attention" else {})},
            head_dim=hf["head_dim"],
            theta=theta,
            max_position_embeddings=hf["max_position_embeddings"],
        )
        for kind, theta in bases.items()
    }


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Makes the configuration; of a multimodal model that of its text part.

    Raises:
        UnsupportedModelError: the model attends in both directions (an embedding model).
    """
    text = hf.get("text_config")
    if text is not None:
        shared = {name: hf[name] for name in ("eos_token_id", "tie_word_embeddings") if hf.get(name) is not None}
        hf = {**text, **shared, "model_type": "gemma3_text"}
    hf = {**_DEFAULTS, **hf}
    if hf.get("use_bidirectional_attention"):
        raise UnsupportedModelError("Gemma 3 with use_bidirectional_attention does not generate text")
    layer_types = hf.get("layer_types")
    if layer_types is None:
        pattern = hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or 6
        layer_types = [
            "full_attention" if (layer + 1) % pattern == 0 else "sliding_attention"
            for layer in range(hf["num_hidden_layers"])
        ]
    rope = _rope(hf)
    attention_bias = bool(hf.get("attention_bias"))
    if not hf["query_pre_attn_scalar"] > 0:
        scalar = hf["query_pre_attn_scalar"]
        raise CheckpointError(f"query_pre_attn_scalar in config.json must be a positive number, got {scalar!r}")
    return decoder_config(
        # The families' other name comes first in the shared reader, and Gemma configs may hold both.
        {**hf, "hidden_act": hf["hidden_activation"]},
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
        norm_unit_offset=True,
        post_norms=True,
        layer_types=layer_types,
        sliding_window=hf["sliding_window"] or 0,
        rope=tuple((kind, rope[kind]) for kind in sorted(set(layer_types)) if kind in rope),
        attention_scale=hf["query_pre_attn_scalar"] ** -0.5,
        # `attn_logit_softcapping` is of Gemma 2: transformers' Gemma 3 reads it and does not apply it, nor do we.
        final_soft_cap=hf.get("final_logit_softcapping") or 0.0,
        embedding_scale=hf["hidden_size"] ** 0.5,
    )
