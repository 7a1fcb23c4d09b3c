"""What all heads have in common that draft tokens of the target beside its own embedding and head."""

from __future__ import annotations

import torch
from torch import nn

from .draft_vocabulary import DraftVocabulary
from .trainee import TargetFacts, Trainee


class TargetTrainee(Trainee):
    """Knows the target's embedding, and what the target says of the tokens that can be drafted."""

    _embedding: torch.Tensor
    _goal_head: torch.Tensor
    """[Vd, Ht], the target's rows of the tokens that can be drafted."""

    def __init__(self, target: TargetFacts, vocabulary: DraftVocabulary, *, num_drafts: int) -> None:
        """Takes what is common.

        Args:
            target: whose embedding and head it knows.
            vocabulary: what it can draft.
            num_drafts: `K`.
        """
        super().__init__()
        self.num_drafts = num_drafts
        self._target, self._vocabulary = target, vocabulary
        self.register_buffer("_embedding", target.embedding, persistent=False)
        self.register_buffer("_goal_head", target.head[vocabulary.ids], persistent=False)

    def states_of(self, num_layers: int) -> tuple[int, ...]:
        """See `Trainee.states_of`; here none, for heads that read the last hidden state alone."""
        return ()

    def embed(self, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The target's embeddings, [..., Ht], not scaled."""
        return nn.functional.embedding(tokens, self._embedding).to(dtype)

    def goal_logits(self, final: torch.Tensor) -> torch.Tensor:
        """The target's logits of the tokens that can be drafted: [N, Ht] to [N, Vd]."""
        with torch.no_grad():
            return self.target_logits(final)

    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the target's head makes of hidden states, for heads that use it: [N, Ht] to [N, Vd]."""
        logits, cap = hidden @ self._goal_head.T.to(hidden.dtype), self._target.soft_cap
        return cap * torch.tanh(logits / cap) if cap else logits
