"""Tensor names of Gemma 3 checkpoints."""

from __future__ import annotations

LAYER_NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "attention_post_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
}
"""Names inside a layer, and their fields of `LayerWeights`."""

# Multimodal checkpoints, as first published and as transformers 5 writes them.
_PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_NOT_TEXT = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def rename(name: str) -> str | None:
    """The name that the shared loader knows a tensor by; None for one that is not needed."""
    if name.startswith(_NOT_TEXT) or name.endswith("rotary_emb.inv_freq"):
        return None
    for prefix, replacement in _PREFIXES.items():
        if name.startswith(prefix):
            return replacement + name[len(prefix) :]
    return name
