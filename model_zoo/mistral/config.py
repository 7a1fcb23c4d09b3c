"""Reads a Mistral config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import DecoderConfig
from ..hf_config import decoder_config


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Makes the configuration. A `sliding_window` that is null means none; one that is absent means 4096."""
    hf = {"max_position_embeddings": 131_072, "sliding_window": 4096, "num_key_value_heads": 8, **hf}
    window = hf["sliding_window"] or 0
    kind = "sliding_attention" if window else "full_attention"
    return decoder_config(hf, sliding_window=window, layer_types=[kind] * hf.get("num_hidden_layers", 0))
