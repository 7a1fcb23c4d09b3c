"""Multi-head latent attention (DeepSeek-V2, section 2.1): one latent per token is cached for all heads.

The projections that would make every head's keys and values of the latents are absorbed (section 2.1.3): the one of the
keys is applied to the queries, the one of the values to what was attended. So attention is that of many query heads
over one key head, whose values are the latents, and the latents are also the last dimensions of the keys.
"""

from __future__ import annotations

import torch

from ..kernels.attention_backends import attend
from ..kernels.linear import linear
from ..kernels.rms_norm import rms_norm
from ..kernels.rope_and_cache import rope_and_cache
from ..kernels.window import Window
from .weights import LayerConstants, LayerWeights


def latent_attention(
    normed: torch.Tensor,
    weights: LayerWeights,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    window: Window,
    constants: LayerConstants,
) -> torch.Tensor:
    """Latent attention of a window.

    Args:
        normed: [W, hidden].
        weights: of the layer.
        key_cache: [R1, 1, S, rope + rank], written to: a token's rotated key, then its latent.
        value_cache: [R1, 1, S, 0].
        cos: float32 [P, rope / 2].
        sin: float32 [P, rope / 2].
        window: the tokens.
        constants: the layer's choices.

    Returns:
        [W, Hq * Dv].
    """
    latent, heads = weights.latent, constants.num_heads
    assert latent is not None, "the layer has no weights of latent attention"
    assert weights.key_norm is not None, "the latent has no norm"
    rank, rope = latent.key_value.shape[2], 2 * cos.shape[1]
    projected = linear(normed, weights.qkv, weights.qkv_bias)
    query, compressed, key = projected.split([projected.shape[1] - rank - rope, rank, rope], dim=1)
    if latent.query is not None and weights.query_norm is not None:
        query = linear(rms_norm(query, weights.query_norm, constants.latent_norm_eps), latent.query)
    query = query.unflatten(1, (heads, -1))
    nope = query.shape[2] - rope
    absorbed = torch.bmm(query[:, :, :nope].transpose(0, 1), latent.key_value[:, :nope]).transpose(0, 1)
    query = torch.cat((query[:, :, nope:], absorbed), dim=2)
    compressed = rms_norm(compressed, weights.key_norm, constants.latent_norm_eps)
    query = rope_and_cache(
        torch.cat((query.flatten(1), key, compressed), dim=1),
        None,
        None,
        cos,
        sin,
        window.positions,
        window.slots,
        window.rows,
        window.cu_tokens,
        window.base,
        key_cache,
        value_cache,
        heads,
        constants.norm_eps,
        False,
        constants.rope_interleaved,
    )
    attended = attend(
        constants.attention_backend,
        query,
        key_cache,
        key_cache[..., rope:],
        window.positions,
        window.cu_tokens,
        window.base,
        window.slot_of_row,
        window.ancestors,
        constants.attention_scale,
        constants.sliding_window,
        constants.soft_cap,
    )
    values = torch.bmm(attended.transpose(0, 1), latent.key_value[:, nope:].transpose(1, 2))
    return values.transpose(0, 1).flatten(1)
