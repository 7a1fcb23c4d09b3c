"""Tensor names of Gemma 4 checkpoints."""

from __future__ import annotations

from ..gemma3.checkpoint import LAYER_NORMS

__all__ = ["LAYER_NORMS", "rename"]

_NOT_TEXT = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.")
# The mixture's parts, where the shared loader looks for them.
_PARTS = {
    ".router.proj.": ".mlp.gate.",
    ".router.": ".mlp.gate.",
    ".experts.": ".mlp.experts.",
}


def rename(name: str) -> str | None:
    """The name that the shared loader knows a tensor by; None for one that is not needed."""
    if name.removeprefix("model.").startswith(_NOT_TEXT) or name.endswith("rotary_emb.inv_freq"):
        return None
    # Multimodal checkpoints.
    name = name.replace("model.language_model.", "model.", 1)
    for part, known in _PARTS.items():
        if part in name:
            return name.replace(part, known, 1)
    return name
