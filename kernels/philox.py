"""Counter-based random numbers: Philox-4x32-10, and the uniform and Gumbel variates made from it.

A number depends on (seed, absolute position, stream, index) and on nothing else: not on the bucket, the
row, the tensor's shape or the backend. Source: J. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2,
3", SC 2011.

The functions on torch tensors are the specification; they read nothing on the host. Those on NumPy arrays
give the same bits faster on the CPU.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from .elementary import (
    FloatArray,
    log,
    log_array,
    negative_log1p_of_negative,
    negative_log1p_of_negative_array,
)

TARGET = 0
"""Stream of the target's own tokens: Gumbel noise over the vocabulary."""
ACCEPT = 1
"""Stream of the uniform numbers that decide whether a draft is accepted."""
RESIDUAL = 2
"""Stream of the Gumbel noise with which the residual distribution is sampled."""
DRAFT = 3
"""Stream of a drafter's own sampling where it must be independent of the target's."""

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24

WordArray = npt.NDArray[np.uint64]


def philox_4x32(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    key: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four random 32-bit words.

    Args:
        counter: four int64 tensors of 32-bit words; they broadcast.
        key: two such tensors.

    Returns:
        Four int64 tensors of 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The product may pass 2**63 and turn negative; shift and mask give its halves all the same.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK
        c2, c3 = ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def random_word(seed: torch.Tensor, position: torch.Tensor, stream: int, index: torch.Tensor) -> torch.Tensor:
    """The 32-bit word of (seed, position, stream, index), in int64.

    Word `index % 4` of the block with counter (index // 4, position, stream, 0) and the seed's low and high
    half as the key. The tensors broadcast.
    """
    seed, position, index = seed.long(), position.long() & _MASK, index.long()
    zero = torch.zeros_like(position)
    words = philox_4x32(((index >> 2) & _MASK, position, zero + stream, zero), (seed & _MASK, (seed >> 32) & _MASK))
    lane = index & 3
    low = torch.where(lane == 0, words[0], words[1])
    high = torch.where(lane == 2, words[2], words[3])
    return torch.where(lane < 2, low, high)


def uniform(seed: torch.Tensor, position: torch.Tensor, stream: int, index: torch.Tensor) -> torch.Tensor:
    """A float32 in (0, 1), never 0 or 1: `(word // 2**9 + 1/2) / 2**23`, which is exact.

    Args:
        seed: int64.
        position: integers, at least 0: the absolute position of the token that the number decides on.
        stream: one of `TARGET`, `ACCEPT`, `RESIDUAL`, `DRAFT`.
        index: integers, at least 0. The three tensors broadcast to the result's shape.
    """
    word = random_word(seed, position, stream, index)
    return ((word >> 9).float() + 0.5) * 2.0**-23


def gumbel(seed: torch.Tensor, position: torch.Tensor, stream: int, index: torch.Tensor) -> torch.Tensor:
    """A float32 of the standard Gumbel distribution, between -2.9 and 22.9.

    `-log(E)` with `E = -log(1 - v)` and `v = (word + 1/2) / 2**32` in float32, held below 1. A small E, which
    makes the large values that win a Gumbel-max, so keeps its relative precision.

    Args:
        seed: int64.
        position: integers, at least 0.
        stream: one of `TARGET`, `ACCEPT`, `RESIDUAL`, `DRAFT`.
        index: integers, at least 0: the token. The three tensors broadcast to the result's shape.
    """
    word = random_word(seed, position, stream, index)
    v = ((word.float() + 0.5) * 2.0**-32).clamp_max(_LARGEST_BELOW_ONE)
    return -log(negative_log1p_of_negative(v))


def _philox_4x32_array(seed: int, position: int, stream: int, block: WordArray) -> tuple[WordArray, ...]:
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    m0, m1, mask, half = (np.uint64(word) for word in (*_MULTIPLIERS, _MASK, 32))
    c0 = block
    # The first round's second product is of one number.
    product = _MULTIPLIERS[1] * stream
    p0 = c0 * m0
    c0 = np.full_like(block, (product >> 32) ^ (position & _MASK) ^ k0)
    c1 = np.full_like(block, product & _MASK)
    c2 = p0 >> half
    c2 ^= np.uint64(k1)
    p0 &= mask
    c3 = p0
    for _ in range(_ROUNDS - 1):
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
        p0, p1 = np.multiply(c0, m0, out=c0), np.multiply(c2, m1, out=c2)
        c1 ^= np.uint64(k0)
        c1 ^= p1 >> half
        c3 ^= np.uint64(k1)
        c3 ^= p0 >> half
        p0 &= mask
        p1 &= mask
        c0, c1, c2, c3 = c1, p1, c3, p0
    return c0, c1, c2, c3


def gumbel_row(seed: int, position: int, stream: int, count: int) -> FloatArray:
    """`gumbel` of the indices 0 to count - 1; float32 [count]."""
    blocks = (count + 3) // 4
    words = np.empty((blocks, 4), dtype=np.uint32)
    for lane, word in enumerate(_philox_4x32_array(seed, position, stream, np.arange(blocks, dtype=np.uint64))):
        words[:, lane] = word
    return _gumbel_of_words(words.reshape(-1).astype(np.float32))[:count]


def gumbel_at(seed: int, position: int, stream: int, index: npt.NDArray[np.int64]) -> FloatArray:
    """`gumbel` of the given indices; float32 [n]."""
    words = _philox_4x32_array(seed, position, stream, (index >> 2).astype(np.uint64))
    return _gumbel_of_words(np.choose(index & 3, words).astype(np.float32))


def uniform_at(seed: int, position: int, stream: int, index: int = 0) -> float:
    """`uniform` of one index, exactly, in Python's integers: one number is not worth a NumPy call."""
    counter, key = [index >> 2, position & _MASK, stream, 0], [seed & _MASK, (seed >> 32) & _MASK]
    for _ in range(_ROUNDS):
        p0, p1 = counter[0] * _MULTIPLIERS[0], counter[2] * _MULTIPLIERS[1]
        counter = [p1 >> 32 ^ counter[1] ^ key[0], p1 & _MASK, p0 >> 32 ^ counter[3] ^ key[1], p0 & _MASK]
        key = [key[0] + _KEY_STEPS[0] & _MASK, key[1] + _KEY_STEPS[1] & _MASK]
    return ((counter[index & 3] >> 9) + 0.5) * 2.0**-23


def _gumbel_of_words(words: FloatArray) -> FloatArray:
    words += np.float32(0.5)
    words *= np.float32(2.0**-32)
    np.minimum(words, np.float32(_LARGEST_BELOW_ONE), out=words)
    result = log_array(negative_log1p_of_negative_array(words))
    return np.negative(result, out=result)
