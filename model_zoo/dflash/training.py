"""DFlash's drafter, as it learns: masked blocks at random anchors of a text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import nn

from ..training.batch import TrainingBatch
from ..training.blocks import Blocks, choose_blocks, visible
from ..training.draft_vocabulary import DraftVocabulary
from ..training.initial import copy_layer
from ..training.layers import DecoderLayer, LayerShape, RMSNorm, repeat_heads
from ..training.losses import distribution_loss, prefix_hits, weighted_mean
from ..training.state_reader import StateReader
from ..training.trainee import Outcome, TargetFacts


@dataclass(frozen=True, kw_only=True)
class DFlashOptions:
    """What is chosen of a DFlash drafter and its training."""

    num_drafts: int = 5
    """Drafts of a block."""
    num_layers: int = 2
    """Decoder layers of the drafter."""
    anchors: int = 32
    """Anchors of a text in one batch."""
    decay: float = 3.0
    """Draft i counts exp(-(i - 1) / decay)."""
    causal: bool = True
    """A query does not see the masks after it, so that fewer drafts than it was trained for cost nothing."""
    from_anchor: bool = False
    """The anchor's query drafts too."""
    mask_token: int = 0
    """Whose embedding stands for what is to be drafted."""
    aux_layers: tuple[int, ...] | None = None
    """Indices into transformers' `hidden_states`; None: an early, a middle and a late one, as EAGLE-3's."""
    train_head: bool = False
    """The head to the vocabulary learns too; otherwise it stays the target's rows."""

    def __post_init__(self) -> None:
        for name in ("num_drafts", "num_layers", "anchors"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not (math.isfinite(self.decay) and self.decay > 0.0):
            raise ValueError(f"decay must be positive and finite, got {self.decay}")
        if self.mask_token < 0:
            raise ValueError(f"mask_token must be a token of the target, got {self.mask_token}")


class DFlashTrainee(StateReader):
    """Queries, an anchor and masks, over context made of the target's hidden states, for many anchors at once."""

    method: ClassVar[str] = "dflash"

    def __init__(
        self, target: TargetFacts, shape: LayerShape, vocabulary: DraftVocabulary, options: DFlashOptions
    ) -> None:
        """Begins at the target's last layers and its head's rows; see `StateReader`."""
        super().__init__(
            target,
            shape,
            vocabulary,
            num_drafts=options.num_drafts,
            aux_layers=options.aux_layers,
            train_head=options.train_head,
        )
        vocabulary.check_target_token("mask_token", options.mask_token)
        self.options = options
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(options.num_layers))
        for layer, weights in zip(reversed(self.layers), reversed(target.layers), strict=False):
            copy_layer(layer, weights)

    @property
    def queries(self) -> int:
        """Of a block: the anchor and the masks."""
        return self.num_drafts + (not self.options.from_anchor)

    def forward(self, batch: TrainingBatch, generator: torch.Generator) -> Outcome:
        """See `Trainee.forward`; the anchors are random."""
        blocks = choose_blocks(batch, self.num_drafts, self.options.anchors, generator)
        labels = self._vocabulary.labels(blocks.ahead[blocks.known])
        logits = self.draft_logits(batch, blocks)
        goal = self.goal(batch, blocks)
        loss = weighted_mean(distribution_loss(logits, goal), self.weights(blocks.known) * (labels >= 0))
        return self.outcome(loss, logits, labels, blocks.known, {})

    def draft_logits(self, batch: TrainingBatch, blocks: Blocks) -> torch.Tensor:
        """The logits of every known draft, [N, Vd]."""
        logits: torch.Tensor = self.lm_head(self.drafting(batch, blocks))
        return logits

    def drafting(self, batch: TrainingBatch, blocks: Blocks) -> torch.Tensor:
        """The output of the queries that draft, after the final norm, where the draft is known: [N, H]."""
        normed: torch.Tensor = self.norm(self.read_blocks(batch, blocks))
        return normed[:, :, -self.num_drafts :][blocks.known]

    def read_blocks(self, batch: TrainingBatch, blocks: Blocks) -> torch.Tensor:
        """The layers' output for every query, [B, A, S, H], before the final norm."""
        size, length, queries = *batch.tokens.shape, self.queries
        anchors = blocks.anchor.shape[1]
        context = self.hidden_norm(self.fc(batch.states))
        tokens = batch.tokens.new_full((size, anchors, queries), self.options.mask_token)
        tokens[:, :, 0] = batch.tokens.gather(1, blocks.anchor)
        hidden = self.embed(tokens.flatten(1), context.dtype) * self._target.embedding_scale
        places = (blocks.anchor[..., None] + torch.arange(queries, device=tokens.device)).flatten(1)
        before = torch.arange(length, device=tokens.device)
        mask, heads = visible(blocks, length, queries, causal=self.options.causal), self.shape.num_heads
        for module in self.layers:
            layer = cast(DecoderLayer, module)
            normed, attention = layer.input_layernorm(hidden), layer.self_attn
            keys = torch.cat(
                (
                    self._rotary(attention.keys(context), before),
                    self._rotary(attention.keys(normed), places),
                ),
                2,
            )
            values = torch.cat((attention.values(context), attention.values(normed)), 2)
            attended = F.scaled_dot_product_attention(
                self._rotary(attention.queries(normed), places),
                repeat_heads(keys, heads),
                repeat_heads(values, heads),
                attn_mask=mask,
            )
            hidden = hidden + attention.output(attended)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return hidden.unflatten(1, (anchors, queries))

    def goal(self, batch: TrainingBatch, blocks: Blocks) -> torch.Tensor:
        """The target's logits of every known draft, [N, Vd]."""
        places = blocks.anchor[..., None] + torch.arange(self.num_drafts, device=blocks.anchor.device)
        rows = torch.arange(len(places), device=places.device)[:, None, None].expand_as(places)
        return self.goal_logits(batch.final[rows[blocks.known], places[blocks.known]])

    def weights(self, known: torch.Tensor) -> torch.Tensor:
        """float32 [N], how much every known draft counts: less the later it is."""
        place = torch.arange(self.num_drafts, device=known.device)
        return torch.exp(-place / self.options.decay).expand_as(known)[known]

    def outcome(
        self,
        loss: torch.Tensor,
        logits: torch.Tensor,
        labels: torch.Tensor,
        known: torch.Tensor,
        parts: dict[str, torch.Tensor],
    ) -> Outcome:
        """The loss beside how many drafts are right: logits [N, Vd] and labels [N] of the known ones."""
        hits = torch.zeros_like(known)
        hits[known] = logits.detach().argmax(-1) == labels
        accepted, counted = prefix_hits(hits.flatten(0, 1), known.flatten(0, 1))
        return Outcome(loss, accepted, counted, parts)

    def config_json(self) -> dict[str, Any]:
        """See `Trainee.config_json`."""
        return {
            **self.common_json(self.options.num_layers),
            "block_size": self.queries,
            "sample_from_anchor": self.options.from_anchor,
            "causal": self.options.causal,
            "mask_token_id": self.options.mask_token,
            "aux_hidden_state_layer_ids": list(self._states),
            "num_target_layers": int(self._target.config["num_hidden_layers"]),
        }
