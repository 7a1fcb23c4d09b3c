"""Arguments of the ops that a drafting model's step is made of, for the tests of each and of its kernel."""

from __future__ import annotations

from typing import Any

import torch
from op_checks import random_round

VOCAB, DRAFT_VOCAB = 7, 11


def _ints(*shape: int) -> torch.Tensor:
    return torch.full(shape, 99, dtype=torch.int32)


def id_map(seed: int, size: int, below: int) -> torch.Tensor:
    """Random ids below `below` for `size` tokens, about a third of them -1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-below // 2, below, (size,), generator=generator, dtype=torch.int32).clamp_min(-1)


def tail_arguments(seed: int, *, rows: int = 3, tail: int = 2, mapped: bool = False, spare: int = 0) -> list[Any]:
    """Of `pack_tail`."""
    state, bucket = random_round(seed, rows=rows, vocab=VOCAB)
    state.length[::2] = 1 + seed % 2  # shorter than the tail
    width = bucket * tail + spare
    draft_ids = id_map(seed, VOCAB, DRAFT_VOCAB).clamp_min(0) if mapped else None
    slots = state.slot_of_row[:bucket]
    window = [_ints(width) for _ in range(4)]
    ends, base, last = _ints(bucket + 1), _ints(bucket), _ints(bucket + spare)
    return [
        state.tokens, state.length, state.finished, slots, draft_ids, tail, *window, ends, base, last
    ]  # fmt: skip


def block_arguments(seed: int, *, rows: int = 3, size: int = 4, spare: int = 0) -> list[Any]:
    """Of `pack_block`."""
    state, bucket = random_round(seed, rows=rows, vocab=VOCAB)
    state.length.clamp_(min=1)
    state.length[::3] = 1  # rows with no context
    window = [_ints(bucket * size + spare) for _ in range(4)]
    slots = state.slot_of_row[:bucket]
    return [state.tokens, state.length, state.finished, slots, size, 3, *window, _ints(bucket), _ints(bucket)]


def unseen_arguments(seed: int, *, rows: int = 3, masks: int = 0, spare: int = 0, ring: int = 0) -> list[Any]:
    """Of `pack_unseen`: rows with no new pair, one, and several."""
    state, bucket = random_round(seed, rows=rows, vocab=VOCAB)
    generator = torch.Generator().manual_seed(seed)
    news = torch.randint(0, 4, state.length.shape, generator=generator, dtype=torch.int32)
    state.length.clamp_(min=1)
    seen = (state.length - 1 - news).clamp_min(0)
    state.limit.copy_(state.length + torch.randint(0, 6, state.length.shape, generator=generator))
    start = torch.randint(0, 50, state.length.shape, generator=generator, dtype=torch.int32)
    width = bucket * (3 + masks) + spare
    slots = state.slot_of_row[:bucket]
    window = [_ints(width) for _ in range(4)]
    return [
        state.tokens, state.length, state.limit, state.finished, slots, seen, start, masks, 3, 77, ring, *window,
        _ints(bucket + 1), _ints(bucket), _ints(bucket), _ints(width), _ints(bucket * (masks + 1) + spare),
    ]  # fmt: skip


def argmax_arguments(
    seed: int,
    *,
    rows: int = 3,
    vocab: int = 40,
    dtype: torch.dtype = torch.float32,
    constrained: bool = False,
    coarse: bool = False,
    renamed: bool = False,
    spare: int = 0,
) -> list[Any]:
    """Of `draft_argmax`: one row has NaN, and one infinite logits, if there are more than two.

    The logits are a part of wider rows, by `spare` columns.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, vocab, generator=generator)
    logits = (logits.round() if coarse else logits).to(dtype)
    logits = torch.cat((logits, torch.full((rows, spare), 99.0, dtype=dtype)), 1)[:, :vocab]
    if rows > 2:
        logits[1, seed % vocab] = torch.nan
        logits[2, seed % vocab] = torch.inf if seed % 2 else -torch.inf
    allowed = torch.rand(vocab, generator=generator) < 0.6 if constrained else None
    if allowed is not None:
        allowed[(seed + 1) % vocab] = True
    ids = torch.randperm(2 * vocab, generator=generator)[:vocab].int() if renamed else None
    return [logits, allowed, ids, _ints(rows), torch.full((rows,), 9.0), torch.zeros(rows, dtype=torch.bool)]


def distribution_arguments(
    seed: int, *, rows: int = 3, vocab: int = 40, dtype: torch.dtype = torch.float32, step: int = 1, spare: int = 0
) -> list[Any]:
    """Of `draft_distribution`, after `sample_target` on the same logits, a part of wider rows by `spare` columns."""
    from op_checks import set_sampling_parameters

    from draftgraph.kernels.sample_target import sample_target_reference

    state, bucket = random_round(seed, rows=rows, vocab=vocab, dtype=dtype)
    set_sampling_parameters(state, seed)
    slots = state.slot_of_row[:bucket]
    logits = state.logits[: bucket + 1].clone()
    logits[0, 0] = -torch.inf
    logits = torch.cat((logits, torch.full((logits.shape[0], spare), 99.0, dtype=dtype)), 1)[:, :vocab]
    width = logits.shape[0]
    row = torch.arange(width, dtype=torch.int32)
    row[bucket:] = -1
    ends = torch.arange(bucket + 1, dtype=torch.int32)
    sampled, failed = torch.zeros(width, dtype=torch.int32), torch.zeros(width, dtype=torch.bool)
    normalizer, threshold = torch.zeros(width), torch.zeros(width)
    sample_target_reference(
        logits, row, row.clamp_min(0), ends, slots, state.temperature, state.top_k, state.top_p, state.min_p,
        state.seed, sampled, normalizer, threshold, failed,
    )  # fmt: skip
    draft_probs = torch.full((state.tokens.shape[0], 3, vocab), 7.0)
    return [
        logits, sampled, normalizer, threshold, state.temperature, state.finished, slots, step, draft_probs
    ]  # fmt: skip


def merge_arguments(seed: int, *, rows: int = 3, members: int = 3, num_drafts: int = 3) -> list[Any]:
    """Of `merge_drafts`: about a third of the drafters have none, and some whose first draft is no proposal."""
    state, bucket = random_round(seed, rows=rows, num_drafts=num_drafts, vocab=VOCAB)
    generator = torch.Generator().manual_seed(seed)
    slots = state.tokens.shape[0]
    shape = (members, slots, num_drafts)
    tokens = torch.randint(-1, VOCAB, shape, generator=generator, dtype=torch.int32)
    count = torch.randint(-num_drafts // 2, num_drafts + 1, shape[:2], generator=generator).clamp_min(0).int()
    sure = torch.rand(shape, generator=generator)
    return [
        tokens, count, sure, state.finished, state.slot_of_row[:bucket], state.draft_tokens, state.draft_count,
        state.confidence,
    ]  # fmt: skip


def advance_arguments(
    seed: int,
    *,
    rows: int = 3,
    num_drafts: int = 3,
    step: int = 1,
    shift: int = 1,
    margin: int = 0,
    mapped: bool = False,
    spare: int = 0,
) -> list[Any]:
    """Of `advance_draft`."""
    state, bucket = random_round(seed, rows=rows, num_drafts=num_drafts, vocab=VOCAB)
    generator = torch.Generator().manual_seed(seed)
    width = bucket + spare
    vocab = DRAFT_VOCAB if mapped else VOCAB
    chosen = torch.randint(0, vocab, (width,), generator=generator, dtype=torch.int32)
    sure = torch.rand(width, generator=generator)
    failed = torch.rand(width, generator=generator) < 0.2
    target_ids = id_map(seed, DRAFT_VOCAB, VOCAB) if mapped else None
    slots = state.slot_of_row[:bucket]
    return [
        chosen, sure, failed, state.length, state.limit, state.finished, slots, target_ids, step, shift, margin,
        state.draft_tokens, state.confidence, state.draft_count, *[_ints(width) for _ in range(4)],
        _ints(bucket), _ints(bucket),
    ]  # fmt: skip
