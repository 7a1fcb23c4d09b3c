"""Exponential and logarithm in float32, written out so that every backend gives the same bits.

A library's functions differ in the last place between backends, and on the CPU even between the vectorised
body and the scalar tail of one tensor. These are sequences of IEEE additions, multiplications and bit
operations, in a fixed order; **no multiply-add may be fused** where they are compiled (Triton:
`enable_fp_fusion=False`). Polynomials and range reduction are those of Cephes (`expf`, `logf`, S. Moshier,
1992); both functions are within 3 units in the last place of the true value.

Each function exists twice: on torch tensors (the specification; reads nothing on the host) and on NumPy
arrays (the same operations in place, for speed on the CPU).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

FloatArray = npt.NDArray[np.float32]

# ln 2 in two parts; the first has nine significant bits, so that its product with an exponent is exact.
_LN2_HIGH = 0.693359375
_LN2_LOW = float(np.float32(-2.12194440e-4))

_SQRT_HALF_BITS = 0x3F3504F3
_LOG_POLYNOMIAL = [
    float(np.float32(c))
    for c in (
        7.0376836292e-2,
        -1.1514610310e-1,
        1.1676998740e-1,
        -1.2420140846e-1,
        1.4249322787e-1,
        -1.6668057665e-1,
        2.0000714765e-1,
        -2.4999993993e-1,
        3.3333331174e-1,
    )
]

_LOG2_E = float(np.float32(1.44269504088896341))
# Adding and subtracting 1.5 * 2**23 rounds to an integer, and leaves that integer in the low bits of the sum.
_ROUNDER = 12582912.0
_MASS_SCALE = 2.0**40
_EXP_LEAST, _EXP_MOST = -87.0, 88.0
_EXP_POLYNOMIAL = [
    float(np.float32(c))
    for c in (
        1.9875691500e-4,
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    )
]


def log(x: torch.Tensor) -> torch.Tensor:
    """Natural logarithm.

    Args:
        x: float32 of any shape, positive, finite and not subnormal (the result for others is unspecified).
    """
    mantissa_less_one, exponent = _split(x)
    return _log_of_parts(mantissa_less_one, exponent)


def negative_log1p_of_negative(v: torch.Tensor) -> torch.Tensor:
    """`-log(1 - v)`, with full relative precision for small v.

    Args:
        v: float32 of any shape, in (0, 1).
    """
    mantissa_less_one, exponent = _split(1.0 - v)
    # 1 - v is rounded. Where v is below 0.29 that would show, but there the wanted part is -v itself.
    mantissa_less_one = torch.where(exponent == 0, -v, mantissa_less_one)
    return -_log_of_parts(mantissa_less_one, exponent)


def _split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """M - 1 and e of x = m * 2**e with m in [sqrt(1/2), sqrt(2)), both in float32."""
    shifted = x.contiguous().view(torch.int32) - _SQRT_HALF_BITS
    mantissa = ((shifted & 0x7FFFFF) + _SQRT_HALF_BITS).view(torch.float32)
    return mantissa - 1.0, (shifted >> 23).float()


def _log_of_parts(f: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    square = f * f
    y = torch.full_like(f, _LOG_POLYNOMIAL[0])
    for coefficient in _LOG_POLYNOMIAL[1:]:
        y = y * f
        y = y + coefficient
    y = y * f
    y = y * square
    y = y + exponent * _LN2_LOW
    y = y - square * 0.5
    y = y + f
    return y + exponent * _LN2_HIGH


def exp(x: torch.Tensor) -> torch.Tensor:
    """Exponential; 0 below -87, where the result would come near the subnormal numbers.

    Args:
        x: float32 of any shape, at most 88 and not NaN.
    """
    clamped = x.clamp(_EXP_LEAST, _EXP_MOST)
    rounded = clamped * _LOG2_E + _ROUNDER
    exponent = rounded - _ROUNDER
    f = clamped - exponent * _LN2_HIGH
    f = f - exponent * _LN2_LOW
    y = torch.full_like(f, _EXP_POLYNOMIAL[0])
    for coefficient in _EXP_POLYNOMIAL[1:]:
        y = y * f
        y = y + coefficient
    y = y * (f * f)
    y = y + f
    y = y + 1.0
    scaled = (y.view(torch.int32) + (rounded.view(torch.int32) << 23)).view(torch.float32)
    return torch.where(x < _EXP_LEAST, 0.0, scaled)


def mass(x: torch.Tensor) -> torch.Tensor:
    """`exp(x)` in units of 2**-40, rounded down, as int64.

    Sums of these do not depend on their order, so a backend may add and search as it likes. A sum over 2**22
    tokens does not overflow, and its relative error, below 2**-40 per token, stays below float32's.

    Args:
        x: float32 of any shape, at most 0 and not NaN.
    """
    return (exp(x) * _MASS_SCALE).long()


def log_of_mass(total: torch.Tensor) -> torch.Tensor:
    """float32 logarithm of a sum of `mass`, which must be positive."""
    return log(total.float() * (1.0 / _MASS_SCALE))


def log_array(x: FloatArray) -> FloatArray:
    """`log` of a contiguous NumPy array, which is overwritten with scratch."""
    exponent = _split_array(x)
    return _log_of_parts_array(x, exponent)


def negative_log1p_of_negative_array(v: FloatArray) -> FloatArray:
    """`negative_log1p_of_negative` of a contiguous NumPy array, which is overwritten with scratch."""
    f = np.subtract(np.float32(1.0), v)
    exponent = _split_array(f)
    np.negative(v, out=v)
    np.copyto(f, v, where=exponent == 0)
    result = _log_of_parts_array(f, exponent)
    return np.negative(result, out=result)


def _split_array(x: FloatArray) -> FloatArray:
    """Overwrites x with m - 1 and returns e."""
    bits = x.view(np.int32)
    bits -= np.int32(_SQRT_HALF_BITS)
    exponent = np.right_shift(bits, np.int32(23)).astype(np.float32)
    bits &= np.int32(0x7FFFFF)
    bits += np.int32(_SQRT_HALF_BITS)
    x -= np.float32(1.0)
    return exponent


def _log_of_parts_array(f: FloatArray, exponent: FloatArray) -> FloatArray:
    square = f * f
    y = np.multiply(f, np.float32(_LOG_POLYNOMIAL[0]))
    y += np.float32(_LOG_POLYNOMIAL[1])
    for coefficient in _LOG_POLYNOMIAL[2:]:
        y *= f
        y += np.float32(coefficient)
    y *= f
    y *= square
    y += exponent * np.float32(_LN2_LOW)
    square *= np.float32(0.5)
    y -= square
    y += f
    exponent *= np.float32(_LN2_HIGH)
    y += exponent
    return y


def exp_array(x: FloatArray) -> FloatArray:
    """`exp` of a contiguous NumPy array, which is overwritten with scratch."""
    vanishes = x < np.float32(_EXP_LEAST)
    np.clip(x, np.float32(_EXP_LEAST), np.float32(_EXP_MOST), out=x)
    rounded = x * np.float32(_LOG2_E)
    rounded += np.float32(_ROUNDER)
    exponent = rounded - np.float32(_ROUNDER)
    x -= exponent * np.float32(_LN2_HIGH)
    exponent *= np.float32(_LN2_LOW)
    x -= exponent
    y = np.multiply(x, np.float32(_EXP_POLYNOMIAL[0]))
    y += np.float32(_EXP_POLYNOMIAL[1])
    for coefficient in _EXP_POLYNOMIAL[2:]:
        y *= x
        y += np.float32(coefficient)
    y *= np.multiply(x, x, out=exponent)
    y += x
    y += np.float32(1.0)
    bits = rounded.view(np.int32)
    bits <<= np.int32(23)
    y.view(np.int32)[...] += bits
    y[vanishes] = 0.0
    return y


def mass_array(x: FloatArray) -> npt.NDArray[np.int64]:
    """`mass` of a contiguous NumPy array, which is overwritten with scratch."""
    y = exp_array(x)
    y *= np.float32(_MASS_SCALE)
    return y.astype(np.int64)


def log_of_mass_array(total: np.int64) -> np.float32:
    """`log_of_mass` of one sum."""
    # Not `np.float32(total)`, which rounds twice: to float64 first.
    scaled = np.array([total], dtype=np.int64).astype(np.float32)
    scaled *= np.float32(1.0 / _MASS_SCALE)
    return log_array(scaled)[0]
