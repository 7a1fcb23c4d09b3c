"""Suffix decoding: what followed the last tokens most often, in this request or in finished ones, is the draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from ...graphs import DecodeState
from ...graphs.buckets import power_of_two_at_least
from ...kernels.suffix_index import PLANES
from ...kernels.suffix_propose import draft_budget, reset_suffix, suffix_propose
from ...profiling.floor import RoundShape, StepCost, suffix_cost
from .base import BaseSpeculator
from .suffix_store import SuffixStore

GLOBAL_TOKENS = 65536
"""Tokens of finished requests that the global tree holds at most, or one whole context if that is longer."""


class SuffixSpeculator(BaseSpeculator):
    """The most frequent continuation of the last 1 to `max_tree_depth` tokens, by its expected accepted length.

    Oliaro et al. 2024, "SuffixDecoding". Every slot has an index of its own tokens, which `propose` extends by what was
    committed, so a round's cost does not grow with the context. All rows share the snapshot of an index over finished
    requests; it is replaced only when a request is admitted, while no round runs.

    Memory is allocated once: 4 * depth * (4 * tokens + buckets) bytes for each slot, and on the host and the device
    for the global tree, where `buckets` is the power of two that holds `tokens`: at most 24 bytes per token and depth.
    """

    name: ClassVar[str] = "suffix"

    _heads: torch.Tensor
    _tree: torch.Tensor
    _indexed: torch.Tensor
    _global_tokens: torch.Tensor
    _global_heads: torch.Tensor
    _global_tree: torch.Tensor
    _budget: torch.Tensor
    _store: SuffixStore

    def __init__(
        self,
        num_speculative_tokens: int,
        *,
        max_tree_depth: int = 24,
        max_cached_requests: int = 10000,
        max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1,
        global_tokens: int = GLOBAL_TOKENS,
    ) -> None:
        """As the options of vLLM of these names.

        Args:
            num_speculative_tokens: the most drafts of a row.
            max_tree_depth: of the strings counted, in tokens; a match and its drafts are no longer together.
            max_cached_requests: finished requests in the global tree; 0 turns it off.
            max_spec_factor: drafts per matched token.
            min_token_prob: the least product of the drafts' probabilities.
            global_tokens: the least capacity of the global tree, in tokens.
        """
        super().__init__(num_speculative_tokens)
        self.max_tree_depth, self.max_cached_requests = max_tree_depth, max_cached_requests
        self.max_spec_factor, self.min_token_prob = max_spec_factor, min_token_prob
        self.global_tokens = global_tokens

    def allocate(self, state: DecodeState) -> None:
        """Allocates heads [R1, D, H], tree [R1, 4, D, C], and the global tokens [G], heads [D, H2], tree [4, D, G]."""
        slots, context = state.tokens.shape
        depth = self.max_tree_depth
        capacity = max(self.global_tokens, context) if self.max_cached_requests else 1
        self._store = SuffixStore(depth=depth, max_requests=self.max_cached_requests, capacity=capacity)

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=state.device)

        self._heads = zeros(slots, depth, power_of_two_at_least(context))
        self._tree = zeros(slots, PLANES, depth, context)
        self._indexed = zeros(slots)
        self._global_tokens = zeros(capacity)
        self._global_heads = zeros(depth, power_of_two_at_least(capacity))
        self._global_tree = zeros(PLANES, depth, capacity)
        budget = draft_budget(depth, self.num_speculative_tokens, self.max_spec_factor)
        self._budget = torch.tensor(budget, dtype=torch.int32).to(state.device)

    def propose(self, state: DecodeState, bucket: int) -> None:
        """Enters what was committed since the last round and follows every match of the last tokens."""
        suffix_propose(
            state.tokens,
            state.length,
            state.finished,
            state.slot_of_row[:bucket],
            self._heads,
            self._tree,
            self._indexed,
            self._global_tokens,
            self._global_heads,
            self._global_tree,
            self._budget,
            state.draft_tokens,
            state.draft_count,
            state.confidence,
            self.min_token_prob,
        )

    def admit(self, slot: int) -> None:
        """Empties the slot's index, and brings the global one up to date."""
        reset_suffix(self._heads, self._indexed, slot)
        if self._store.refresh():
            index, used = self._store.index, self._store.used
            self._global_tokens[:used].copy_(torch.from_numpy(index.tokens[:used]))
            self._global_heads.copy_(torch.from_numpy(index.heads))
            self._global_tree[:, :, :used].copy_(torch.from_numpy(index.tree[:, :, :used]))

    def finish(self, slot: int, tokens: Sequence[int]) -> None:
        """Keeps the request for the global tree, which it enters at the next `admit`."""
        self._store.add(tokens)

    def propose_cost(self, shape: RoundShape) -> StepCost:
        """The entries of the last round's tokens, and one look at every match."""
        return suffix_cost(shape, depth=self.max_tree_depth)
