"""The checks themselves: a check that lets everything through would prove nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from op_checks import assert_same_effect, check_capture_safe


@pytest.mark.parametrize(
    "unsafe",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.copy_(torch.zeros(4)),
        lambda x: x.cpu(),
        lambda x: x.tolist(),
        lambda x: 1 if x[0] > 0 else 2,
    ],
)
def test_unsafe_code_is_refused(unsafe: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(Exception):  # noqa: B017 - torch raises a different type for each
        check_capture_safe(unsafe, [torch.ones(4)])


def test_safe_code_passes() -> None:
    def shift(x: torch.Tensor, index: torch.Tensor) -> None:
        x[1:] = x[index][:-1] * 2
        x[index] = 3.0
        x.copy_(torch.where(~(x > 0), x[0], x))

    check_capture_safe(shift, [torch.ones(4), torch.arange(4)])


def test_a_different_effect_is_seen() -> None:
    with pytest.raises(AssertionError, match="argument 0"):
        assert_same_effect(lambda x: x.add_(1), lambda x: x.add_(2), [torch.ones(4)])
