"""The ops that move hidden states, tokens and logits, at the shape of the timings."""

from __future__ import annotations

import torch
from op_shapes import DEVICE, DRAFTS, HIDDEN, REPEATS, VOCAB, WIDTH, OpCase, halves, ints, state

from draftgraph.kernels.draft_positions import draft_positions
from draftgraph.kernels.drop_unknown_drafts import drop_unknown_drafts
from draftgraph.kernels.gather_rows import gather_rows
from draftgraph.kernels.gather_window import gather_window
from draftgraph.kernels.keep_prompt_state import keep_prompt_state
from draftgraph.kernels.keep_ring import keep_ring
from draftgraph.kernels.keep_states import keep_states
from draftgraph.kernels.pack_turn import pack_turn
from draftgraph.kernels.put_rows import put_rows
from draftgraph.kernels.tokens_after import tokens_after
from draftgraph.kernels.widen_logits import widen_logits

MOVING = (
    "draft_positions",
    "drop_unknown_drafts",
    "gather_rows",
    "gather_window",
    "keep_prompt_state",
    "keep_ring",
    "keep_states",
    "pack_turn",
    "put_rows",
    "tokens_after",
    "widen_logits",
)
_KNOWN = 32000


def moving() -> dict[str, OpCase]:
    """With eight rows where an op moves those of a bucket."""
    s = state()
    rows = [s.slot_of_row[slot : slot + 1] for slot in range(REPEATS)]
    slots, ring = REPEATS + 1, 16
    hidden, out = halves(WIDTH, HIDDEN), halves(WIDTH, HIDDEN)
    window, kept = (s.window_positions, s.window_slots), halves(slots, WIDTH, HIDDEN)
    packed, of_slot = (s.cu_tokens[:2], s.base[:1]), [ints(slots) for _ in range(2)]
    states, rings = halves(WIDTH + slots, HIDDEN), halves(slots * ring + 1, HIDDEN)
    turn, of_row, place = [ints(4) for _ in range(3)], [ints(1) for _ in range(2)], [ints(4) for _ in range(2)]
    step = (s.length, s.limit)
    index, tokens, eight = torch.arange(WIDTH, dtype=torch.int32).to(DEVICE), ints(WIDTH), s.slot_of_row[:WIDTH]
    places = torch.full((VOCAB,), -1, dtype=torch.int32)
    places[:_KNOWN] = torch.arange(_KNOWN, dtype=torch.int32)
    places = places.to(DEVICE)
    part, whole = halves(4, _KNOWN), halves(4, VOCAB)
    drafts, ends = ints(DRAFTS, 1), ints(2)
    s.running.fill_(True)
    return {
        "draft_positions": OpCase(lambda slot: draft_positions(s.length, rows[slot], drafts), specs=["any"]),
        "drop_unknown_drafts": OpCase(
            lambda slot: drop_unknown_drafts(s.draft_tokens, rows[slot], VOCAB), specs=["any"]
        ),
        "gather_rows": OpCase(lambda slot: gather_rows(hidden, index, None, out), specs=["bf16, 4096 columns"]),
        "gather_window": OpCase(lambda slot: gather_window(kept, s.length, window[1], window[0], out), specs=["bf16"]),
        "keep_prompt_state": OpCase(
            lambda slot: keep_prompt_state(hidden, packed[1], packed[0], rows[slot], 0, states, *of_slot),
            specs=["bf16"],
        ),
        "keep_ring": OpCase(
            lambda slot: keep_ring(
                hidden, *window, s.window_rows, packed[1], packed[0], rows[slot], s.running, ring, 1, rings, of_slot[0]
            ),
            specs=["bf16, 1 row"],
        ),
        "keep_states": OpCase(
            lambda slot: keep_states(
                hidden, s.window_rows, packed[1], packed[0], rows[slot], s.running, 0, states, *of_slot
            ),
            specs=["bf16, 1 row"],
        ),
        "pack_turn": OpCase(
            lambda slot: pack_turn(*step, rows[slot], 2, 2, 4, *turn, ends, *of_row, *place), specs=["1 row"]
        ),
        "put_rows": OpCase(lambda slot: put_rows(hidden, eight, 1, kept), specs=["bf16, 4096 columns"]),
        "tokens_after": OpCase(
            lambda slot: tokens_after(s.tokens, s.length, s.draft_tokens, window[1], window[0], 1, tokens),
            specs=["with drafts"],
        ),
        "widen_logits": OpCase(lambda slot: widen_logits(part, places, whole), specs=["bf16"]),
    }
