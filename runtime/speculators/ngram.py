"""Prompt lookup: what followed the last occurrence of the current suffix is the draft."""

from __future__ import annotations

from typing import ClassVar

import torch

from ...graphs import DecodeState
from ...graphs.buckets import power_of_two_at_least
from ...kernels.ngram_propose import ngram_propose, reset_ngram
from ...profiling.floor import RoundShape, StepCost, ngram_cost
from ..speculative_methods import Evidence
from .base import BaseSpeculator


class NgramSpeculator(BaseSpeculator):
    """The longest suffix n-gram of `min_n` to `max_n` tokens that occurred before, most recent match first.

    The index is incremental, one hash table of chains per n and slot, so a round's cost does not grow with the
    context. Lookup is exact: a chain is followed until the tokens really match.
    """

    name: ClassVar[str] = "ngram"
    evidence: ClassVar[Evidence] = Evidence.POSITION

    _heads: torch.Tensor
    _links: torch.Tensor
    _indexed: torch.Tensor

    def __init__(self, num_speculative_tokens: int, *, min_n: int, max_n: int) -> None:
        super().__init__(num_speculative_tokens)
        self.min_n, self.max_n = min_n, max_n

    def allocate(self, state: DecodeState) -> None:
        """Allocates heads [R1, N, H], links [R1, N, C] and the count of indexed tokens [R1], all int32."""
        slots, context = state.tokens.shape
        sizes = self.max_n - self.min_n + 1

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=state.device)

        self._heads = zeros(slots, sizes, power_of_two_at_least(context))
        self._links = zeros(slots, sizes, context)
        self._indexed = zeros(slots)

    def propose(self, state: DecodeState, bucket: int) -> None:
        """Indexes what was committed since the last round and looks the suffix up."""
        ngram_propose(
            state.tokens,
            state.length,
            state.finished,
            state.slot_of_row[:bucket],
            self._heads,
            self._links,
            self._indexed,
            state.draft_tokens,
            state.draft_count,
            self.min_n,
            self.max_n,
        )

    def admit(self, slot: int) -> None:
        """Empties the slot's index."""
        reset_ngram(self._heads, self._indexed, slot)

    def propose_cost(self, shape: RoundShape) -> StepCost:
        """The entries of the last round's tokens, and one lookup."""
        return ngram_cost(shape, min_n=self.min_n, max_n=self.max_n)
