"""Random arguments of `budget_topk`, with ties, ones, zeros and numbers outside [0, 1] among the confidences."""

from __future__ import annotations

from typing import Any

import torch
from op_checks import random_round

FINISHED, LENGTH, LIMIT, COUNT, DRAFT_LIMIT, ROWS, WIDTHS, CONFIDENCE, BUDGET, CU_TOKENS, BASE, WIDTH_INDEX = range(12)


def budget_arguments(seed: int, *, rows: int = 3, num_drafts: int = 3, budget: int = 4, levels: int = 0) -> list[Any]:
    """`levels` is how many different confidences there are; 0 for arbitrary ones."""
    state, bucket = random_round(seed, rows=rows, num_drafts=num_drafts, context=48)
    generator = torch.Generator().manual_seed(seed)
    confidence = torch.rand(state.confidence.shape, generator=generator)
    if levels:
        confidence = (confidence * levels).ceil() / levels
    special = torch.rand(state.confidence.shape, generator=generator)
    for index, value in enumerate((1.0, 0.0, -0.0, 1.5, -0.5, float("nan"), 1e-30)):
        confidence[(special > 0.05 * index) & (special < 0.05 * index + 0.03)] = value
    state.limit[:-1] += num_drafts
    state.draft_limit.copy_(
        torch.randint(0, num_drafts + 3, state.draft_limit.shape, generator=generator).clamp_max(num_drafts)
    )
    return [
        state.finished,
        state.length,
        state.limit,
        state.draft_count,
        state.draft_limit,
        state.slot_of_row[:bucket],
        torch.tensor([1, 2, 4, 8, 16, 32, 64, 2048], dtype=torch.int32),
        confidence,
        torch.tensor([budget], dtype=torch.int32),
        state.cu_tokens[: bucket + 1],
        state.base[:bucket],
        state.width_index,
    ]
