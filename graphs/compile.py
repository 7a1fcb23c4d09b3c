"""Regional compilation: one compile per region and shape, reused by every layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

# A region is compiled once for each width and layer kind of each model in the process, all of which share one
# code object; the default limit of 8 is meant to catch accidental recompiles of other programs.
_RECOMPILE_LIMIT = 512

_INDUCTOR_OPTIONS: dict[str, Any] = {
    # A region is called per layer, and every call checked the sizes of some twenty tensors that never change.
    "size_asserts": False,
    # On the CPU: split a loop over threads only where the work outweighs waking them. The loops between two
    # products of a decoding layer have a few thousand elements.
    "cpp.min_chunk_size": 65536,
}


def compile_region(fn: Callable[P, R]) -> Callable[P, R]:
    """Compiles `fn` as one graph with fixed shapes (`fullgraph=True, dynamic=False`).

    A region that cannot be compiled whole is an error, never a silent fall back to eager code.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _RECOMPILE_LIMIT)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, _RECOMPILE_LIMIT)
    return torch.compile(fn, fullgraph=True, dynamic=False, options=_INDUCTOR_OPTIONS)


def eager_region(fn: Callable[P, R]) -> Callable[P, R]:
    """Leaves `fn` as it is: what `compile=False` uses in place of `compile_region`."""
    return fn
