"""Registers an op of this package with torch: one schema, one implementation per backend, one fake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .op_observer import observable

NAMESPACE = "draftgraph"

# `torch.library.custom_op` would do the same, at about 4 microseconds more per call: it adds an autograd and
# a mutation-version kernel that inference never uses. A forward makes some 150 such calls.
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")

CUDA_IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {}
"""The Triton launches of each op by its name, for `launch_recorder`."""


def define_op(
    schema: str,
    *,
    cpu: Callable[..., Any],
    fake: Callable[..., Any],
    cuda: Callable[..., Any] | None = None,
    packed_cpu: bool = False,
) -> Any:
    """Defines `draftgraph::<name>` and returns its callable overload.

    Args:
        schema: the op's schema in torch's notation, with `(a!)` on each tensor that the op writes to.
        cpu: the implementation for CPU tensors: the eager reference, or something equal to it.
        fake: gives the outputs' shapes and types without data.
        cuda: the Triton launch. An op without one fails on CUDA tensors with torch's "no kernel" error.
        packed_cpu: also accept oneDNN-packed tensors in the CPU implementation.
    """
    name = schema.split("(", 1)[0].strip()
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, observable(name, cpu), "CPU")
    if packed_cpu:
        _LIBRARY.impl(name, observable(name, cpu), "MkldnnCPU")
    if cuda is not None:
        _LIBRARY.impl(name, observable(name, cuda), "CUDA")
        CUDA_IMPLEMENTATIONS[name] = cuda
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default
