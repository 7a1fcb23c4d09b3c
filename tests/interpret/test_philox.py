"""The device functions of random numbers, exponential and logarithm against their reference: the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from op_checks import bits
from scalar_kernels import elementary_kernel, gumbel_kernel, philox_kernel, rank_kernel, uniform_kernel

from draftgraph.kernels import elementary, philox
from draftgraph.kernels.triton_support import UNFUSED

SIZE = 4096
MASK = 0xFFFFFFFF
SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF]
RNG = np.random.default_rng(0)

# The vectors that Random123 publishes (kat_vectors, philox4x32 with 10 rounds).
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([MASK] * 4, [MASK] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter, key, expected):
    words = torch.tensor(counter + key, dtype=torch.int64)
    output = torch.empty(4, dtype=torch.int64)
    philox_kernel[(1,)](words, output, **UNFUSED)
    assert output.tolist() == expected


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("stream", [philox.TARGET, philox.ACCEPT, philox.RESIDUAL, philox.DRAFT])
def test_variates(seed, stream):
    key = torch.tensor([seed])
    for position, first in ((0, 0), (12345, 8), (2**31 - 1, 262144 - 64)):
        place = torch.tensor([position], dtype=torch.int32)
        noise = torch.empty(64)
        gumbel_kernel[(1,)](key, place, noise, first, STREAM=stream, SIZE=64, **UNFUSED)
        expected = philox.gumbel(key, place, stream, torch.arange(first, first + 64))
        assert torch.equal(bits(noise), bits(expected))
        number = torch.empty(1)
        uniform_kernel[(1,)](key, place, number, STREAM=stream, **UNFUSED)
        assert torch.equal(number, philox.uniform(key, place, stream, torch.tensor([0])))


def inputs(function):
    if function == "log":
        near_one = 1 + RNG.normal(0, 1, SIZE // 2) * 10.0 ** RNG.uniform(-7, -1, SIZE // 2)
        x = np.concatenate([np.exp(RNG.uniform(-87, 88, SIZE // 2)), near_one])
    elif function == "negative_log1p_of_negative":
        x = 2.0 ** RNG.uniform(-33, -0.0001, SIZE)
        x[:4] = [2.0**-33, 1 - 2.0**-24, 0.2928932, 0.2928933]
    else:
        x = RNG.uniform(-90, 0, SIZE)
        x[:6] = [0.0, -0.0, -np.inf, -87.0, -87.00001, -1e-30]
    return torch.from_numpy(x.astype(np.float32))


@pytest.mark.parametrize("function", ["log", "negative_log1p_of_negative", "exp", "mass"])
def test_elementary(function):
    x = inputs(function)
    output = torch.empty(SIZE, dtype=torch.int64 if function == "mass" else torch.float32)
    elementary_kernel[(1,)](x, output, FUNCTION=function, SIZE=SIZE, **UNFUSED)
    assert torch.equal(bits(output), bits(getattr(elementary, function)(x)))


def test_log_of_mass():
    total = torch.from_numpy(RNG.integers(1, 2**58, SIZE))
    output = torch.empty(SIZE)
    elementary_kernel[(1,)](total, output, FUNCTION="log_of_mass", SIZE=SIZE, **UNFUSED)
    assert torch.equal(bits(output), bits(elementary.log_of_mass(total)))


def test_ranks_order_as_numbers_do():
    inf = float("inf")
    x = torch.cat([inputs("exp"), torch.tensor([inf, -inf, 3.4e38, -3.4e38, 0.0, -0.0, 1e-45, -1e-45])])[-SIZE:]
    rank, value = torch.empty(SIZE, dtype=torch.int64), torch.empty(SIZE)
    index = torch.empty(SIZE, dtype=torch.int32)
    rank_kernel[(1,)](x.contiguous(), rank, value, index, SIZE=SIZE)
    assert torch.equal(value, x)
    assert torch.equal(index, torch.arange(SIZE, dtype=torch.int32))
    assert torch.equal(rank.argsort(descending=True), x.sort(descending=True, stable=True).indices)
    rank_kernel[(1,)](torch.full((SIZE,), torch.nan), rank, value, index, SIZE=SIZE)
    assert value.isnan().all()
