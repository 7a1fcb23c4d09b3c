"""The tokens that a head can draft, and what the target says of them."""

from __future__ import annotations

import torch
from torch import nn

from .vocabulary import draft_to_target, target_to_draft


class DraftVocabulary(nn.Module):
    """Tokens of the target by the head's own numbers; all of them, or a choice."""

    ids: torch.Tensor
    """int64 [Vd], the target's id of each."""
    own: torch.Tensor
    """int64 [V], the head's number of each token of the target, -1 for none."""

    def __init__(self, ids: torch.Tensor, vocab_size: int) -> None:
        """Takes the tokens.

        Args:
            ids: int64 [Vd], ascending.
            vocab_size: of the target.

        Raises:
            ValueError: they are not ascending ids of that vocabulary.
        """
        super().__init__()
        if ids.dim() != 1 or not len(ids) or bool((ids.diff() <= 0).any()) or ids[0] < 0 or ids[-1] >= vocab_size:
            raise ValueError(f"the draft vocabulary must be ascending ids from 0 to {vocab_size - 1}, got {ids}")
        self.size, self.vocab_size = len(ids), vocab_size
        own = torch.full((vocab_size,), -1, dtype=torch.int64)
        own[ids] = torch.arange(len(ids))
        self.register_buffer("ids", ids.clone(), persistent=False)
        self.register_buffer("own", own, persistent=False)

    def labels(self, tokens: torch.Tensor) -> torch.Tensor:
        """The head's number of each token of the target, -1 where it has none."""
        return self.own[tokens]

    def check_target_token(self, name: str, token: int) -> None:
        """Raises `ValueError` where an option of this name is no token of the target."""
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"{name} must be one of the target's tokens, 0 to {self.vocab_size - 1}, got {token}")

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is exported: d2t, int64 [Vd], the target's id of token i less i, and t2d, bool [V], which tokens can be
        drafted. Nothing where all can.
        """
        if self.size == self.vocab_size:
            return {}
        ids = self.ids.cpu()
        return {"d2t": draft_to_target(ids), "t2d": target_to_draft(ids, self.vocab_size)}
