"""Reads a Qwen3-MoE config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import DecoderConfig, MoeConfig
from ..hf_config import decoder_config, first_given, positive_integer


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Makes the configuration; unlike in the dense family, a sliding window holds in every layer."""
    hf = {"max_position_embeddings": 32_768, **hf}
    dense, step = hf.get("mlp_only_layers") or [], positive_integer(hf, "decoder_sparse_step", default=1)
    num_layers = hf.get("num_hidden_layers", 0)
    moe = MoeConfig(
        layers=tuple(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0),
        num_experts=first_given(hf, "num_experts", "num_local_experts", "n_routed_experts", default=128),
        experts_per_token=hf.get("num_experts_per_tok", 8),
        intermediate_size=hf.get("moe_intermediate_size", 768),
        normalize=bool(hf.get("norm_topk_prob", False)),
    )
    window = (hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None) or 0
    attention_bias = bool(hf.get("attention_bias"))
    return decoder_config(
        hf,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
        sliding_window=window,
        layer_types=["sliding_attention" if window else "full_attention"] * num_layers,
        moe=moe,
    )
