"""Reads the config.json of an ERNIE 4.5 model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import DecoderConfig, MoeConfig
from ..errors import UnsupportedModelError
from ..hf_config import decoder_config, first_given, positive_integer

_DEFAULTS = {
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def _read(hf: Mapping[str, Any], **choices: Any) -> DecoderConfig:
    if hf.get("use_bias"):
        raise UnsupportedModelError("use_bias True, which puts biases on every projection; supported: False")
    return decoder_config(
        hf,
        rope_interleaved=True,
        # Their layers for multi-token prediction have names of their own.
        num_next_token_layers=0,
        **choices,
    )


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Makes the configuration of a dense model; `head_dim` is 128 unless given.

    Raises:
        UnsupportedModelError: there are biases.
    """
    return _read({**_DEFAULTS, "num_key_value_heads": 2, "head_dim": 128, **hf})


def read_moe_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Makes the configuration of a model with mixtures.

    Raises:
        UnsupportedModelError: there are biases, or experts have sizes by modality, as in the multimodal models.
    """
    hf = {**_DEFAULTS, "num_key_value_heads": 4, **hf}
    size = hf.get("moe_intermediate_size", 1536)
    experts = first_given(hf, "moe_num_experts", "num_experts", "num_local_experts", default=64)
    for name, value in (("moe_intermediate_size", size), ("moe_num_experts", experts)):
        if not isinstance(value, int):
            raise UnsupportedModelError(f"{name} {value!r}; supported: one number for all experts")
    num_layers = hf.get("num_hidden_layers", 0)
    first, end = hf.get("moe_layer_start_index", 1), hf.get("moe_layer_end_index", -1)
    last = num_layers - 1 if end == -1 else end
    interval = positive_integer(hf, "moe_layer_interval", default=1)
    moe = MoeConfig(
        layers=tuple(layer for layer in range(num_layers) if (layer + 1) % interval == 0 and first <= layer <= last),
        num_experts=experts,
        experts_per_token=first_given(hf, "moe_k", "num_experts_per_tok", default=6),
        intermediate_size=size,
        shared_size=size * first_given(hf, "moe_num_shared_experts", default=2),
        choice_bias=True,
        normalize=True,
        normalize_min=float(hf.get("moe_norm_min", 1e-12)),
        float32_router=True,
    )
    return _read(hf, moe=moe)
