"""Kernels that do nothing but call the device functions of `elementary_triton` and `philox_triton`."""

from __future__ import annotations

from draftgraph.kernels.elementary_triton import (
    exp,
    index_of_rank,
    log,
    log_of_mass,
    mass,
    negative_log1p_of_negative,
    ranked,
    value_of_rank,
)
from draftgraph.kernels.philox_triton import first_uniform, gumbel_range, philox_4x32
from draftgraph.kernels.triton_support import jit, tl


@jit
def philox_kernel(words, output):
    w0, w1, w2, w3 = philox_4x32(
        tl.load(words).to(tl.uint32),
        tl.load(words + 1).to(tl.uint32),
        tl.load(words + 2).to(tl.uint32),
        tl.load(words + 3).to(tl.uint32),
        tl.load(words + 4).to(tl.uint32),
        tl.load(words + 5).to(tl.uint32),
    )
    tl.store(output, w0.to(tl.int64))
    tl.store(output + 1, w1.to(tl.int64))
    tl.store(output + 2, w2.to(tl.int64))
    tl.store(output + 3, w3.to(tl.int64))


@jit
def gumbel_kernel(seed, position, output, first, STREAM: tl.constexpr, SIZE: tl.constexpr):
    noise = gumbel_range(tl.load(seed), tl.load(position), STREAM, first, SIZE)
    tl.store(output + tl.arange(0, SIZE), noise)


@jit
def uniform_kernel(seed, position, output, STREAM: tl.constexpr):
    tl.store(output, first_uniform(tl.load(seed), tl.load(position), STREAM))


@jit
def elementary_kernel(x, output, FUNCTION: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    values = tl.load(x + at)
    if FUNCTION == "log":
        result = log(values)
    elif FUNCTION == "negative_log1p_of_negative":
        result = negative_log1p_of_negative(values)
    elif FUNCTION == "exp":
        result = exp(values)
    elif FUNCTION == "mass":
        result = mass(values)
    else:
        result = log_of_mass(values)
    tl.store(output + at, result)


@jit
def rank_kernel(x, rank, value, index, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    packed = ranked(tl.load(x + at), at, at >= 0)
    tl.store(rank + at, packed)
    tl.store(value + at, value_of_rank(packed))
    tl.store(index + at, index_of_rank(packed))
