"""Reads a DeepSeek-V3 config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import DecoderConfig, MoeConfig
from ..errors import UnsupportedModelError
from ..hf_config import decoder_config, first_given, latent_choices, require_choice

_DEFAULTS = {
    "max_position_embeddings": 4096,
    "n_routed_experts": 256,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 1536,
    "num_nextn_predict_layers": 1,
    "eos_token_id": 1,
}


def biased_sigmoid_router(hf: Mapping[str, Any]) -> MoeConfig:
    """The mixtures of DeepSeek-V3 (section 2.1.2) and of the families that follow it.

    Args:
        hf: a config.json, the family's defaults filled in.

    Raises:
        UnsupportedModelError: the router is another one.
    """
    require_choice(hf, "scoring_func", "sigmoid")
    require_choice(hf, "topk_method", "noaux_tc")
    if hf.get("moe_layer_freq", 1) != 1:
        raise UnsupportedModelError(f"moe_layer_freq {hf['moe_layer_freq']!r}; supported: 1")
    size = hf["moe_intermediate_size"]
    return MoeConfig(
        layers=tuple(range(hf["first_k_dense_replace"], hf["num_hidden_layers"])),
        num_experts=first_given(hf, "n_routed_experts", "num_local_experts"),
        experts_per_token=hf["num_experts_per_tok"],
        intermediate_size=size,
        shared_size=size * first_given(hf, "n_shared_experts", default=1),
        scoring="sigmoid",
        choice_bias=True,
        num_groups=first_given(hf, "n_group", default=1),
        groups_per_token=first_given(hf, "topk_group", default=1),
        group_members=2,
        normalize=bool(hf.get("norm_topk_prob", True)),
        normalize_min=1e-20,
        scale=float(hf.get("routed_scaling_factor", 1.0)),
        float32_router=True,
    )


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Makes the configuration; rotary pairs are neighbours unless the file says otherwise."""
    hf = {**_DEFAULTS, **hf}
    interleaved = first_given(hf, "rope_interleave", default=True)
    return decoder_config(hf, moe=biased_sigmoid_router(hf), rope_interleaved=interleaved, **latent_choices(hf))
