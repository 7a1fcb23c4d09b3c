"""From the fused projection to attention's inputs: head norms, rotary embedding, and the cache write."""

from __future__ import annotations

import torch

from .registration import define_op
from .rms_norm import rms_norm


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotary embedding (Su et al. 2021, equation 34) of the first `2 * half` dimensions, float32 inside.

    Args:
        x: [W, H, D].
        cos: float32 [W, half].
        sin: float32 [W, half].
        interleaved: dimensions 2i and 2i + 1 form a pair; otherwise i and i + half do.

    Returns:
        Like `x`, rounded once.
    """
    half = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
        pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
        turned = pairs.flatten(-2)
    else:
        first, second = rotated[..., :half], rotated[..., half:]
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    turned = turned.to(x.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def rope_and_cache_reference(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    cu_tokens: torch.Tensor,
    base: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_heads: int,
    eps: float,
    unit_offset: bool,
    interleaved: bool,
) -> torch.Tensor:
    """The specification of `rope_and_cache`."""
    width = qkv.shape[0]
    num_kv_heads, head_dim, value_dim = key_cache.shape[1], key_cache.shape[3], value_cache.shape[3]
    query, key, value = qkv.split([num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * value_dim], dim=-1)
    query = query.view(width, num_heads, head_dim)
    key = key.view(width, num_kv_heads, head_dim)
    value = value.view(width, num_kv_heads, value_dim)
    if q_norm is not None:
        query = rms_norm(query, q_norm, eps, unit_offset)
    if k_norm is not None:
        key = rms_norm(key, k_norm, eps, unit_offset)
    token_cos, token_sin = cos[positions], sin[positions]
    query = rotate(query, token_cos, token_sin, interleaved)
    key = rotate(key, token_cos, token_sin, interleaved)

    padding = rows < 0
    row = rows.clamp(min=0)
    token = torch.arange(width, device=qkv.device)
    place = torch.where(padding, 0, base[row] + token - cu_tokens[row])
    slot = torch.where(padding, key_cache.shape[0] - 1, slots)
    key_cache[slot, :, place] = key
    value_cache[slot, :, place] = value
    return query


def _rope_and_cache_fake(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    cu_tokens: torch.Tensor,
    base: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_heads: int,
    eps: float,
    unit_offset: bool,
    interleaved: bool,
) -> torch.Tensor:
    return qkv.new_empty((qkv.shape[0], num_heads, key_cache.shape[3]))


_rope_and_cache = define_op(
    "rope_and_cache(Tensor qkv, Tensor? q_norm, Tensor? k_norm, Tensor cos, Tensor sin, Tensor positions, "
    "Tensor slots, Tensor rows, Tensor cu_tokens, Tensor base, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "int num_heads, float eps, bool unit_offset, bool interleaved) -> Tensor",
    cpu=rope_and_cache_reference,
    fake=_rope_and_cache_fake,
)


def rope_and_cache(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    cu_tokens: torch.Tensor,
    base: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_heads: int,
    eps: float,
    unit_offset: bool,
    interleaved: bool,
) -> torch.Tensor:
    """Normalises and rotates the heads of `W` tokens and writes their keys and values to the cache.

    Token t of row b goes to `cache[slots[t], :, base[b] + t - cu_tokens[b]]`. Padding tokens (row -1) write
    to the last slot, the reserved one, and nowhere else.

    Args:
        qkv: [W, Hq * D + Hkv * D + Hkv * Dv], the fused projection; D and Dv are the caches' last dimensions.
        q_norm: [D], weight of the queries' per-head RMSNorm.
        k_norm: [D], weight of the keys' per-head RMSNorm.
        cos: float32 [P, half], by position, the attention factor folded in; `2 * half <= D` dimensions turn.
        sin: float32 [P, half].
        positions: int32 [W].
        slots: int32 [W].
        rows: int32 [W].
        cu_tokens: int32 [B + 1].
        base: int32 [B].
        key_cache: [R1, Hkv, S, D], written to.
        value_cache: [R1, Hkv, S, Dv], written to.
        num_heads: `Hq`.
        eps: of the head norms.
        unit_offset: the head norms multiply with `1 + weight` (Gemma).
        interleaved: rotary pairs are neighbours; otherwise they lie `half` apart.

    Returns:
        The queries, [W, Hq, D].
    """
    # Under torch.compile on the CPU, Inductor makes one kernel of the reference and of what surrounds it:
    # microseconds, where the two dozen aten calls take over a hundred.
    inline = qkv.device.type == "cpu" and torch.compiler.is_compiling()
    function = rope_and_cache_reference if inline else _rope_and_cache
    return function(
        qkv,
        q_norm,
        k_norm,
        cos,
        sin,
        positions,
        slots,
        rows,
        cu_tokens,
        base,
        key_cache,
        value_cache,
        num_heads,
        eps,
        unit_offset,
        interleaved,
    )
