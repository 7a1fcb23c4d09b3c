"""The shape at which ops are timed: one row of 8 tokens of an 8B model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from draftgraph.graphs.state import DecodeState, StateShape

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DRAFTS, WIDTH, VOCAB, CACHED, CONTEXT = 7, 8, 128256, 4096, 4608
HEADS, KV_HEADS, SIZE, HIDDEN, CHUNK, LAYERS = 32, 8, 128, 4096, 512, 32
REPEATS = 16
"""Calls in one CUDA graph; each works on a slot of its own, so that none finds its work done."""


@dataclass
class OpCase:
    """An op at the reference shape."""

    run: Callable[[int], object]
    """Calls the op on a slot."""
    specs: Sequence[str] = ()
    """The specialisations of its kernels that this shape launches, one after another; they give the bytes."""
    bytes_moved: int = 0
    """For an op without kernels of its own."""
    written: Sequence[torch.Tensor] = field(default_factory=list)
    """What a call changes that the next one's work depends on; put back before each measurement."""


def state() -> DecodeState:
    """All slots alike: 4097 committed tokens, seven drafts."""
    shape = StateShape(
        slots=REPEATS,
        context=CONTEXT,
        num_drafts=DRAFTS,
        vocab_size=VOCAB,
        max_bucket=REPEATS,
        max_width=WIDTH,
    )
    s = DecodeState.allocate(shape, dtype=torch.bfloat16, device="cpu")
    s.tokens.copy_(torch.randint(0, VOCAB, s.tokens.shape))
    s.tokens[:, CACHED - 2 : CACHED + 1] = s.tokens[:, 100:103]
    s.length.fill_(CACHED + 1)
    s.limit.fill_(CONTEXT)
    s.finished[:-1] = False
    s.draft_count.fill_(DRAFTS)
    s.confidence.copy_(torch.rand(s.confidence.shape))
    s.draft_tokens.copy_(torch.randint(0, VOCAB, s.draft_tokens.shape))
    s.emitted.copy_(torch.randint(0, VOCAB, s.emitted.shape))
    s.accepted.fill_(DRAFTS)
    s.slot_of_row.copy_(torch.arange(REPEATS))
    s.cu_tokens[1] = WIDTH
    s.base.fill_(CACHED)
    s.window_rows.zero_()
    s.window_slots.zero_()
    s.window_positions.copy_(torch.arange(WIDTH) + CACHED)
    s.logits.copy_(3 * torch.randn(s.logits.shape))
    s.temperature.fill_(1.0)
    s.top_p.fill_(0.95)
    s.sampled.copy_(torch.randint(0, VOCAB, s.sampled.shape))
    s.log_normalizer.copy_(torch.logsumexp(s.logits.float(), 1))
    s.threshold.fill_(-1.0)
    there = DecodeState.allocate(shape, dtype=torch.bfloat16, device=DEVICE)
    for name, tensor in there.tensors().items():
        tensor.copy_(getattr(s, name))
    return there


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=DEVICE)


def halves(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)
