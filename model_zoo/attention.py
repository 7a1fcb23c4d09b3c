"""Attention over heads of cached keys and values."""

from __future__ import annotations

import torch

from ..kernels.linear import linear
from ..kernels.rope_and_cache import rope_and_cache
from ..kernels.window import Window
from ..kernels.window_attention import window_attention
from .weights import LayerConstants, LayerWeights


def head_attention(
    normed: torch.Tensor,
    weights: LayerWeights,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    window: Window,
    constants: LayerConstants,
) -> torch.Tensor:
    """Grouped-query attention (Ainslie et al. 2023) of a window: [W, hidden] to [W, Hq * D]."""
    query = rope_and_cache(
        linear(normed, weights.qkv, weights.qkv_bias),
        weights.query_norm,
        weights.key_norm,
        cos,
        sin,
        window.positions,
        window.slots,
        window.rows,
        window.cu_tokens,
        window.base,
        key_cache,
        value_cache,
        constants.num_heads,
        constants.norm_eps,
        constants.norm_unit_offset,
        constants.rope_interleaved,
    )
    attended = window_attention(
        query,
        key_cache,
        value_cache,
        window.positions,
        window.cu_tokens,
        window.base,
        window.slot_of_row,
        window.ancestors,
        constants.attention_scale,
        constants.sliding_window,
        constants.soft_cap,
    )
    return attended.flatten(1)
