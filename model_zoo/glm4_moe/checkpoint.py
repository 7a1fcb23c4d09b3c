"""Tensor names of GLM-4-MoE checkpoints, which are Llama's."""

from __future__ import annotations

from ..llama.checkpoint import LAYER_NORMS, rename

__all__ = ["LAYER_NORMS", "rename"]
