"""The 8-bit float e4m3 (OCP, no infinities) in integer arithmetic, for targets that cannot convert it in hardware.

A cache of `torch.float8_e4m3fn` reaches the kernels as bytes. sm_80 has no such type and gfx942 has another e4m3, so
they decode and encode the bits themselves; the results are those of torch's conversions.
"""

from __future__ import annotations

import torch

from .triton_support import check_tensor, jit, tl

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0


def quantize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`x / scale` in float8, saturating at 448; NaN stays NaN.

    Args:
        x: [..., heads, size].
        scale: float32 [heads].
    """
    return (x.float() / scale[:, None]).clamp(-LARGEST, LARGEST).to(FLOAT8)


def dequantize(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The float32 values of a cache.

    Args:
        codes: float8 [..., heads, positions, size].
        scale: float32 [heads].
    """
    return codes.float() * scale[:, None, None]


def check_cache_scales(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    device: torch.device,
) -> None:
    """Refuses float8 caches without scales, and scales without such caches.

    Raises:
        ValueError: names the argument.
    """
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.dim() != 4:
            raise ValueError(f"{name} has shape {list(cache.shape)}; accepted: [slots, heads, positions, size]")
    for name, scale, cache in (
        ("key_scale", key_scale, key_cache),
        ("value_scale", value_scale, value_cache),
    ):
        if (scale is not None) != (cache.dtype == FLOAT8):
            given = "is missing" if scale is None else "is given"
            raise ValueError(f"{name} {given}, and the cache has dtype {cache.dtype}; float8 caches have scales")
        if scale is not None:
            check_tensor(name, scale, dtypes=(torch.float32,), shape=(cache.shape[1],), device=device)
    if (key_scale is None) != (value_scale is None):
        raise ValueError("key_scale and value_scale must both be given or both be None")


@jit
def decode_e4m3(code):  # type: ignore[no-untyped-def]
    """The float16 values of bytes."""
    # The bits are those of a float16 whose exponent's bias is larger by 8, subnormals included.
    bits = ((code & 0x7F).to(tl.uint16) << 7) | ((code & 0x80).to(tl.uint16) << 8)
    value = bits.to(tl.float16, bitcast=True) * 256.0
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)


@jit
def encode_e4m3(x):  # type: ignore[no-untyped-def]
    """The bytes of float32 values, saturating at 448."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # To nearest, ties to even: first of normal numbers, whose lowest 20 bits go, then of those below 2**-6, which are
    # multiples of 2**-9, the distance between floats at 2**14.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20).to(tl.int32) - (120 << 3)
    small = magnitude.to(tl.float32, bitcast=True) + 16384.0
    tiny = small.to(tl.uint32, bitcast=True).to(tl.int32) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, tiny, tl.minimum(normal, 0x7E))
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | (bits >> 24).to(tl.int32) & 0x80).to(tl.uint8)
