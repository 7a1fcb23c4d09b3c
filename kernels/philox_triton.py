"""`philox.py` for Triton kernels: the same bits. To be launched with `UNFUSED`, see `elementary_triton.py`."""

from __future__ import annotations

from .elementary_triton import log, negative_log1p_of_negative
from .triton_support import jit, tl


@jit
def philox_4x32(c0, c1, c2, c3, k0, k1):  # type: ignore[no-untyped-def]
    """Philox-4x32-10: four uint32 words of four uint32 words and a key of two; they broadcast."""
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = p1.to(tl.uint32)
        c3 = p0.to(tl.uint32)
        k0 = (k0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@jit
def _words(seed, position, STREAM: tl.constexpr, block):  # type: ignore[no-untyped-def]
    # The four words of a block of indices; seed int64, position and block integers at least 0.
    place = position.to(tl.uint32)
    zero = place ^ place
    return philox_4x32(block.to(tl.uint32), place, zero + STREAM, zero, seed.to(tl.uint32), (seed >> 32).to(tl.uint32))


@jit
def first_uniform(seed, position, STREAM: tl.constexpr):  # type: ignore[no-untyped-def]
    """`philox.uniform` of index 0; seed int64 and position int32 broadcast."""
    word, _, _, _ = _words(seed, position, STREAM, position ^ position)
    return ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-7


@jit
def gumbel_range(seed, position, STREAM: tl.constexpr, first, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """`philox.gumbel` of the indices first to first + SIZE - 1: float32 [SIZE]; both are multiples of 4."""
    block = first // 4 + tl.arange(0, SIZE // 4)
    w0, w1, w2, w3 = _words(seed, position, STREAM, block)
    word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    v = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)
    return -log(negative_log1p_of_negative(v))
