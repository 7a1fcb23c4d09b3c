"""Every op with one of its sizes 0: refused by its name, or the same as the reference has it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from op_arguments import OPS
from op_checks import clone

from draftgraph import kernels
from draftgraph.kernels.registration import CUDA_IMPLEMENTATIONS
from draftgraph.kernels.workspace import WorkspacePool

MODULES = [
    importlib.import_module(f"{kernels.__name__}.{module.name}") for module in pkgutil.iter_modules(kernels.__path__)
]
ONE_MORE = {"cu_tokens", "emitted", "draft_cost", "weights"}
"""Arguments with one entry more than there are rows, or drafts."""
ROUNDED = {"rope_and_cache", "window_attention", "project_logits", "moe_experts"}
"""Ops whose sums have another order than their references'."""


def reference_of(op: str) -> Callable[..., Any]:
    return next(getattr(m, f"{op}_reference") for m in MODULES if hasattr(m, f"{op}_reference"))


def without(size: int, name: str, argument: Any) -> Any:
    """The argument with 0 for each of its sizes that is `size`."""
    if not isinstance(argument, torch.Tensor):
        return argument
    short = {size: 0, size + 1: 1} if name in ONE_MORE else {size: 0}
    return argument[tuple(slice(short.get(own, own)) for own in argument.shape)].contiguous()


def emptied(op: str) -> Iterator[list[Any]]:
    """One size 0 wherever it occurs, which most arguments share, and one size of one argument."""
    args = OPS[op]()
    names = [argument.name for argument in getattr(torch.ops.draftgraph, op).default._schema.arguments]
    tensors = {index: arg for index, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
    for size in sorted({size for tensor in tensors.values() for size in tensor.shape} - {0}):
        yield [without(size, name, argument) for name, argument in zip(names, clone(args), strict=False)]
    for index, tensor in tensors.items():
        for dimension in range(tensor.dim()):
            yield [*clone(args[:index]), tensor.narrow(dimension, 0, 0).contiguous(), *clone(args[index + 1 :])]


@pytest.mark.parametrize("op", OPS)
def test_an_empty_size(op):
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if op in ROUNDED else {"rtol": 0.0, "atol": 0.0}
    for args in emptied(op):
        theirs = clone(args)
        try:
            expected = reference_of(op)(*theirs)
        except (IndexError, RuntimeError, ValueError, ZeroDivisionError):
            with pytest.raises(ValueError, match=r"accepted|\b0\b") as refused, WorkspacePool():
                CUDA_IMPLEMENTATIONS[op](*args)
            assert "to -" not in str(refused.value)
            continue
        before = clone(args)
        try:
            with WorkspacePool():
                result = CUDA_IMPLEMENTATIONS[op](*args)
        except ValueError as refused:
            assert "to -" not in str(refused)  # noqa: PT017
            result, expected, theirs = None, None, before
        # Padding tokens share the reserved slot, in which these leave the last one's keys and values, whichever it is.
        args, theirs = ([], []) if op in ROUNDED else (args, theirs)
        for ours, right in zip((result, *args), (expected, *theirs), strict=True):
            if isinstance(right, torch.Tensor):
                torch.testing.assert_close(ours, right, **tolerance, equal_nan=True)
