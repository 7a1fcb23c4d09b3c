"""Tensor names of MiMo checkpoints: Llama's, and those of the layers for multi-token prediction."""

from __future__ import annotations

from ..llama import checkpoint as llama

LAYER_NORMS = llama.LAYER_NORMS


def rename(name: str) -> str | None:
    """The name that the shared loader knows a tensor by; None for one that is not needed."""
    return None if name.startswith("model.mtp_layers.") else llama.rename(name)
