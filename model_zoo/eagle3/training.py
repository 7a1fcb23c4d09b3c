"""EAGLE-3's head, as it learns: several steps on its own output (Li et al. 2025, arXiv 2503.01840, section 3.2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import nn

from ..training.batch import TrainingBatch
from ..training.chains import DraftingRows, attend, compare_chains, drafting_rows, shifted
from ..training.draft_vocabulary import DraftVocabulary
from ..training.initial import copy_layer
from ..training.layers import Attention, FeedForward, LayerShape, RMSNorm
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
        steps = self.draft_logits(batch, rows)
        return compare_chains(batch, rows, steps, self._vocabulary, self.goal_logits, self.options.step_decay)

    def draft_logits(self, batch: TrainingBatch, rows: DraftingRows) -> Iterator[torch.Tensor]:
        """Of each step, the logits of the drafts that can be compared, [N of that step, Vd], in the order of `rows`."""
        hidden = self.fc(batch.states)
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for step in range(self.num_drafts):
            hidden = self._step(step, shifted(batch.tokens, 1 + step), hidden, keys, values)
            yield self.lm_head(self.norm(hidden.flatten(0, 1).index_select(0, rows.places(step))))

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
        embedded = layer.input_layernorm(self.embed(tokens, hidden.dtype))
        pair = torch.cat((embedded, layer.hidden_norm(hidden)), -1)
        hidden = hidden + attend(layer.self_attn, pair, self._rotary, step, keys, values)
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def config_json(self) -> dict[str, Any]:
        """See `Trainee.config_json`."""
        return {
            **self.common_json(num_layers=1),
            "norm_before_residual": False,
            "norm_before_fc": False,
            "eagle_aux_hidden_state_layer_ids": list(self._states),
        }
