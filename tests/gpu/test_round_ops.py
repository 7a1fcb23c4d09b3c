"""The ops of a round on a real device against their references on the CPU, eagerly and replayed from a graph."""

from __future__ import annotations

import pytest
import torch
from device_cases import cases, check_eager, check_replay
from op_checks import bits
from scalar_kernels import elementary_kernel, gumbel_kernel, philox_kernel, uniform_kernel

from draftgraph.kernels import elementary, philox
from draftgraph.kernels.triton_support import UNFUSED

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
CASES = cases(vocab=3000)


@pytest.mark.parametrize("name", CASES)
def test_the_op_has_the_references_effect(name):
    check_eager(CASES[name], DEVICE, range(20))


@pytest.mark.parametrize("name", CASES)
def test_a_graph_follows_its_tensors(name):
    check_replay(CASES[name], DEVICE)


def test_philox_gives_random123s_vector():
    words = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0]
    output = torch.empty(4, dtype=torch.int64, device=DEVICE)
    philox_kernel[(1,)](torch.tensor(words, device=DEVICE), output, **UNFUSED)
    assert output.tolist() == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize("seed", [0, -1, 0x123456789ABCDEF])
@pytest.mark.parametrize("stream", [philox.TARGET, philox.ACCEPT, philox.RESIDUAL, philox.DRAFT])
def test_variates(seed, stream):
    key, place = torch.tensor([seed]), torch.tensor([12345], dtype=torch.int32)
    noise, number = torch.empty(4096, device=DEVICE), torch.empty(1, device=DEVICE)
    there = (key.to(DEVICE), place.to(DEVICE))
    gumbel_kernel[(1,)](*there, noise, 8, STREAM=stream, SIZE=4096, **UNFUSED)
    assert torch.equal(bits(noise.cpu()), bits(philox.gumbel(key, place, stream, torch.arange(8, 8 + 4096))))
    uniform_kernel[(1,)](*there, number, STREAM=stream, **UNFUSED)
    assert torch.equal(number.cpu(), philox.uniform(key, place, stream, torch.tensor([0])))


@pytest.mark.parametrize("function", ["log", "exp", "mass"])
def test_elementary_functions_have_the_same_bits(function):
    x = torch.linspace(1e-6, 80, 4096) if function == "log" else torch.linspace(-90, 0, 4096)
    output = torch.empty(4096, dtype=torch.int64 if function == "mass" else torch.float32, device=DEVICE)
    elementary_kernel[(1,)](x.to(DEVICE), output, FUNCTION=function, SIZE=4096, **UNFUSED)
    expected = getattr(elementary, function)(x)
    assert torch.equal(bits(output.cpu()), bits(expected))
