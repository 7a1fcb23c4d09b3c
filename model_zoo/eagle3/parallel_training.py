"""EAGLE-3's head, as it learns to draft all tokens in one pass (P-EAGLE, arXiv 2602.01469)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..training.batch import TrainingBatch
from ..training.chains import DraftingRows, shifted
from ..training.draft_vocabulary import DraftVocabulary
from ..training.layers import LayerShape
from ..training.trainee import TargetFacts
from .training import Eagle3Options, Eagle3Trainee


@dataclass(frozen=True, kw_only=True)
class ParallelEagle3Options(Eagle3Options):
    """What is chosen of a P-EAGLE head and its training; `num_drafts` are the places of a pass."""

    mask_token: int = 0
    """Whose embedding stands for tokens that are not known."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_drafts < 2:
            raise ValueError(f"a head that drafts in parallel has at least 2 drafts, got num_drafts {self.num_drafts}")
        if self.mask_token < 0:
            raise ValueError(f"mask_token must be a token of the target, got {self.mask_token}")


class ParallelEagle3Trainee(Eagle3Trainee):
    """Places of masks follow every row: the mask token beside a hidden state that is learned.

    Mask m of row t stands at position t + m and drafts token t + 2 + m. It attends to the pairs of the target's hidden
    states and tokens up to row t, and to the masks of its own row up to itself. So the masks of one number are to all
    rows what a later step is to those of a head that drafts one token after another, only that all read the same.
    """

    options: ParallelEagle3Options

    def __init__(
        self, target: TargetFacts, shape: LayerShape, vocabulary: DraftVocabulary, options: ParallelEagle3Options
    ) -> None:
        """Begins as EAGLE-3's head does; the masks' hidden state begins at random. See `Eagle3Trainee`.

        Raises:
            ValueError: the target has no such mask token.
        """
        super().__init__(target, shape, vocabulary, options)
        vocabulary.check_target_token("mask_token", options.mask_token)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, self.fc.in_features))

    def draft_logits(self, batch: TrainingBatch, rows: DraftingRows) -> Iterator[torch.Tensor]:
        """See `Eagle3Trainee.draft_logits`."""
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        tokens, hidden = shifted(batch.tokens, 1), self.fc(batch.states)
        masks = torch.full_like(tokens, self.options.mask_token)
        for step in range(self.num_drafts):
            if step > 0:
                tokens, hidden = masks, self.fc(self.mask_hidden.to(batch.states.dtype)).expand_as(hidden)
            out = self._step(step, tokens, hidden, keys, values)
            yield self.lm_head(self.norm(out.flatten(0, 1).index_select(0, rows.places(step))))

    def config_json(self) -> dict[str, Any]:
        """See `Trainee.config_json`."""
        return {**super().config_json(), "parallel_drafting": True, "ptd_token_id": self.options.mask_token}
