"""Tensor names of Qwen3-Next checkpoints: Llama's, with one shared expert."""

from __future__ import annotations

from ..llama import checkpoint as llama

LAYER_NORMS = llama.LAYER_NORMS


def rename(name: str) -> str | None:
    """The name that the shared loader knows a tensor by; None for one that is not needed."""
    return llama.rename(name.replace(".mlp.shared_expert.", ".mlp.shared_experts."))
