"""Reads a Qwen3-Next config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import DecoderConfig, MoeConfig
from ..errors import UnsupportedModelError
from ..hf_config import decoder_config, first_given, positive_integer

_DEFAULTS = {
    "max_position_embeddings": 32_768,
    "head_dim": 256,
    "num_key_value_heads": 2,
    "intermediate_size": 5632,
    "full_attention_interval": 4,
}


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Makes the configuration; a quarter of a head's dimensions are rotated unless the file says otherwise.

    Raises:
        UnsupportedModelError: there are layers of linear attention, as in the published models.
    """
    hf = {**_DEFAULTS, **hf}
    if (hf.get("rope_parameters") or {}).get("partial_rotary_factor") is None:
        hf.setdefault("partial_rotary_factor", 0.25)
    num_layers, interval = hf.get("num_hidden_layers", 0), hf["full_attention_interval"]
    kinds = hf.get("layer_types") or [
        "linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(num_layers)
    ]
    if set(kinds) - {"full_attention"}:
        raise UnsupportedModelError(
            f"layer types {sorted(set(kinds) - {'full_attention'})} of 'qwen3_next'; supported: full_attention"
        )
    if hf.get("attention_bias"):
        raise UnsupportedModelError("attention_bias True of 'qwen3_next'; supported: False")
    dense, step = hf.get("mlp_only_layers") or [], positive_integer(hf, "decoder_sparse_step", default=1)
    moe = MoeConfig(
        layers=tuple(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0),
        num_experts=first_given(hf, "num_experts", "num_local_experts", default=512),
        experts_per_token=hf.get("num_experts_per_tok", 10),
        intermediate_size=hf.get("moe_intermediate_size", 512),
        shared_size=hf.get("shared_expert_intermediate_size", 512),
        shared_gate=True,
        normalize=bool(hf.get("norm_topk_prob", True)),
    )
    return decoder_config(hf, qk_norm=True, norm_unit_offset=True, output_gate=True, moe=moe, layer_types=list(kinds))
