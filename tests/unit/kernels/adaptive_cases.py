"""Random arguments of the ops of adaptive verification, with ties, ones, zeros and numbers outside [0, 1]."""

from __future__ import annotations

from typing import Any

import torch
from budget_cases import CONFIDENCE, budget_arguments
from op_checks import random_round

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 2048)


def confidences(seed: int, shape: tuple[int, ...], levels: int = 0) -> torch.Tensor:
    """Of drafts; `levels` is how many different ones there are, 0 for arbitrary ones."""
    rows, num_drafts = shape
    values = budget_arguments(seed, rows=max(1, rows - 5), num_drafts=num_drafts, levels=levels)[CONFIDENCE]
    return values.repeat(-(-rows // values.shape[0]), 1)[:rows].contiguous()


def costs(seed: int, num_drafts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a verify of each width, and of so many drafts."""
    generator = torch.Generator().manual_seed(seed)
    base, slope = 1 + 4 * torch.rand(1, generator=generator), torch.rand(1, generator=generator)
    verify = base + slope * torch.tensor(WIDTHS).float() * torch.rand(1, generator=generator)
    if seed % 3 == 0:
        verify = verify.round() + 1  # plateaus, and equal objectives
    return verify, torch.rand(num_drafts + 1, generator=generator).cumsum(0)


def choosing(seed: int, *, rows: int = 3, num_drafts: int = 3, levels: int = 0, probing: bool = False) -> list[Any]:
    """Of `choose_budget`."""
    args = budget_arguments(seed, rows=rows, num_drafts=num_drafts, levels=levels)
    verify, draft = costs(seed, num_drafts)
    rounds = torch.tensor([(7 + 8 * (seed % 70)) if probing else seed % 700], dtype=torch.int32)
    budget, rate = torch.full((1,), -7, dtype=torch.int32), torch.full((1,), -7.0)
    return [*args[: CONFIDENCE + 1], verify, draft, rounds, budget, rate]


def keeping(seed: int, *, rows: int = 3, num_drafts: int = 3, adaptive: bool = True) -> list[Any]:
    """Of `keep_drafting`."""
    state, bucket = random_round(seed, rows=rows, num_drafts=num_drafts)
    generator = torch.Generator().manual_seed(seed)
    state.limit[:-1] += num_drafts // 2
    state.draft_limit.copy_(torch.randint(0, num_drafts + 1, state.draft_limit.shape, generator=generator))
    shared = [state.finished, state.length, state.limit, state.draft_limit, state.slot_of_row[:bucket]]
    stop = torch.full((1,), 9, dtype=torch.int32)
    step = seed % num_drafts
    if not adaptive:
        return [*shared, None, None, None, None, None, step, stop]
    acceptance = confidences(seed, tuple(state.confidence.shape), levels=seed % 4)
    verify, draft = costs(seed, num_drafts)
    widths = torch.tensor(WIDTHS, dtype=torch.int32)
    rounds = torch.tensor([7 + 8 * (seed % 70) if seed % 3 == 0 else seed % 700], dtype=torch.int32)
    return [*shared, acceptance, widths, verify, draft, rounds, step, stop]


def estimating(seed: int, *, rows: int = 3, num_drafts: int = 3, learned: bool = True) -> list[Any]:
    """Of `estimate_acceptance`."""
    state, bucket = random_round(seed, rows=rows, num_drafts=num_drafts)
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(num_drafts + 1, generator=generator) * (30 if seed % 4 == 0 else 1)
    confidence = confidences(seed, tuple(state.confidence.shape))
    forecast, *outputs = (torch.rand(confidence.shape, generator=generator) for _ in range(4))
    forecast[forecast > 0.8] = 2.0
    rows_of = state.slot_of_row[:bucket]
    return [confidence, state.draft_count, rows_of, weights if learned else None, forecast, *outputs]


def learning(seed: int, *, rows: int = 3, num_drafts: int = 3, learns: bool = True) -> list[Any]:
    """Of `learn_acceptance`; every third is due for a step."""
    state, bucket = random_round(seed, rows=rows, num_drafts=num_drafts)
    generator = torch.Generator().manual_seed(seed)
    confidence = confidences(seed, tuple(state.confidence.shape))
    seen, forecast = (torch.rand(confidence.shape, generator=generator) for _ in range(2))
    forecast[forecast > 0.8] = 2.0
    rounds = torch.tensor([99 if seed % 3 == 0 else seed % 1000], dtype=torch.int32)
    sums = weights = None
    if learns:
        weights = torch.randn(num_drafts + 1, generator=generator)
        count = torch.randint(0, 200, (num_drafts,), generator=generator).double()
        ever = count * torch.randint(0, 2, (num_drafts,), generator=generator)
        p = torch.rand(num_drafts, generator=generator).double()
        f = 4 * torch.randn(num_drafts, generator=generator).double()
        error = (torch.rand(num_drafts, generator=generator).double() - p) * count
        spread = p * (1 - p) * count
        sums = (torch.stack([count, error, spread, error * f, spread * f, spread * f * f, ever]) * 2**24).long()
    return [
        confidence,
        seen,
        state.accepted,
        state.failed,
        state.finished,
        state.cu_tokens[: bucket + 1],
        state.slot_of_row[:bucket],
        state.running,
        forecast,
        rounds,
        sums,
        weights,
    ]
