"""Tensor names of Llama checkpoints."""

from __future__ import annotations

LAYER_NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
"""Names inside a layer, and their fields of `LayerWeights`."""


def rename(name: str) -> str | None:
    """The name that the shared loader knows a tensor by; None for one that is not needed."""
    # Old checkpoints store the rotary frequencies of each layer; they follow from the configuration.
    return None if name.endswith("rotary_emb.inv_freq") else name
