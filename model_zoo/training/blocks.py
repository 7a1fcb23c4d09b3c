"""Blocks of queries at random anchors, as DFlash and DSpark are trained."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .batch import TrainingBatch


@dataclass(frozen=True)
class Blocks:
    """Some anchors of each text, and what follows them."""

    anchor: torch.Tensor
    """int64 [B, A], positions of the anchors, the last committed tokens."""
    used: torch.Tensor
    """bool [B, A]: not padding."""
    ahead: torch.Tensor
    """int64 [B, A, K], the tokens after the anchor: token i is what the i-th draft should be."""
    known: torch.Tensor
    """bool [B, A, K], whether the target wrote them; a prefix of each row."""


def choose_blocks(batch: TrainingBatch, num_drafts: int, most: int, generator: torch.Generator) -> Blocks:
    """Chooses anchors at random, of those whose next token is the target's.

    Args:
        batch: the texts.
        num_drafts: `K`.
        most: anchors of a text.
        generator: on the CPU.
    """
    device, length = batch.tokens.device, batch.tokens.shape[1]
    written = batch.answer & batch.valid
    eligible = torch.nn.functional.pad(written[:, 1:], (0, 1))
    eligible[:, 0] = False  # an anchor has context before it
    count = min(most, max(1, int(eligible.sum(1).max())))
    draw = torch.rand(eligible.shape, generator=generator).to(device)
    anchor = draw.masked_fill(~eligible, -1.0).topk(min(count, length), dim=1).indices.sort(1).values
    used = eligible.gather(1, anchor)
    places = anchor[..., None] + torch.arange(1, num_drafts + 1, device=device)
    inside = places < length
    places = places.clamp_max(length - 1)
    rows = torch.arange(len(anchor), device=device)[:, None, None]
    known = (written[rows, places] & inside & used[..., None]).cumprod(-1).bool()
    return Blocks(anchor, used, batch.tokens[rows, places], known)


def visible(blocks: Blocks, length: int, queries: int, *, causal: bool) -> torch.Tensor:
    """Who sees whom: a block's queries see the context before their anchor, and each other.

    Args:
        blocks: `A` anchors for each of `B` texts.
        length: of the context, `T`.
        queries: of a block, `S`.
        causal: a query does not see those after it.

    Returns:
        bool [B, 1, A * S, T + A * S].
    """
    anchors, device = blocks.anchor.shape[1], blocks.anchor.device
    context = torch.arange(length, device=device) < blocks.anchor[..., None]
    context = context.repeat_interleave(queries, 1)
    block = torch.arange(anchors * queries, device=device)
    own = block[:, None] // queries == block // queries
    if causal:
        own &= block[:, None] >= block
    return torch.cat((context, own.expand(len(context), -1, -1)), -1)[:, None]
