"""Random arguments of the ops that move hidden states, tokens and logits between the parts of a round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from op_checks import random_round

from draftgraph.graphs.state import DecodeState

SIZE, PLACES, RING = 5, 4, 8


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed + 7919)


def _floats(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=_generator(seed)).to(dtype)


def _ints(*shape: int) -> torch.Tensor:
    return torch.full(shape, 99, dtype=torch.int32)


def _index(seed: int, size: int, below: int) -> torch.Tensor:
    return torch.randint(0, below, (size,), generator=_generator(seed), dtype=torch.int32)


def _slots_of_tokens(state: DecodeState, bucket: int) -> torch.Tensor:
    """int32 [W], the reserved slot in padding."""
    rows = state.window_rows
    slots = state.slot_of_row[:bucket].index_select(0, rows.clamp_min(0))
    return torch.where(rows >= 0, slots, state.reserved_slot).int()


def gathering(seed: int, *, dtype: torch.dtype = torch.float32, size: int = SIZE) -> list[Any]:
    """Of `gather_rows`: by one index in even seeds, through another in odd ones."""
    source = _floats(seed, 9, size, dtype=dtype)
    through = _index(seed + 1, 7, 9) if seed % 2 else None
    index = _index(seed, 6, 9 if through is None else 7)
    return [source, index, through, torch.full((6, size), 9.0).to(dtype)]


def gathering_tokens(seed: int) -> list[Any]:
    """Of `gather_rows`: token ids, one column."""
    source = _index(seed, 9, 1000)[:, None]
    return [source, _index(seed + 1, 6, 9), None, _ints(6, 1)]


def putting(seed: int, *, dtype: torch.dtype = torch.float32, size: int = SIZE, rows: int = 3) -> list[Any]:
    """Of `put_rows`."""
    state, bucket = random_round(seed, rows=rows)
    source = _floats(seed, bucket + seed % 2, size, dtype=dtype)
    out = _floats(seed + 1, state.length.shape[0], PLACES, size, dtype=dtype)
    return [source, state.slot_of_row[:bucket], seed % PLACES, out]


def gathering_windows(seed: int, *, dtype: torch.dtype = torch.float32, size: int = SIZE, rows: int = 3) -> list[Any]:
    """Of `gather_window`."""
    state, bucket = random_round(seed, rows=rows)
    kept = _floats(seed, state.length.shape[0], PLACES, size, dtype=dtype)
    slots, width = _slots_of_tokens(state, bucket), state.window_rows.shape[0]
    out = torch.full((width, size), 9.0).to(dtype)
    return [kept, state.length, slots, state.window_positions, out]


def keeping_states(seed: int, *, dtype: torch.dtype = torch.float32, size: int = SIZE, rows: int = 3) -> list[Any]:
    """Of `keep_states`: one of two hidden states that lie side by side."""
    state, bucket = random_round(seed, rows=rows)
    width, slots = state.window_rows.shape[0], state.length.shape[0]
    values = _floats(seed, width, size, dtype=dtype)
    kept = _floats(seed + 1, width + slots + 1, 2 * size, dtype=dtype)
    return [
        values, state.window_rows, state.base[:bucket], state.cu_tokens[: bucket + 1], state.slot_of_row[:bucket],
        state.running, size * (seed % 2), kept, _ints(slots), _ints(slots),
    ]  # fmt: skip


def keeping_prompts(seed: int, *, dtype: torch.dtype = torch.float32, size: int = SIZE) -> list[Any]:
    """Of `keep_prompt_state`: chunks of no token, some and all that fit."""
    slots, width, first = 4, 8, 3
    count = (seed % 3) * width // 2
    kept = _floats(seed + 1, first + slots + 1, size, dtype=dtype)
    ends, base, slot = (torch.tensor(x, dtype=torch.int32) for x in ([0, count], [seed % 20], [seed % slots]))
    values = _floats(seed, width, size, dtype=dtype)
    return [values, base, ends, slot, first, kept, _ints(slots), _ints(slots)]


def keeping_rings(seed: int, *, dtype: torch.dtype = torch.float32, size: int = SIZE, rows: int = 3) -> list[Any]:
    """Of `keep_ring`: a round in even seeds, in odd ones a chunk longer than the ring."""
    if seed % 2:
        slots, width = 4, 16
        count, base, slot = seed % (width + 1), seed % 11, seed % slots
        place = torch.arange(width, dtype=torch.int32)
        used = place < count
        positions, row = torch.where(used, base + place, 0).int(), torch.where(used, 0, -1).int()
        owners = torch.where(used, slot, slots - 1).int()
        ends, begin, of_row = (torch.tensor(x, dtype=torch.int32) for x in ([0, count], [base], [slot]))
        window, running = [positions, owners, row, begin, ends, of_row], None
    else:
        state, bucket = random_round(seed, rows=rows)
        slots, width, running = state.length.shape[0], state.window_rows.shape[0], state.running
        ends = state.cu_tokens[: bucket + 1]
        owners = _slots_of_tokens(state, bucket)
        window = [
            state.window_positions, owners, state.window_rows, state.base[:bucket], ends, state.slot_of_row[:bucket]
        ]  # fmt: skip
    values = _floats(seed, width, size, dtype=dtype)
    kept = _floats(seed + 1, slots * RING + 1, size, dtype=dtype)
    return [values, *window, running, RING, seed % 3, kept, _ints(slots)]


def following_tokens(seed: int, *, rows: int = 3, num_drafts: int = 3, width: int = 0) -> list[Any]:
    """Of `tokens_after`: among the drafts in even seeds, in a prompt in odd ones.

    With `width` of so many tokens, those of the windows over and over.
    """
    state, bucket = random_round(seed, rows=rows, num_drafts=num_drafts)
    slots = _slots_of_tokens(state, bucket)
    drafts = None if seed % 2 else state.draft_tokens
    # Some lie before the window, where all tokens are committed, and some past the context.
    positions = torch.where(state.window_rows % 2 == 0, state.window_positions - 2, state.window_positions).clamp_min(0)
    positions[-1] = state.tokens.shape[1] - 1
    place = torch.arange(width or len(slots)) % len(slots)
    slots, positions = slots[place], positions.int()[place]
    return [state.tokens, state.length, drafts, slots, positions, 1 + seed % 3, _ints(len(place))]


def packing_turns(seed: int, *, rows: int = 3, modules: int = 2, spare: int = 1) -> list[Any]:
    """Of `pack_turn`."""
    state, bucket = random_round(seed, rows=rows, num_drafts=4)
    width = bucket * modules + spare
    window = [_ints(width) for _ in range(3)]
    rows_of = [_ints(bucket + 1), _ints(bucket), _ints(bucket)]
    step = modules * (1 + seed % 2)
    limits = (state.length, state.limit, state.slot_of_row[:bucket])
    return [*limits, step, modules, bucket + spare, *window, *rows_of, _ints(width), _ints(bucket + spare)]


def widening(seed: int, *, dtype: torch.dtype = torch.float32, vocab: int = 40, spare: int = 3) -> list[Any]:
    """Of `widen_logits`: logits that are a part of wider rows, by `spare` columns."""
    known = -(-vocab // 2)
    places = torch.full((vocab,), -1, dtype=torch.int32)
    places[torch.randperm(vocab, generator=_generator(seed))[:known]] = torch.arange(known, dtype=torch.int32)
    return [_floats(seed, 3, known + spare, dtype=dtype)[:, :known], places, torch.full((3, vocab), 9.0).to(dtype)]


def placing_drafts(seed: int, *, rows: int = 3, num_drafts: int = 3) -> list[Any]:
    """Of `draft_positions`."""
    state, bucket = random_round(seed, rows=rows)
    return [state.length, state.slot_of_row[:bucket], _ints(num_drafts, bucket)]


def dropping(seed: int, *, rows: int = 3, num_drafts: int = 3) -> list[Any]:
    """Of `drop_unknown_drafts`: about half of the drafts are too large, and some below -1."""
    state, bucket = random_round(seed, rows=rows, num_drafts=num_drafts, vocab=9)
    state.draft_tokens[:, ::3] -= 2
    return [state.draft_tokens, state.slot_of_row[:bucket], 4]


INTEGER_CASES: dict[str, Callable[[int], list[Any]]] = {
    "gather_rows, tokens": gathering_tokens,
    "tokens_after": following_tokens,
    "pack_turn": packing_turns,
    "draft_positions": placing_drafts,
    "drop_unknown_drafts": dropping,
}
FLOAT_CASES: dict[str, Callable[..., list[Any]]] = {
    "gather_rows": gathering,
    "put_rows": putting,
    "gather_window": gathering_windows,
    "keep_states": keeping_states,
    "keep_prompt_state": keeping_prompts,
    "keep_ring": keeping_rings,
    "widen_logits": widening,
}
"""Those that take a type."""
CASES = INTEGER_CASES | FLOAT_CASES


def op_of(case: str) -> str:
    """The op of a case."""
    return case.partition(",")[0]
