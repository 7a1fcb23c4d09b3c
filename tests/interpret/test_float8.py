"""The float8 bit arithmetic of the kernels against torch's conversions."""

from __future__ import annotations

import torch

from draftgraph.kernels.float8 import FLOAT8, LARGEST, decode_e4m3, encode_e4m3
from draftgraph.kernels.triton_support import jit, tl


@jit
def decode_kernel(source, target, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(target + at, decode_e4m3(tl.load(source + at)).to(tl.float32))


@jit
def encode_kernel(source, target, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(target + at, encode_e4m3(tl.load(source + at)))


def test_every_code_decodes_as_in_torch():
    codes = torch.arange(256, dtype=torch.uint8)
    values = torch.zeros(256)
    decode_kernel[(1,)](codes, values, 256)
    torch.testing.assert_close(values, codes.view(FLOAT8).float(), rtol=0, atol=0, equal_nan=True)


def test_values_encode_as_in_torch():
    generator = torch.Generator().manual_seed(0)
    exact = torch.arange(256, dtype=torch.uint8).view(FLOAT8).float()
    finite = exact[exact.isfinite()].sort().values
    ties = (finite[1:] + finite[:-1]) / 2
    near = torch.cat((ties * (1 + 2**-20), ties * (1 - 2**-20)))
    spread = torch.randn(4096, generator=generator) * torch.logspace(-5, 3, 4096)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30, -0.0, 0.0, 2**-10, 3 * 2**-10])
    values = torch.cat((finite, ties, near, spread, special))
    size = 8192
    padded = torch.zeros(size)
    padded[: len(values)] = values
    codes = torch.zeros(size, dtype=torch.uint8)
    encode_kernel[(1,)](padded, codes, size)
    expected = padded.clamp(-LARGEST, LARGEST).to(FLOAT8)
    assert torch.equal(codes, expected.view(torch.uint8))
