"""Tensor names of DeepSeek-V3 checkpoints, which are Llama's but for the latent attention's."""

from __future__ import annotations

from ..llama.checkpoint import LAYER_NORMS, rename

__all__ = ["LAYER_NORMS", "rename"]
