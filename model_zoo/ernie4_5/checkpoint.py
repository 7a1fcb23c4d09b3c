"""Tensor names of ERNIE 4.5 checkpoints."""

from __future__ import annotations

from ..llama import checkpoint as llama

LAYER_NORMS = llama.LAYER_NORMS


def rename(name: str) -> str | None:
    """The name that the shared loader knows a tensor by; None for one that is not needed."""
    # Layers for multi-token prediction belong to a drafter.
    if name.startswith("model.mtp_"):
        return None
    return llama.rename(name.replace(".mlp.moe_statics.", ".mlp.gate."))
