"""The parts of config.json that all heads have in the format of the speculators library."""

from __future__ import annotations

from typing import Any

from .layers import LayerShape
from .trainee import TargetFacts


def speculators_json(target: TargetFacts, method: str, num_drafts: int) -> dict[str, Any]:
    """What says which method it is and whom it drafts for.

    Args:
        target: the verifier.
        method: `speculators_model_type`.
        num_drafts: tokens that it proposes per round.
    """
    return {
        "architectures": [_ARCHITECTURES[method]],
        "speculators_model_type": method,
        "speculators_config": proposals_json(target, method, num_drafts),
        "torch_dtype": "bfloat16",
    }


def proposals_json(target: TargetFacts, method: str, num_drafts: int) -> dict[str, Any]:
    """`speculators_config`: what is proposed per round, and to whom."""
    return {
        "algorithm": method,
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_drafts}],
        "verifier": {
            "name_or_path": target.name,
            "architectures": list(target.config.get("architectures") or []),
        },
    }


_ARCHITECTURES = {
    "eagle3": "Eagle3Speculator",
    "dflash": "DFlashSpeculator",
    "dspark": "DSparkSpeculator",
}


def layers_json(shape: LayerShape, num_layers: int, target: TargetFacts) -> dict[str, Any]:
    """`transformer_layer_config`: a Llama model's, as the loader reads it."""
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "max_position_embeddings": int(target.config.get("max_position_embeddings", 8192)),
        "vocab_size": target.embedding.shape[0],
        "attention_bias": False,
        "mlp_bias": False,
    }
