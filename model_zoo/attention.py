"""Attention over heads of cached keys and values."""

from __future__ import annotations

import torch

from ..kernels.attention_backends import attend
from ..kernels.linear import linear
from ..kernels.rms_norm import rms_norm
from ..kernels.rope_and_cache import rope_and_cache, rotate
from ..kernels.window import Window
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
    projected = linear(normed, weights.qkv, weights.qkv_bias)
    gates = None
    if constants.output_gate:
        queries = constants.num_heads * key_cache.shape[3]
        projected, gates = projected.split([projected.shape[1] - queries, queries], dim=1)
        projected, gates = projected.clone(memory_format=torch.contiguous_format), torch.sigmoid(gates)
    make_query = _write_and_turn if constants.writes_cache else _turn
    query = make_query(projected, weights, key_cache, value_cache, cos, sin, window, constants)
    attended = attend(
        constants.attention_backend,
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
    attended = attended.flatten(1)
    return attended if gates is None else attended * gates


def _turn(
    projected: torch.Tensor,
    weights: LayerWeights,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    window: Window,
    constants: LayerConstants,
) -> torch.Tensor:
    # The queries of a layer that reads another's keys and values.
    query = projected.unflatten(1, (constants.num_heads, -1))
    if weights.query_norm is not None:
        query = rms_norm(query, weights.query_norm, constants.norm_eps, constants.norm_unit_offset)
    return rotate(query, cos[window.positions], sin[window.positions], constants.rope_interleaved)


def _write_and_turn(
    projected: torch.Tensor,
    weights: LayerWeights,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    window: Window,
    constants: LayerConstants,
) -> torch.Tensor:
    # The queries, after the keys and values are written.
    if constants.value_norm or constants.keys_are_values:
        kv_heads, size = value_cache.shape[1], value_cache.shape[3]
        keep = projected.shape[1] - (0 if constants.keys_are_values else kv_heads * size)
        values = projected[:, -kv_heads * size :].unflatten(1, (kv_heads, size))
        if constants.value_norm:
            values = rms_norm(values, None, constants.norm_eps)
        projected = torch.cat((projected[:, :keep], values.flatten(1)), dim=1)
    return rope_and_cache(
        projected,
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
