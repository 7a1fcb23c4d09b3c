from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from op_checks import bits, check_capture_safe

from draftgraph.kernels import elementary

RNG = np.random.default_rng(0)


def log_inputs() -> np.ndarray:
    """All magnitudes of normal numbers, and many near 1, where a logarithm loses its digits."""
    wide = np.exp(RNG.uniform(-87, 88, 300_000))
    near_one = 1 + RNG.normal(0, 1, 300_000) * 10.0 ** RNG.uniform(-7, -0.5, 300_000)
    return np.concatenate([wide, near_one[near_one > 0.01], [1.0, 0.5, 2.0, 2.0**-126]]).astype(np.float32)


def log1p_inputs() -> np.ndarray:
    return np.concatenate(
        [2.0 ** RNG.uniform(-33, -0.0001, 400_000), [2.0**-33, 0.5, 1 - 2.0**-24, 0.2928932, 0.2928933]]
    ).astype(np.float32)


def exp_inputs() -> np.ndarray:
    return np.concatenate([RNG.uniform(-87, 88, 300_000), RNG.uniform(-1, 1, 100_000), [0.0]]).astype(np.float32)


CASES = [
    (elementary.log, elementary.log_array, np.log, log_inputs),
    (
        elementary.negative_log1p_of_negative,
        elementary.negative_log1p_of_negative_array,
        lambda v: -np.log1p(-v),
        log1p_inputs,
    ),
    (elementary.exp, elementary.exp_array, np.exp, exp_inputs),
]


@pytest.mark.parametrize(("function", "array_function", "truth", "inputs"), CASES)
def test_accuracy(function: Callable, array_function: Callable, truth: Callable, inputs: Callable) -> None:
    x = inputs()
    expected = truth(x.astype(np.float64))
    result = function(torch.from_numpy(x)).numpy()
    unit = np.spacing(np.maximum(np.abs(expected), 2.0**-126).astype(np.float32)).astype(np.float64)
    assert np.max(np.abs(result - expected) / unit) <= 3.0


@pytest.mark.parametrize(("function", "array_function", "truth", "inputs"), CASES)
def test_arrays_give_the_same_bits(
    function: Callable, array_function: Callable, truth: Callable, inputs: Callable
) -> None:
    x = torch.from_numpy(inputs())
    assert torch.equal(bits(torch.from_numpy(array_function(x.numpy().copy()))), bits(function(x)))


@pytest.mark.parametrize(("function", "array_function", "truth", "inputs"), CASES)
def test_result_does_not_depend_on_the_place(
    function: Callable, array_function: Callable, truth: Callable, inputs: Callable
) -> None:
    """Vectorised body, scalar tail, another alignment or another shape: the same bits."""
    x = torch.from_numpy(inputs()[:4099])
    whole = bits(function(x))
    for start in (1, 3, 7, 4090):
        assert torch.equal(bits(function(x[start:])), whole[start:])
        assert np.array_equal(array_function(x.numpy()[start:].copy()).view(np.int32), whole[start:].numpy())
    assert torch.equal(bits(function(x.expand(3, -1))), whole.expand(3, -1))
    assert torch.equal(bits(function(x[:4096].view(64, 64).T)), whole[:4096].view(64, 64).T)


def test_exp_vanishes_far_below_zero() -> None:
    x = torch.tensor([-torch.inf, -1e30, -88.0, -87.0, 0.0])
    result = elementary.exp(x)
    assert result[:3].tolist() == [0.0, 0.0, 0.0]
    assert result[3] > 0
    assert result[4] == 1.0
    assert np.array_equal(elementary.exp_array(x.numpy().copy()), result.numpy())


def test_capture_safe() -> None:
    for function, *_ in CASES:
        check_capture_safe(function, [torch.ones(5)])
