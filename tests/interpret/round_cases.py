"""What the Triton kernels of a round's integer ops are held to: the reference's bits, in every tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from op_checks import assert_same_effect, clone

__all__ = ["assert_same_effect", "clone", "refuses"]


def refuses(
    launch: Callable[..., None], args: Sequence[Any], index: int, change: Callable[[Any], Any], message: str
) -> None:
    """The launch names the argument that it cannot take, and writes to none of the others."""
    args = clone(args)
    args[index] = change(args[index])
    before = clone(args)
    with pytest.raises(ValueError, match=message):
        launch(*args)
    for a, b in zip(args, before, strict=True):
        if isinstance(a, torch.Tensor) and a.device.type == "cpu":
            assert torch.equal(a, b)
