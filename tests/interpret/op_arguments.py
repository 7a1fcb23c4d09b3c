"""Small arguments of every op, as its launch wrapper takes them."""

from __future__ import annotations

import torch
from device_cases import cases
from draft_cases import (
    advance_arguments,
    argmax_arguments,
    distribution_arguments,
    merge_arguments,
    tail_arguments,
    unseen_arguments,
)
from moving_cases import CASES as MOVING
from moving_cases import op_of
from window_cases import WindowCase, attention_arguments, rotary_arguments

VOCAB, HIDDEN, INNER, EXPERTS, TOKENS = 70, 40, 24, 6, 7


def halves(*shape):
    return torch.randn(shape).bfloat16()


def ints(*shape):
    return torch.zeros(shape, dtype=torch.int32)


def experts():
    weights = halves(EXPERTS, 2 * INNER, HIDDEN), halves(EXPERTS, HIDDEN, INNER)
    return [halves(TOKENS, HIDDEN), ints(TOKENS, 2), torch.rand(TOKENS, 2), ints(TOKENS), *weights, "silu"]


def rotation():
    case = WindowCase([3, 2], [70, 0], padding=1)
    sizes = {"heads": 4, "kv_heads": 2, "size": 16, "value_size": 16, "half": 8}
    return rotary_arguments(
        case, **sizes, dtype=torch.bfloat16, norm=True, unit_offset=False, interleaved=False, float8=False
    )


OPS = {case.op: (lambda case=case: case.make(1)) for case in cases(vocab=VOCAB).values()} | {
    **{op_of(case): (lambda make=make: make(2)) for case, make in MOVING.items()},
    "advance_draft": lambda: advance_arguments(1),
    "draft_argmax": lambda: argmax_arguments(1, rows=2),
    "draft_distribution": lambda: distribution_arguments(1, rows=2),
    "merge_drafts": lambda: merge_arguments(1),
    "pack_tail": lambda: tail_arguments(1),
    "pack_unseen": lambda: unseen_arguments(1),
    "embed_tokens": lambda: [ints(TOKENS), halves(VOCAB, HIDDEN), 1.0],
    "project_logits": lambda: [halves(TOKENS, HIDDEN), halves(VOCAB, HIDDEN), 30.0, halves(TOKENS, VOCAB)],
    "moe_experts": experts,
    "rope_and_cache": rotation,
    "window_attention": lambda: attention_arguments(
        WindowCase([3, 2], [70, 0], padding=1, tree=True), dtype=torch.bfloat16
    ),
    "compact_path": lambda: [
        *(halves(2, 3, 2, 72, 16) for _ in range(2)),
        *(ints(1, 4), ints(1), ints(1), ints(1)),
    ],
}
"""Arguments of every op."""
