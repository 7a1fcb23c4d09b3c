"""Medusa's heads, as they learn beside a frozen target: Medusa-1 (Cai et al. 2024, arXiv 2401.10774, section 2.2.1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import nn

from ..training.batch import TrainingBatch
from ..training.chains import DraftingRows, compare_chains, drafting_rows
from ..training.draft_vocabulary import DraftVocabulary
from ..training.layers import LayerShape
from ..training.target_trainee import TargetTrainee
from ..training.trainee import Outcome, TargetFacts


@dataclass(frozen=True, kw_only=True)
class MedusaOptions:
    """What is chosen of Medusa heads and their training."""

    num_drafts: int = 4
    """Heads."""
    num_blocks: int = 1
    """Residual blocks of a head."""
    step_decay: float = 0.8
    """The loss of each head counts this much of the one before."""
    train_head: bool = True
    """The heads' projections to the vocabulary learn too; otherwise they stay the target's rows."""

    def __post_init__(self) -> None:
        for name in ("num_drafts", "num_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0.0 < self.step_decay <= 1.0:
            raise ValueError(f"step_decay must lie in (0, 1], got {self.step_decay}")


class ResidualBlocks(nn.Module):
    """x + SiLU(W x + b), one after another; each begins as the identity."""

    def __init__(self, size: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(count))
        for layer in self.layers:
            for parameter in layer.parameters():
                nn.init.zeros_(parameter)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., size], to the same."""
        for layer in self.layers:
            hidden = hidden + F.silu(layer(hidden))
        return hidden


class MedusaTrainee(TargetTrainee):
    """Head i reads the target's last hidden state at t and drafts token t + 2 + i, whatever was drafted before it."""

    method: ClassVar[str] = "medusa"

    def __init__(
        self, target: TargetFacts, shape: LayerShape, vocabulary: DraftVocabulary, options: MedusaOptions
    ) -> None:
        """Every head begins as the target's own.

        Args:
            target: whose last hidden state the heads read.
            shape: of the heads; only its width matters, which must be the target's.
            vocabulary: what they can draft.
            options: of the heads and their training.

        Raises:
            ValueError: the target has another width.
        """
        super().__init__(target, vocabulary, num_drafts=options.num_drafts)
        width = target.embedding.shape[1]
        if shape.hidden_size != width:
            raise ValueError(f"the heads' hidden size must be the target's, {width}, got {shape.hidden_size}")
        self.options = options
        self.blocks = nn.ModuleList(ResidualBlocks(width, options.num_blocks) for _ in range(options.num_drafts))
        self.lm_heads = nn.ModuleList(nn.Linear(width, vocabulary.size, bias=False) for _ in range(options.num_drafts))
        for module in self.lm_heads:
            weight = cast(nn.Linear, module).weight
            with torch.no_grad():
                weight.copy_(self._goal_head)
            weight.requires_grad_(options.train_head)

    def forward(self, batch: TrainingBatch, generator: torch.Generator) -> Outcome:
        """See `Trainee.forward`; nothing is random here."""
        rows = drafting_rows(batch, self.num_drafts)
        steps = self.draft_logits(batch, rows)
        return compare_chains(batch, rows, steps, self._vocabulary, self.goal_logits, self.options.step_decay)

    def draft_logits(self, batch: TrainingBatch, rows: DraftingRows) -> Iterator[torch.Tensor]:
        """Of each head, the logits of the drafts that can be compared, [N of that head, Vd], in the order of `rows`."""
        final = batch.final.flatten(0, 1)
        for step, (blocks, head) in enumerate(zip(self.blocks, self.lm_heads, strict=True)):
            yield head(blocks(final.index_select(0, rows.places(step))))

    def config_json(self) -> dict[str, Any]:
        """The exported config.json, of the layout that names its blocks: the speculators library has no Medusa."""
        return {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "hidden_size": self._target.embedding.shape[1],
            "vocab_size": self._vocabulary.vocab_size,
            "truncated_vocab_size": self._vocabulary.size,
            "num_heads": self.num_drafts,
            "medusa_num_heads": self.num_drafts,
            "num_hidden_layers": self.options.num_blocks,
            "base_model_name_or_path": self._target.name,
        }

    def export_tensors(self) -> dict[str, torch.Tensor]:
        """See `Trainee.export_tensors`; `token_map`, int64 [Vd], has the target's ids where it has not all tokens."""
        found = super().export_tensors()
        if self._vocabulary.size < self._vocabulary.vocab_size:
            found["token_map"] = self._vocabulary.ids
        return found
