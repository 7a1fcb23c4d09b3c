"""What a draft head is trained on at a time, and which examples go together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class TrainingBatch:
    """Texts side by side, padded at their ends, with what the target made of them."""

    tokens: torch.Tensor
    """int64 [B, T]."""
    answer: torch.Tensor
    """bool [B, T]: tokens that the target wrote, which are to be drafted."""
    valid: torch.Tensor
    """bool [B, T]: tokens, no padding."""
    states: torch.Tensor
    """[B, T, n * Ht], those hidden states of the target that the head reads, side by side."""
    final: torch.Tensor
    """[B, T, Ht], its last hidden state after its final norm: times its head, its logits of the next token."""

    def __post_init__(self) -> None:
        shape = self.tokens.shape
        for name in ("answer", "valid"):
            if getattr(self, name).shape != shape:
                raise ValueError(
                    f"{name} must have the shape of tokens, {list(shape)}, got {getattr(self, name).shape}"
                )
        for name in ("states", "final"):
            if getattr(self, name).shape[:2] != shape:
                raise ValueError(f"{name} must begin with {list(shape)}, got {list(getattr(self, name).shape)}")


def plan_batches(lengths: Sequence[int], *, budget: int, seed: int, epoch: int) -> list[list[int]]:
    """Which examples form a batch, in which order, for one epoch.

    Examples of like length go together: they are shuffled, sorted by length in groups of some 32 batches, cut into
    batches, and the batches are shuffled. Seed and epoch decide it, so that a resumed run goes on as it would have.

    Args:
        lengths: tokens of each example.
        budget: the most tokens of a batch, padding included; a longer example is a batch of its own.
        seed: of the run.
        epoch: counted from 0.

    Returns:
        Indices of examples, each exactly once.

    Raises:
        ValueError: a length or the budget is not positive.
    """
    if budget < 1 or any(length < 1 for length in lengths):
        raise ValueError(f"budget and lengths must be positive, got {budget} and {min(lengths, default=0)}")
    random = np.random.default_rng((seed, epoch))
    order = random.permutation(len(lengths))
    mean = max(1.0, float(np.mean(lengths)) if len(lengths) else 1.0)
    group = max(1, int(32 * budget / mean))
    batches: list[list[int]] = []
    for start in range(0, len(order), group):
        alike = sorted(order[start : start + group].tolist(), key=lambda index: lengths[index])
        batch: list[int] = []
        for index in alike:
            if batch and lengths[index] * (len(batch) + 1) > budget:
                batches.append(batch)
                batch = []
            batch.append(index)
        if batch:
            batches.append(batch)
    return [batches[index] for index in random.permutation(len(batches)).tolist()]
