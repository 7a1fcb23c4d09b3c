"""Reads a DeepSeek-V2 config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import DecoderConfig, MoeConfig
from ..errors import UnsupportedModelError
from ..hf_config import decoder_config, first_given, latent_choices, require_choice

_DEFAULTS = {
    "max_position_embeddings": 2048,
    "n_routed_experts": 64,
    "moe_intermediate_size": 1407,
    "n_shared_experts": 2,
    "first_k_dense_replace": 0,
    "q_lora_rank": 1536,
    "eos_token_id": 2,
}


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Makes the configuration.

    Raises:
        UnsupportedModelError: the router is none of the published ones.
    """
    hf = {**_DEFAULTS, **hf}
    require_choice(hf, "scoring_func", "softmax")
    method = first_given(hf, "topk_method", default="greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModelError(f"topk_method {method!r}; supported: greedy, group_limited_greedy")
    if hf.get("norm_topk_prob"):
        # The authors' code then drops the scaling factor and transformers' ignores the option.
        raise UnsupportedModelError("norm_topk_prob True of DeepSeek-V2; supported: False")
    if hf.get("moe_layer_freq", 1) != 1:
        raise UnsupportedModelError(f"moe_layer_freq {hf['moe_layer_freq']!r}; supported: 1")
    grouped = method == "group_limited_greedy"
    size = hf["moe_intermediate_size"]
    moe = MoeConfig(
        layers=tuple(range(hf["first_k_dense_replace"], hf["num_hidden_layers"])),
        num_experts=first_given(hf, "n_routed_experts", "num_experts"),
        experts_per_token=hf["num_experts_per_tok"],
        intermediate_size=size,
        shared_size=size * first_given(hf, "n_shared_experts", default=0),
        num_groups=hf["n_group"] if grouped else 1,
        groups_per_token=hf["topk_group"] if grouped else 1,
        scale=float(hf.get("routed_scaling_factor", 1.0)),
        float32_router=True,
    )
    mlp_bias = bool(hf.get("mlp_bias"))
    return decoder_config(hf, moe=moe, mlp_bias=mlp_bias, rope_interleaved=True, **latent_choices(hf))
