"""DSpark's drafter, as it learns: DFlash's blocks, each draft corrected by the one before, and its chance to stand."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ..dflash.training import DFlashOptions, DFlashTrainee
from ..training.batch import TrainingBatch
from ..training.blocks import Blocks, choose_blocks
from ..training.draft_vocabulary import DraftVocabulary
from ..training.layers import LayerShape
from ..training.losses import distribution_loss, overlap, weighted_mean
from ..training.trainee import Outcome, TargetFacts


@dataclass(frozen=True, kw_only=True)
class DSparkOptions(DFlashOptions):
    """What is chosen of a DSpark drafter and its training."""

    from_anchor: bool = True
    markov_rank: int = 24
    """Columns of the embedding of the token before."""
    confidence_weight: float = 0.1
    """Of the confidence's loss beside that of the drafts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.markov_rank < 1:
            raise ValueError(f"markov_rank must be at least 1, got {self.markov_rank}")
        if not (math.isfinite(self.confidence_weight) and self.confidence_weight >= 0.0):
            raise ValueError(f"confidence_weight must be finite and not negative, got {self.confidence_weight}")


class MarkovHead(nn.Module):
    """What a draft's logits owe to the token before it: W2 W1[previous], of low rank."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=rank**-0.5)
        nn.init.zeros_(self.markov_w2.weight)


class ConfidenceHead(nn.Module):
    """The logit of a draft's chance to be accepted, of the block's output and W1[previous]."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, 1)
        nn.init.zeros_(self.proj.weight)


class DSparkTrainee(DFlashTrainee):
    """DFlash's drafter with a vanilla Markov head and a confidence head.

    The confidence learns sum_x min(p(x), q(x)), the chance that speculative sampling accepts the draft.
    """

    method: ClassVar[str] = "dspark"
    options: DSparkOptions

    def __init__(
        self, target: TargetFacts, shape: LayerShape, vocabulary: DraftVocabulary, options: DSparkOptions
    ) -> None:
        """Begins as DFlash's drafter does; the two heads begin without a say. See `DFlashTrainee`."""
        super().__init__(target, shape, vocabulary, options)
        self.markov_head = MarkovHead(vocabulary.vocab_size, vocabulary.size, options.markov_rank)
        self.confidence_head = ConfidenceHead(shape.hidden_size + options.markov_rank)

    def forward(self, batch: TrainingBatch, generator: torch.Generator) -> Outcome:
        """See `Trainee.forward`; the token before each draft is the one that the target wrote."""
        blocks = choose_blocks(batch, self.num_drafts, self.options.anchors, generator)
        known = blocks.known
        labels = self._vocabulary.labels(blocks.ahead[known])
        logits, score = self.corrected(batch, blocks)
        goal = self.goal(batch, blocks)
        weights = self.weights(known) * (labels >= 0)
        drafts = weighted_mean(distribution_loss(logits, goal), weights)
        confidence = weighted_mean(
            F.binary_cross_entropy_with_logits(score, overlap(logits, goal).detach(), reduction="none"), weights
        )
        loss = drafts + self.options.confidence_weight * confidence
        parts = {"drafts": drafts.detach(), "confidence": confidence.detach()}
        return self.outcome(loss, logits, labels, known, parts)

    def draft_logits(self, batch: TrainingBatch, blocks: Blocks) -> torch.Tensor:
        """The logits of every known draft after what the target wrote before it, [N, Vd]."""
        return self.corrected(batch, blocks)[0]

    def corrected(self, batch: TrainingBatch, blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
        """Those logits, and float32 [N], the logits of the drafts' chances to be accepted."""
        hidden = self.drafting(batch, blocks)
        before = torch.cat((batch.tokens.gather(1, blocks.anchor)[..., None], blocks.ahead[..., :-1]), -1)
        previous = self.markov_head.markov_w1(before[blocks.known])
        logits = self.lm_head(hidden) + self.markov_head.markov_w2(previous)
        score = self.confidence_head.proj(torch.cat((hidden, previous), -1))[:, 0].float()
        return logits, score

    def config_json(self) -> dict[str, Any]:
        """See `Trainee.config_json`."""
        return {
            **super().config_json(),
            "markov_head_type": "vanilla",
            "markov_rank": self.options.markov_rank,
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
