"""Reads a GLM-4-MoE config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import DecoderConfig
from ..deepseek_v3.config import biased_sigmoid_router
from ..hf_config import decoder_config

_DEFAULTS = {
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Makes the configuration; half of a head's dimensions are rotated unless the file says otherwise."""
    hf = {**_DEFAULTS, **hf}
    if (hf.get("rope_parameters") or {}).get("partial_rotary_factor") is None:
        hf.setdefault("partial_rotary_factor", 0.5)
    return decoder_config(
        hf,
        qkv_bias=bool(hf.get("attention_bias")),
        qk_norm=bool(hf.get("use_qk_norm")),
        moe=biased_sigmoid_router(hf),
    )
