"""Each integer op of a round on fake CUDA tensors: it can be captured."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from draftgraph.graphs.capture_guard import check_function, fake_cuda
from draftgraph.graphs.state import DecodeState, StateShape
from draftgraph.kernels.advance_draft import advance_draft
from draftgraph.kernels.budget_topk import budget_topk
from draftgraph.kernels.choose_budget import choose_budget
from draftgraph.kernels.commit import commit
from draftgraph.kernels.estimate_acceptance import estimate_acceptance
from draftgraph.kernels.keep_drafting import keep_drafting
from draftgraph.kernels.learn_acceptance import learn_acceptance
from draftgraph.kernels.merge_drafts import merge_drafts
from draftgraph.kernels.ngram_propose import ngram_propose
from draftgraph.kernels.pack_block import pack_block
from draftgraph.kernels.pack_tail import pack_tail
from draftgraph.kernels.pack_unseen import pack_unseen
from draftgraph.kernels.pack_window import pack_prefill, pack_window
from draftgraph.kernels.plan_window import plan_window
from draftgraph.kernels.suffix_propose import suffix_propose

pytestmark = pytest.mark.null

BUCKET, DRAFTS, CONTEXT = 4, 3, 32


def make_state(device: torch.device | str) -> DecodeState:
    shape = StateShape(
        slots=5,
        context=CONTEXT,
        num_drafts=DRAFTS,
        vocab_size=11,
        max_bucket=BUCKET,
        max_width=16,
    )
    return DecodeState.allocate(shape, dtype=torch.float32, device=device)


def ints(device: torch.device | str, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=device)


def plan(device: torch.device | str) -> None:
    s = make_state(device)
    plan_window(
        s.finished,
        s.length,
        s.limit,
        s.draft_count,
        s.draft_limit,
        s.slot_of_row,
        ints(device, 3) + 16,
        s.cu_tokens,
        s.base,
        s.width_index,
    )


def share(device: torch.device | str) -> None:
    s = make_state(device)
    budget_topk(
        s.finished,
        s.length,
        s.limit,
        s.draft_count,
        s.draft_limit,
        s.slot_of_row,
        ints(device, 3) + 16,
        s.confidence,
        ints(device, 1),
        s.cu_tokens,
        s.base,
        s.width_index,
    )


def pack(device: torch.device | str) -> None:
    s = make_state(device)
    pack_window(
        s.tokens,
        s.length,
        s.draft_tokens,
        s.cu_tokens,
        s.slot_of_row,
        s.window_tokens,
        s.window_positions,
        s.window_slots,
        s.window_rows,
    )


def chunk(device: torch.device | str) -> None:
    s = make_state(device)
    window = [ints(device, 8) for _ in range(4)]
    pack_prefill(s.tokens, s.prefill_slot, s.prefill_range, *window, ints(device, 2), ints(device, 1), ints(device, 1))


def finish(device: torch.device | str, *, pairs: bool) -> None:
    s = make_state(device)
    commit(
        s.emitted,
        s.accepted,
        s.failed,
        s.cu_tokens,
        s.slot_of_row,
        s.stop_token_ids,
        s.limit,
        s.cancel,
        s.pause,
        s.leave_on_finish,
        s.taken,
        s.tokens,
        s.length,
        s.finished,
        s.finish_reason,
        s.ring_tokens,
        s.ring_count,
        s.published,
        s.rounds,
        s.histogram,
        s.round_pairs if pairs else None,
        s.rounds_left,
        s.running,
    )


def follow(device: torch.device | str) -> None:
    s = make_state(device)
    slots, depth = s.tokens.shape[0], 6
    suffix_propose(
        s.tokens,
        s.length,
        s.finished,
        s.slot_of_row,
        ints(device, slots, depth, CONTEXT),
        ints(device, slots, 4, depth, CONTEXT),
        ints(device, slots),
        ints(device, 8),
        ints(device, depth, 8),
        ints(device, 4, depth, 8),
        ints(device, depth),
        s.draft_tokens,
        s.draft_count,
        s.confidence,
        0.1,
    )


def look_up(device: torch.device | str) -> None:
    s = make_state(device)
    slots = s.tokens.shape[0]
    ngram_propose(
        s.tokens,
        s.length,
        s.finished,
        s.slot_of_row,
        ints(device, slots, 3, CONTEXT),
        ints(device, slots, 3, CONTEXT),
        ints(device, slots),
        s.draft_tokens,
        s.draft_count,
        2,
        4,
    )


def pack_last(device: torch.device | str) -> None:
    s = make_state(device)
    window = [ints(device, 8) for _ in range(4)]
    draft_ids = ints(device, 11)
    ends, base, last = ints(device, BUCKET + 1), ints(device, BUCKET), ints(device, BUCKET)
    pack_tail(s.tokens, s.length, s.finished, s.slot_of_row, draft_ids, 2, *window, ends, base, last)


def pack_queries(device: torch.device | str) -> None:
    s = make_state(device)
    window, rows = [ints(device, 4 * BUCKET) for _ in range(4)], (ints(device, BUCKET) for _ in range(2))
    pack_block(s.tokens, s.length, s.finished, s.slot_of_row, 4, 1, *window, *rows)


def pack_pairs(device: torch.device | str) -> None:
    s = make_state(device)
    width, masks = BUCKET * (DRAFTS + 3), 2
    window = [ints(device, width) for _ in range(4)]
    of_slot, rows = (ints(device, *s.length.shape) for _ in range(2)), (ints(device, BUCKET) for _ in range(2))
    pack_unseen(
        s.tokens,
        s.length,
        s.limit,
        s.finished,
        s.slot_of_row,
        *of_slot,
        masks,
        1,
        9,
        0,
        *window,
        ints(device, BUCKET + 1),
        *rows,
        ints(device, width),
        ints(device, BUCKET * (masks + 1)),
    )


def advance(device: torch.device | str) -> None:
    s = make_state(device)
    window = [ints(device, BUCKET) for _ in range(4)]
    chosen, target_ids = ints(device, BUCKET), ints(device, 11)
    advance_draft(
        chosen,
        chosen.float(),
        chosen.bool(),
        s.length,
        s.limit,
        s.finished,
        s.slot_of_row,
        target_ids,
        1,
        1,
        0,
        s.draft_tokens,
        s.confidence,
        s.draft_count,
        *window,
        ints(device, BUCKET),
        ints(device, BUCKET),
    )


def merge(device: torch.device | str) -> None:
    s = make_state(device)
    tokens, count = ints(device, 2, *s.draft_tokens.shape), ints(device, 2, s.length.shape[0])
    merge_drafts(tokens, count, tokens.float(), s.finished, s.slot_of_row, s.draft_tokens, s.draft_count, s.confidence)


def adapt(device: torch.device | str, name: str) -> None:
    s = make_state(device)
    weights, sums, rounds = s.confidence.new_ones(DRAFTS + 1), ints(device, 7, DRAFTS).long(), ints(device, 1)
    other, costs, rate = s.confidence + 0.5, s.confidence.new_ones(DRAFTS + 1), s.confidence.new_ones(1)
    rows = (s.finished, s.length, s.limit)
    if name == "choose_budget":
        widths = ints(device, 3) + 16
        shared = (s.draft_count, s.draft_limit, s.slot_of_row, widths, other, costs[:3].contiguous(), costs)
        choose_budget(*rows, *shared, rounds, ints(device, 1), rate)
    elif name == "keep_drafting":
        shared = (s.draft_limit, s.slot_of_row, other, ints(device, 3) + 16, costs[:3].contiguous(), costs, rounds)
        keep_drafting(*rows, *shared, 1, ints(device, 1))
    elif name == "estimate_acceptance":
        estimate_acceptance(
            s.confidence, s.draft_count, s.slot_of_row, weights, other, *(other.clone() for _ in range(3))
        )
    else:
        judged = (s.accepted, s.failed, s.finished, s.cu_tokens, s.slot_of_row, s.running)
        learn_acceptance(s.confidence, other, *judged, other.clone(), rounds, sums, weights)


ADAPTIVE = ("choose_budget", "keep_drafting", "estimate_acceptance", "learn_acceptance")
CASES: dict[str, Callable[[torch.device | str], None]] = {
    "plan_window": plan,
    "budget_topk": share,
    **{name: partial(adapt, name=name) for name in ADAPTIVE},
    "pack_window": pack,
    "pack_prefill": chunk,
    "commit": lambda device: finish(device, pairs=False),
    "commit with pairs": lambda device: finish(device, pairs=True),
    "ngram_propose": look_up,
    "suffix_propose": follow,
    "pack_tail": pack_last,
    "pack_block": pack_queries,
    "pack_unseen": pack_pairs,
    "advance_draft": advance,
    "merge_drafts": merge,
}


@pytest.mark.parametrize("name", CASES)
def test_the_op_can_be_captured(name: str) -> None:
    CASES[name]("cpu")
    with fake_cuda() as device:
        check_function(name, lambda: CASES[name](device))
