"""`elementary.py` and ordered keys for Triton kernels: the same operations in the same order, so the same bits.

A kernel that calls one of these is launched with `UNFUSED` (`enable_fp_fusion=False`), for otherwise multiply-adds are
fused and the bits differ. Constants are literals here, since a kernel's body cannot read those of `elementary.py`;
`tests/interpret/test_philox.py` compares the results bit by bit.
"""

from __future__ import annotations

from .triton_support import jit, tl


@jit
def _split(x):  # type: ignore[no-untyped-def]
    # m - 1 and e of x = m * 2**e with m in [sqrt(1/2), sqrt(2)), both in float32.
    shifted = x.to(tl.int32, bitcast=True) - 0x3F3504F3
    mantissa = ((shifted & 0x7FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True)
    return mantissa - 1.0, (shifted >> 23).to(tl.float32)


@jit
def _log_of_parts(f, exponent):  # type: ignore[no-untyped-def]
    square = f * f
    y = f * 7.0376836292e-2
    y = y + -1.1514610310e-1
    y = y * f
    y = y + 1.1676998740e-1
    y = y * f
    y = y + -1.2420140846e-1
    y = y * f
    y = y + 1.4249322787e-1
    y = y * f
    y = y + -1.6668057665e-1
    y = y * f
    y = y + 2.0000714765e-1
    y = y * f
    y = y + -2.4999993993e-1
    y = y * f
    y = y + 3.3333331174e-1
    y = y * f
    y = y * square
    y = y + exponent * -2.12194440e-4
    y = y - square * 0.5
    y = y + f
    return y + exponent * 0.693359375


@jit
def log(x):  # type: ignore[no-untyped-def]
    """`elementary.log` of float32."""
    f, exponent = _split(x)
    return _log_of_parts(f, exponent)


@jit
def negative_log1p_of_negative(v):  # type: ignore[no-untyped-def]
    """`elementary.negative_log1p_of_negative` of float32."""
    f, exponent = _split(1.0 - v)
    f = tl.where(exponent == 0.0, -v, f)
    return -_log_of_parts(f, exponent)


@jit
def exp(x):  # type: ignore[no-untyped-def]
    """`elementary.exp` of float32."""
    clamped = tl.minimum(tl.maximum(x, -87.0), 88.0)
    rounded = clamped * 1.44269504088896341 + 12582912.0
    exponent = rounded - 12582912.0
    f = clamped - exponent * 0.693359375
    f = f - exponent * -2.12194440e-4
    y = f * 1.9875691500e-4
    y = y + 1.3981999507e-3
    y = y * f
    y = y + 8.3334519073e-3
    y = y * f
    y = y + 4.1665795894e-2
    y = y * f
    y = y + 1.6666665459e-1
    y = y * f
    y = y + 5.0000001201e-1
    y = y * (f * f)
    y = y + f
    y = y + 1.0
    scaled = y.to(tl.int32, bitcast=True) + (rounded.to(tl.int32, bitcast=True) << 23)
    return tl.where(x < -87.0, 0.0, scaled.to(tl.float32, bitcast=True))


@jit
def mass(x):  # type: ignore[no-untyped-def]
    """`elementary.mass` of float32: int64 in units of 2**-40."""
    return (exp(x) * 1099511627776.0).to(tl.int64)


@jit
def log_of_mass(total):  # type: ignore[no-untyped-def]
    """`elementary.log_of_mass` of int64."""
    return log(total.to(tl.float32) * 9.094947017729282e-13)


@jit
def is_finite(x):  # type: ignore[no-untyped-def]
    """Neither infinite nor NaN."""
    return tl.abs(x) <= 3.4028234663852886e38


@jit
def ordered_key(x):  # type: ignore[no-untyped-def]
    """int32 that orders as float32 does: equal for the two zeros, the largest of all for NaN."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@jit
def value_of_key(key):  # type: ignore[no-untyped-def]
    """The float32 of an `ordered_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def ranked(x, index, valid):  # type: ignore[no-untyped-def]
    """int64 whose largest belongs to the largest float32, of equal ones to the lowest index; invalid ones come last."""
    packed = (ordered_key(x).to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)
    return tl.where(valid, packed, -0x8000000000000000)


@jit
def value_of_rank(packed):  # type: ignore[no-untyped-def]
    """The float32 of a `ranked`."""
    return value_of_key((packed >> 32).to(tl.int32))


@jit
def index_of_rank(packed):  # type: ignore[no-untyped-def]
    """The int32 index of a `ranked`."""
    return 0x7FFFFFFF - (packed & 0x7FFFFFFF).to(tl.int32)


@jit
def is_ranked(packed):  # type: ignore[no-untyped-def]
    """Whether it is of a valid number."""
    return packed != -0x8000000000000000
