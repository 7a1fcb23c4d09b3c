"""Chains of drafts: each row of a text begins one, and step s of all of them is computed at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from .batch import TrainingBatch
from .draft_vocabulary import DraftVocabulary
from .layers import Attention, Rotary, repeat_heads
from .losses import distribution_loss, prefix_hits, weighted_mean
from .trainee import Outcome


@dataclass(frozen=True)
class DraftingRows:
    """Where chains of drafts can be compared with what the target wrote."""

    index: torch.Tensor
    """int64 [N], places in the flattened batch: the last committed hidden state of each chain."""
    known: torch.Tensor
    """bool [N, K], whether the i-th draft after it is a token that the target wrote; a prefix of each row."""

    def places(self, step: int) -> torch.Tensor:
        """int64, those of the chains whose draft of this step is known."""
        return self.index[self.known[:, step]]


def drafting_rows(batch: TrainingBatch, num_drafts: int) -> DraftingRows:
    """All places whose next token but one, the first draft, is the target's."""
    ahead = torch.stack([shifted(batch.answer & batch.valid, 2 + step) for step in range(num_drafts)], -1)
    known = ahead.cumprod(-1).bool()
    index = known[..., 0].flatten().nonzero().flatten()
    return DraftingRows(index, known.flatten(0, 1).index_select(0, index))


def shifted(values: torch.Tensor, distance: int) -> torch.Tensor:
    """[B, T]: what stands so many places later, 0 past the end."""
    return nn.functional.pad(values[:, distance:], (0, min(distance, values.shape[1])))


def compare_chains(
    batch: TrainingBatch,
    rows: DraftingRows,
    steps: Iterable[torch.Tensor],
    vocabulary: DraftVocabulary,
    goal_logits: Callable[[torch.Tensor], torch.Tensor],
    decay: float,
) -> Outcome:
    """Compares the drafts of every step with what the target makes of the text that it wrote.

    Args:
        batch: the texts.
        rows: where there is something to compare.
        steps: of each step, the logits of the known drafts, [N of that step, Vd], in the order of `rows`.
        vocabulary: what can be drafted.
        goal_logits: the target's logits of those tokens of its last hidden states, [N, Ht] to [N, Vd].
        decay: the loss of each step counts this much of the one before.
    """
    losses, hits = [], []
    loss = batch.final.new_zeros((), dtype=torch.float32)
    for step, logits in enumerate(steps):
        known, place = rows.known[:, step], rows.places(step)
        written = batch.tokens.flatten().index_select(0, place + 2 + step)
        labels = vocabulary.labels(written)
        with torch.no_grad():
            goal = goal_logits(batch.final.flatten(0, 1).index_select(0, place + 1 + step))
            found = torch.zeros_like(known)
            found[known] = logits.argmax(-1) == labels
            hits.append(found)
        mean = weighted_mean(distribution_loss(logits, goal), (labels >= 0).float())
        losses.append(mean.detach())
        loss = loss + decay**step * mean
    total = sum(decay**step for step in range(len(losses)))
    accepted, counted = prefix_hits(torch.stack(hits, 1), rows.known)
    return Outcome(loss / total, accepted, counted, {f"step {i + 1}": value for i, value in enumerate(losses)})


def attend(
    attention: Attention,
    inputs: torch.Tensor,
    rotary: Rotary,
    step: int,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
) -> torch.Tensor:
    """Attention of all rows of a step, as the head's cache has it when it drafts.

    Args:
        attention: of a head's layer.
        inputs: [B, T, columns]; row t stands at position t + step.
        rotary: of the head.
        step: from 0.
        keys: of the steps before, [B, h, T, D] each; this step's are added.
        values: likewise.

    Returns:
        [B, T, H].
    """
    positions = torch.arange(inputs.shape[1], device=inputs.device) + step
    queries, heads = rotary(attention.queries(inputs), positions), attention.num_heads
    keys.append(repeat_heads(rotary(attention.keys(inputs), positions), heads))
    values.append(repeat_heads(attention.values(inputs), heads))
    return attention.output(chain_attention(queries, keys, values))


def chain_attention(queries: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
    """Attention of a step's rows: to step 0's up to their own, and to their own of each later step.

    Args:
        queries: [B, h, T, D].
        keys: of every step so far, [B, h, T, D] each.
        values: likewise.

    Returns:
        [B, h, T, D].
    """
    scale = queries.shape[-1] ** -0.5
    if len(keys) == 1:
        return nn.functional.scaled_dot_product_attention(queries, keys[0], values[0], is_causal=True)
    length = queries.shape[2]
    past = (queries @ keys[0].transpose(-1, -2)) * scale
    future = torch.ones(length, length, dtype=torch.bool, device=queries.device).triu(1)
    own = [(queries * key).sum(-1, keepdim=True) * scale for key in keys[1:]]
    weights = torch.cat((past.masked_fill(future, -torch.inf), *own), -1).float().softmax(-1).to(queries.dtype)
    attended = weights[..., :length] @ values[0]
    for index, value in enumerate(values[1:]):
        attended = attended + weights[..., length + index, None] * value
    return attended
