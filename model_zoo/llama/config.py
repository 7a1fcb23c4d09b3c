"""Reads a Llama config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import DecoderConfig
from ..hf_config import decoder_config


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Makes the configuration; `attention_bias` is on all four projections."""
    attention_bias = bool(hf.get("attention_bias"))
    return decoder_config(
        {"max_position_embeddings": 2048, **hf},
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=bool(hf.get("mlp_bias")),
    )
