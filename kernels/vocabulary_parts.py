"""How the sampling ops split a vocabulary over programs: the types, the sizes, and what their kernels are built for."""

from __future__ import annotations

import torch

from .triton_support import next_power_of_2

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Types of logits."""
LEAST_PART = 1024
MOST_PARTS = 64
"""A power of two: kernels that merge the parts of a position have a range of this size, whatever the vocabulary."""
SPEC_SIZES = (("bf16", 128_256), ("fp16", 128_256), ("fp32", 128_256), ("bf16", 262_144), ("bf16", 512))
"""Types of logits and vocabularies that `compile_report` lists the sampling ops' kernels for."""


def part_size(vocab: int) -> int:
    """Logits of one program: a power of two that gives at most 64 programs per position."""
    return max(LEAST_PART, next_power_of_2(vocab) // MOST_PARTS)


def num_parts(vocab: int) -> int:
    """Programs of one position."""
    return -(-vocab // part_size(vocab))


def part_warps(part: int) -> int:
    """Warps of one program."""
    return 8 if part >= 2048 else 4
