"""Reads a MiMo config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import DecoderConfig
from ..hf_config import decoder_config, qwen_layer_types


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Makes the configuration: Qwen2's, with optional biases."""
    hf = {"max_position_embeddings": 32_768, **hf}
    layer_types, window = qwen_layer_types(hf)
    return decoder_config(
        hf,
        qkv_bias=bool(hf.get("attention_bias", True)),
        layer_types=layer_types,
        sliding_window=window,
        # Counted apart from the target's layers in the checkpoint.
        num_next_token_layers=0,
    )
