"""Reads a Qwen3 config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import DecoderConfig
from ..hf_config import decoder_config, qwen_layer_types


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Makes the configuration; `head_dim` is 128 unless given, whatever the hidden size."""
    hf = {"max_position_embeddings": 32_768, "head_dim": 128, **hf}
    layer_types, window = qwen_layer_types(hf)
    attention_bias = bool(hf.get("attention_bias"))
    return decoder_config(
        hf,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
        layer_types=layer_types,
        sliding_window=window,
    )
