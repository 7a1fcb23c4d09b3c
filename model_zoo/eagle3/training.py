"""EAGLE-3's head, as it learns: several steps on its own output (Li et al. 2025, arXiv 2503.01840, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import nn

from ..training.batch import TrainingBatch
from ..training.draft_vocabulary import DraftVocabulary
from ..training.initial import copy_layer
from ..training.layers import Attention, FeedForward, LayerShape, RMSNorm, repeat_heads
from ..training.losses import distribution_loss, prefix_hits, weighted_mean
from ..training.state_reader import StateReader
from ..training.trainee import Outcome, TargetFacts


@dataclass(frozen=True, kw_only=True)
class Eagle3Options:
    """What is chosen of an EAGLE-3 head and its training."""

    num_drafts: int = 4
    """Steps of the training-time test."""
    step_decay: float = 0.8
    """The loss of each step counts this much of the one before."""
    aux_layers: tuple[int, ...] | None = None
    """Indices into transformers' `hidden_states`; None: the published default."""
    train_head: bool = False
    """The head to the vocabulary learns too; otherwise it stays the target's rows."""

    def __post_init__(self) -> None:
        if self.num_drafts < 1:
            raise ValueError(f"num_drafts must be at least 1, got {self.num_drafts}")
        if not 0.0 < self.step_decay <= 1.0:
            raise ValueError(f"step_decay must lie in (0, 1], got {self.step_decay}")


class Eagle3Layer(nn.Module):
    """The layer whose attention reads the embedding and the hidden state side by side."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape, 2 * shape.hidden_size)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = FeedForward(shape)


class Eagle3Trainee(StateReader):
    """Row t of step s stands for the head's (s + 1)-th draft after the target's hidden state at t.

    It reads token t + 1 + s beside the hidden state, the target's in step 0 and the head's own of the step before
    afterwards, at position t + s; it attends to step 0's keys up to row t and to its own row's of the later steps: what
    the head's cache holds when it drafts. It drafts token t + 2 + s.
    """

    method: ClassVar[str] = "eagle3"

    def __init__(
        self, target: TargetFacts, shape: LayerShape, vocabulary: DraftVocabulary, options: Eagle3Options
    ) -> None:
        """Begins at the target's last layer and its head's rows; see `StateReader`."""
        super().__init__(
            target,
            shape,
            vocabulary,
            num_drafts=options.num_drafts,
            aux_layers=options.aux_layers,
            train_head=options.train_head,
        )
        self.options = options
        self.layers = nn.ModuleList([Eagle3Layer(shape)])
        if target.layers:
            weights = dict(target.layers[-1])
            weights["hidden_norm.weight"] = weights.pop("input_layernorm.weight")
            copy_layer(self.layers[0], weights, columns=slice(shape.hidden_size, None))

    def forward(self, batch: TrainingBatch, generator: torch.Generator) -> Outcome:
        """See `Trainee.forward`; nothing is random here."""
        rows = drafting_rows(batch, self.num_drafts)
        hidden = self.fc(batch.states)
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        losses, hits = [], []
        loss = hidden.new_zeros((), dtype=torch.float32)
        for step in range(self.num_drafts):
            hidden = self._step(step, shifted(batch.tokens, 1 + step), hidden, keys, values)
            known = rows.known[:, step]
            place = rows.index[known]
            logits = self.lm_head(self.norm(hidden.flatten(0, 1).index_select(0, place)))
            written = batch.tokens.flatten().index_select(0, place + 2 + step)
            labels = self._vocabulary.labels(written)
            with torch.no_grad():
                goal = self.goal_logits(batch.final.flatten(0, 1).index_select(0, place + 1 + step))
                found = torch.zeros_like(known)
                found[known] = logits.argmax(-1) == labels
                hits.append(found)
            mean = weighted_mean(distribution_loss(logits, goal), (labels >= 0).float())
            losses.append(mean.detach())
            loss = loss + self.options.step_decay**step * mean
        total = sum(self.options.step_decay**step for step in range(self.num_drafts))
        accepted, counted = prefix_hits(torch.stack(hits, 1), rows.known)
        return Outcome(loss / total, accepted, counted, {f"step {i + 1}": value for i, value in enumerate(losses)})

    def _step(
        self,
        step: int,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
    ) -> torch.Tensor:
        """One step of all rows: int64 [B, T] and [B, T, H] to [B, T, H]; keys and values are added to."""
        layer = cast(Eagle3Layer, self.layers[0])
        attention, length = layer.self_attn, tokens.shape[1]
        embedded = layer.input_layernorm(self.embed(tokens, hidden.dtype))
        pair = torch.cat((embedded, layer.hidden_norm(hidden)), -1)
        positions = torch.arange(length, device=tokens.device) + step
        queries = self._rotary(attention.queries(pair), positions)
        heads = self.shape.num_heads
        keys.append(repeat_heads(self._rotary(attention.keys(pair), positions), heads))
        values.append(repeat_heads(attention.values(pair), heads))
        hidden = hidden + attention.output(chain_attention(queries, keys, values))
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def config_json(self) -> dict[str, Any]:
        """See `Trainee.config_json`."""
        return {
            **self.common_json(num_layers=1),
            "norm_before_residual": False,
            "norm_before_fc": False,
            "eagle_aux_hidden_state_layer_ids": list(self._states),
        }


@dataclass(frozen=True)
class DraftingRows:
    """Where chains of drafts can be compared with what the target wrote."""

    index: torch.Tensor
    """int64 [N], places in the flattened batch: the last committed hidden state of each chain."""
    known: torch.Tensor
    """bool [N, K], whether the i-th draft after it is a token that the target wrote; a prefix of each row."""


def drafting_rows(batch: TrainingBatch, num_drafts: int) -> DraftingRows:
    """All places whose next token but one, the first draft, is the target's."""
    ahead = torch.stack([shifted(batch.answer & batch.valid, 2 + step) for step in range(num_drafts)], -1)
    known = ahead.cumprod(-1).bool()
    index = known[..., 0].flatten().nonzero().flatten()
    return DraftingRows(index, known.flatten(0, 1).index_select(0, index))


def shifted(values: torch.Tensor, distance: int) -> torch.Tensor:
    """[B, T]: what stands so many places later, 0 past the end."""
    return nn.functional.pad(values[:, distance:], (0, min(distance, values.shape[1])))


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
