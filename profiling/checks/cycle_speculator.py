"""A drafting method as a user would write one: it knows the cycles in which the random models mostly go."""

from __future__ import annotations

import torch

from ...graphs import DecodeState
from ...runtime.speculators import BaseSpeculator
from .random_models import CYCLE


class CycleSpeculator(BaseSpeculator):
    """Drafts the tokens that follow in the cycle of the last one, for rows of odd length."""

    name = "cycle"

    def allocate(self, state: DecodeState) -> None:
        """Keeps what it adds to the last token."""
        self._offsets = torch.arange(1, self.num_speculative_tokens + 1, dtype=torch.int32, device=state.device)

    def propose(self, state: DecodeState, bucket: int) -> None:
        """Drafts for every row of the bucket."""
        slots = state.slot_of_row[:bucket].long()
        last = state.length[slots].long() - 1
        anchor = state.tokens[slots, last][:, None]
        state.draft_tokens[slots] = (anchor // CYCLE * CYCLE + (anchor + self._offsets) % CYCLE).int()
        state.draft_count[slots] = torch.where(last % 2 == 0, self.num_speculative_tokens, 0).int()
