"""From the fused projection to attention's inputs: head norms, rotary embedding, and the cache write."""

from __future__ import annotations

from typing import Any

import torch

from .float8 import FLOAT8, check_cache_scales, encode_e4m3, quantize
from .registration import define_op
from .rms_norm import rms_norm
from .triton_support import KernelSpec, check_some, check_tensor, jit, next_power_of_2, round_to, tl


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
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
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
    if key_scale is not None and value_scale is not None:
        key, value = quantize(key, key_scale), quantize(value, value_scale)
    key_cache[slot, :, place] = key
    value_cache[slot, :, place] = value
    return query


@jit
def _head_norm(  # type: ignore[no-untyped-def]
    first, second, rest, weight, first_at, second_at, rest_at, in_half, in_rest, eps, size, UNIT_OFFSET, kind
):
    square = tl.sum(first * first) + tl.sum(second * second) + tl.sum(rest * rest)
    scale = tl.rsqrt(square / size + eps)
    first_weight = tl.load(weight + first_at, mask=in_half, other=0.0).to(tl.float32)
    second_weight = tl.load(weight + second_at, mask=in_half, other=0.0).to(tl.float32)
    rest_weight = tl.load(weight + rest_at, mask=in_rest, other=0.0).to(tl.float32)
    # Rounded where `rms_norm` rounds.
    if UNIT_OFFSET:
        first = first * scale * (1.0 + first_weight)
        second = second * scale * (1.0 + second_weight)
        rest = rest * scale * (1.0 + rest_weight)
    else:
        first = round_to(first * scale, kind).to(tl.float32) * first_weight
        second = round_to(second * scale, kind).to(tl.float32) * second_weight
        rest = round_to(rest * scale, kind).to(tl.float32) * rest_weight
    first, second, rest = round_to(first, kind), round_to(second, kind), round_to(rest, kind)
    return first.to(tl.float32), second.to(tl.float32), rest.to(tl.float32)


@jit
def _store(target, x, mask, scale, kind):  # type: ignore[no-untyped-def]
    # `scale` is None for a cache of the model's type, else the number by which a float8 one is divided.
    if scale is None:
        tl.store(target, round_to(x, kind), mask=mask)
    else:
        tl.store(target, encode_e4m3(x / scale), mask=mask)


@jit(unspecialized=["context", "num_heads", "num_kv_heads"])
def _rope_and_cache_kernel(  # type: ignore[no-untyped-def]
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
    key_scale,
    value_scale,
    output,
    eps,
    context,
    qkv_stride,
    key_slot_stride,
    key_head_stride,
    key_stride,
    value_slot_stride,
    value_head_stride,
    value_stride,
    num_heads,
    num_kv_heads,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    # One program per token and head: the queries' heads, then the keys', then the values'.
    token = tl.program_id(0)
    head = tl.program_id(1)
    kind: tl.constexpr = qkv.dtype.element_ty
    row = tl.load(rows + token)
    slot = tl.load(slots + token).to(tl.int64)
    place = tl.load(base + row, mask=row >= 0, other=0) + token - tl.load(cu_tokens + row, mask=row >= 0, other=0)
    # Padding tokens write nothing: the reserved slot need not hold anything.
    written = (row >= 0) & (place < context)
    source = qkv + token.to(tl.int64) * qkv_stride

    if head < num_heads + num_kv_heads:
        source += head * HEAD_DIM
        pair = tl.arange(0, BLOCK_HALF)
        in_half = pair < HALF
        if INTERLEAVED:
            first_at = 2 * pair
            second_at = 2 * pair + 1
        else:
            first_at = pair
            second_at = pair + HALF
        rest_at = 2 * HALF + tl.arange(0, BLOCK_REST)
        in_rest = rest_at < HEAD_DIM
        first = tl.load(source + first_at, mask=in_half, other=0.0).to(tl.float32)
        second = tl.load(source + second_at, mask=in_half, other=0.0).to(tl.float32)
        rest = tl.load(source + rest_at, mask=in_rest, other=0.0).to(tl.float32)
        if head < num_heads:
            if q_norm is not None:
                first, second, rest = _head_norm(
                    first, second, rest, q_norm, first_at, second_at, rest_at, in_half, in_rest, eps, HEAD_DIM,
                    UNIT_OFFSET, kind,
                )  # fmt: skip
        else:
            if k_norm is not None:
                first, second, rest = _head_norm(
                    first, second, rest, k_norm, first_at, second_at, rest_at, in_half, in_rest, eps, HEAD_DIM,
                    UNIT_OFFSET, kind,
                )  # fmt: skip
        angle = tl.load(positions + token) * HALF + pair
        c = tl.load(cos + angle, mask=in_half, other=0.0)
        s = tl.load(sin + angle, mask=in_half, other=0.0)
        turned_first = round_to(first * c - second * s, kind)
        turned_second = round_to(second * c + first * s, kind)
        if head < num_heads:
            target = output + (token * num_heads + head).to(tl.int64) * HEAD_DIM
            tl.store(target + first_at, turned_first, mask=in_half)
            tl.store(target + second_at, turned_second, mask=in_half)
            tl.store(target + rest_at, round_to(rest, kind), mask=in_rest)
        else:
            kv_head = head - num_heads
            key_target = key_cache + slot * key_slot_stride + kv_head * key_head_stride + place * key_stride
            key_divisor = None if key_scale is None else tl.load(key_scale + kv_head)
            _store(key_target + first_at, turned_first.to(tl.float32), in_half & written, key_divisor, kind)
            _store(key_target + second_at, turned_second.to(tl.float32), in_half & written, key_divisor, kind)
            _store(key_target + rest_at, rest, in_rest & written, key_divisor, kind)
    else:
        value_head = head - num_heads - num_kv_heads
        source += (num_heads + num_kv_heads) * HEAD_DIM + value_head * VALUE_DIM
        at = tl.arange(0, BLOCK_VALUE)
        inside = at < VALUE_DIM
        value = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
        value_target = value_cache + slot * value_slot_stride + value_head * value_head_stride + place * value_stride
        value_divisor = None if value_scale is None else tl.load(value_scale + value_head)
        _store(value_target + at, value, inside & written, value_divisor, kind)


def _blocks(head_dim: int, value_dim: int, half: int) -> dict[str, int]:
    """The sizes of the kernel's ranges."""
    return {
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "HALF": half,
        "BLOCK_HALF": next_power_of_2(half),
        "BLOCK_REST": next_power_of_2(head_dim - 2 * half),
        "BLOCK_VALUE": next_power_of_2(value_dim),
    }


def rope_and_cache_triton(
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
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """The launch for CUDA tensors, or for CPU tensors under the interpreter. Padding tokens write to no slot.

    Raises:
        ValueError: an argument that the kernel could not take.
    """
    device = qkv.device
    floats = (torch.float32, torch.bfloat16, torch.float16)
    check_cache_scales(key_cache, value_cache, key_scale, value_scale, device)
    slots_count, num_kv_heads, context, head_dim = key_cache.shape
    value_dim, half = value_cache.shape[3], cos.shape[-1]
    for what, count in (("slot", slots_count), ("head", num_kv_heads), ("position", context)):
        check_some("key_cache", what, count)
    features = (num_heads + num_kv_heads) * head_dim + num_kv_heads * value_dim
    check_tensor("qkv", qkv, dtypes=floats, shape=(None, features), contiguous=False)
    width, kind = qkv.shape[0], (qkv.dtype,)
    if 2 * half > head_dim:
        raise ValueError(f"cos has {half} angles; accepted: at most half of the head size {head_dim}")
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            check_tensor(name, weight, dtypes=kind, shape=(head_dim,), device=device)
    check_tensor("cos", cos, dtypes=(torch.float32,), shape=(None, half), device=device)
    check_some("cos", "position", cos.shape[0])
    check_tensor("sin", sin, dtypes=(torch.float32,), shape=cos.shape, device=device)
    for name, index in (("positions", positions), ("slots", slots), ("rows", rows)):
        check_tensor(name, index, dtypes=(torch.int32,), shape=(width,), device=device)
    check_tensor("base", base, dtypes=(torch.int32,), shape=(None,), device=device)
    check_some("base", "row", base.shape[0])
    check_tensor("cu_tokens", cu_tokens, dtypes=(torch.int32,), shape=(base.shape[0] + 1,), device=device)
    cache_kinds = kind if key_scale is None else (FLOAT8,)
    kv = (slots_count, num_kv_heads, context)
    check_tensor("key_cache", key_cache, dtypes=cache_kinds, shape=(*kv, None), device=device, contiguous=False)
    check_tensor("value_cache", value_cache, dtypes=cache_kinds, shape=(*kv, None), device=device, contiguous=False)

    output = qkv.new_empty((width, num_heads, head_dim))
    if key_scale is not None:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    _rope_and_cache_kernel[(width, num_heads + 2 * num_kv_heads)](
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
        key_scale,
        value_scale,
        output,
        eps,
        context,
        qkv.stride(0),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        UNIT_OFFSET=unit_offset,
        INTERLEAVED=interleaved,
        num_warps=1,
        **_blocks(head_dim, value_dim, half),
    )
    return output


def kernel_specs() -> list[KernelSpec]:
    """Each element type, and what a family may turn on: head norms, partial and interleaved rotation, float8."""
    sixteens = ["qkv_stride", "key_slot_stride", "key_head_stride", "key_stride"]
    sixteens += ["value_slot_stride", "value_head_stride", "value_stride"]

    def spec(
        variant: str, kind: str = "bf16", size: int = 128, half: int = 64, norm: bool = False, **changes: Any
    ) -> KernelSpec:
        float8, value_size = changes.pop("float8", False), changes.pop("value_size", size)
        heads, kv_heads = changes.pop("heads", (32, 8))
        cache = "*u8" if float8 else f"*{kind}"
        arguments = dict.fromkeys(["positions", "slots", "rows", "cu_tokens", "base"], "*i32")
        arguments |= {"cos": "*fp32", "sin": "*fp32", "eps": "fp32"}
        arguments |= dict.fromkeys(["context", "num_heads", "num_kv_heads"], "i32") | dict.fromkeys(sixteens, "i32:16")
        arguments |= {"qkv": f"*{kind}", "output": f"*{kind}", "key_cache": cache, "value_cache": cache}
        constants: dict[str, Any] = {"UNIT_OFFSET": False, "INTERLEAVED": False}
        optional: list[tuple[str, bool, str]] = [("q_norm", norm, f"*{kind}"), ("k_norm", norm, f"*{kind}")]
        optional += [("key_scale", float8, "*fp32"), ("value_scale", float8, "*fp32")]
        for name, given, pointer in optional:
            if given:
                arguments[name] = pointer
            else:
                constants[name] = None
        constants |= _blocks(size, value_size, half) | changes
        width, element, stored = 8, 4 if kind == "fp32" else 2, 1 if float8 else 4 if kind == "fp32" else 2
        cached = kv_heads * (size + value_size)
        moved = width * (2 * heads * size * element + cached * (element + stored) + half * 8)
        return KernelSpec(
            op="rope_and_cache",
            variant=variant,
            kernel=_rope_and_cache_kernel,
            arguments=arguments,
            constants=constants,
            num_warps=1,
            num_stages=3,
            shape=f"8 tokens, {heads}+{kv_heads} heads of {size}",
            bytes_moved=moved,
            max_registers=128,
        )

    return [
        spec("bf16"),
        spec("fp16", "fp16"),
        spec("fp32", "fp32"),
        spec("bf16, head norms", norm=True),
        spec("bf16, Gemma head norms of 256", size=256, half=128, norm=True, UNIT_OFFSET=True),
        spec("bf16, head norms of 512", size=512, half=256, norm=True),
        spec("bf16, latents", size=576, half=32, value_size=0, heads=(128, 1), INTERLEAVED=True),
        spec("bf16, 32 of 80 turned", size=80, half=16),
        spec("bf16, interleaved", INTERLEAVED=True),
        spec("bf16, float8 cache", float8=True),
    ]


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
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    return qkv.new_empty((qkv.shape[0], num_heads, key_cache.shape[3]))


_rope_and_cache = define_op(
    "rope_and_cache(Tensor qkv, Tensor? q_norm, Tensor? k_norm, Tensor cos, Tensor sin, Tensor positions, "
    "Tensor slots, Tensor rows, Tensor cu_tokens, Tensor base, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "int num_heads, float eps, bool unit_offset, bool interleaved, Tensor? key_scale=None, "
    "Tensor? value_scale=None) -> Tensor",
    cpu=rope_and_cache_reference,
    fake=_rope_and_cache_fake,
    cuda=rope_and_cache_triton,
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
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
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
        key_scale: float32 [Hkv], for caches of float8: they hold keys divided by it, saturated at 448.
        value_scale: float32 [Hkv], likewise; both or neither.

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
        key_scale,
        value_scale,
    )
