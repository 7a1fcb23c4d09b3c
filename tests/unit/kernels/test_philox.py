from __future__ import annotations

import numpy as np
import pytest
import torch
from op_checks import bits, check_capture_safe
from scipy import stats

from draftgraph.kernels import philox

MASK = 0xFFFFFFFF


def oracle(counter: list[int], key: list[int]) -> list[int]:
    """Philox-4x32-10 in Python's integers, after the paper's figure."""
    c, k = list(counter), list(key)
    for round_index in range(10):
        if round_index:
            k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
        high0, low0 = divmod(c[0] * 0xD2511F53, 2**32)
        high1, low1 = divmod(c[2] * 0xCD9E8D57, 2**32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
    return c


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
def test_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    words = philox.philox_4x32(
        tuple(torch.tensor([word]) for word in counter), tuple(torch.tensor([word]) for word in key)
    )
    assert [int(word) for word in words] == expected
    assert oracle(counter, key) == expected


SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF]


@pytest.mark.parametrize("seed", SEEDS)
def test_word_layout(seed: int) -> None:
    """Counter (index // 4, position, stream, 0), the seed's halves as the key, lane index % 4."""
    index = torch.tensor([0, 1, 2, 3, 4, 262143])
    for position, stream in ((0, 0), (17, 3), (2**31 - 1, 2)):
        words = philox.random_word(torch.tensor(seed), torch.tensor(position), stream, index)
        expected = [
            oracle([i // 4, position, stream, 0], [seed & MASK, seed >> 32 & MASK])[i % 4] for i in index.tolist()
        ]
        assert words.tolist() == expected


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("stream", [philox.TARGET, philox.ACCEPT, philox.RESIDUAL, philox.DRAFT])
def test_arrays_give_the_same_bits(seed: int, stream: int) -> None:
    tensor_seed, position = torch.tensor(seed), torch.tensor(12345)
    for count in (1, 2, 3, 4, 5, 1000, 4099):
        index = torch.arange(count)
        expected = philox.gumbel(tensor_seed, position, stream, index)
        assert torch.equal(bits(torch.from_numpy(philox.gumbel_row(seed, 12345, stream, count))), bits(expected))
    some = torch.tensor([4098, 7, 7, 0, 2049])
    assert torch.equal(
        bits(torch.from_numpy(philox.gumbel_at(seed, 12345, stream, some.numpy()))), bits(expected[some])
    )
    for index in (0, 1, 2, 3, 11):
        expected = philox.uniform(tensor_seed, position, stream, torch.tensor([index]))
        assert philox.uniform_at(seed, 12345, stream, index) == expected.item()


def test_result_does_not_depend_on_the_shape() -> None:
    seed, position = torch.tensor([5, -6, 7])[:, None], torch.tensor([1, 2, 3])[:, None]
    index = torch.arange(4099)
    for variate in (philox.uniform, philox.gumbel):
        table = bits(variate(seed, position, philox.TARGET, index))
        for row in range(3):
            assert torch.equal(bits(variate(seed[row], position[row], philox.TARGET, index)), table[row])
            for start, stop in ((1, 4099), (13, 14), (4090, 4099)):
                part = bits(variate(seed[row], position[row], philox.TARGET, index[start:stop]))
                assert torch.equal(part, table[row, start:stop])


def test_uniform_at_the_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    words = torch.tensor([0, 511, 512, MASK - 511, MASK])
    monkeypatch.setattr(philox, "random_word", lambda *args: words)
    result = philox.uniform(words, words, 0, words)
    assert result.tolist() == [2.0**-24, 2.0**-24, 3 * 2.0**-24, 1 - 2.0**-24, 1 - 2.0**-24]


def test_gumbel_at_the_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finite everywhere, and within a few units in the last place of the formula in float64."""
    words = torch.cat([torch.arange(0, 70), torch.arange(MASK - 600, MASK + 1)])
    monkeypatch.setattr(philox, "random_word", lambda *args: words)
    result = philox.gumbel(words, words, 0, words).double()
    v = ((words.float() + 0.5) * 2.0**-32).clamp_max(1 - 2.0**-24).double()
    assert torch.allclose(result, -torch.log(-torch.log1p(-v)), rtol=4 * 2.0**-23, atol=0)
    assert 22.8 < result.max() < 22.9
    assert -2.9 < result.min() < -2.8


def test_distributions() -> None:
    seeds, positions = torch.arange(40)[:, None, None], torch.arange(50)[None, :, None]
    index = torch.arange(100)
    uniform = philox.uniform(seeds, positions, philox.ACCEPT, index).flatten().double()
    assert stats.kstest(uniform.numpy(), "uniform").pvalue > 1e-3
    gumbel = philox.gumbel(seeds, positions, philox.TARGET, index).flatten().double()
    assert stats.kstest(gumbel.numpy(), "gumbel_r").pvalue > 1e-3


def test_streams_positions_and_seeds_are_independent() -> None:
    index = torch.arange(20_000)
    columns = [
        philox.uniform(torch.tensor(seed), torch.tensor(position), stream, index)
        for seed, position, stream in (
            (1, 1, 0),
            (1, 1, 1),
            (1, 1, 2),
            (1, 1, 3),
            (1, 2, 0),
            (2, 1, 0),
            (1 << 32, 1, 0),
        )
    ]
    correlation = np.corrcoef(torch.stack(columns).numpy())
    assert np.abs(correlation - np.eye(len(columns))).max() < 5 / np.sqrt(20_000)


def test_capture_safe() -> None:
    args = [torch.ones(2, 1).long(), torch.ones(2, 1).int(), philox.TARGET, torch.arange(5)]
    check_capture_safe(philox.uniform, args)
    check_capture_safe(philox.gumbel, args)
