"""Draft heads that read the target's hidden states: EAGLE's, and multi-token prediction modules."""

from __future__ import annotations

from typing import ClassVar

import torch

from ...graphs import DecodeState
from ...kernels.gather_rows import gathered
from ...kernels.window import Window
from ...model_zoo.decoder import KvCache
from ...model_zoo.draft_head import DraftHead
from ...profiling.floor import RoundShape, StepCost
from .drafting import part_of, window_width
from .state_reader import StateSpeculator
from .stepwise import StepwiseSpeculator
from .target_states import side_by_side


class HeadSpeculator(StateSpeculator):
    """Keeps a draft head's KV and the target's hidden states for it.

    The KV at position j is made from the target's hidden state there and the token after it, so it is known one token
    later than the target's. Of a head that reads the target's KV nothing is kept but the hidden states.
    """

    lookahead = 1

    _head: DraftHead

    def __init__(
        self,
        num_speculative_tokens: int,
        head: DraftHead,
        *,
        target_states: tuple[int, ...],
        stream: int | None = None,
        target_cache: KvCache | None = None,
    ) -> None:
        """Takes the head as it was loaded.

        Args:
            num_speculative_tokens: see `StateSpeculator`.
            head: see `StateSpeculator`.
            target_states: see `StateSpeculator`.
            stream: see `StateSpeculator`.
            target_cache: the target's keys and values, for a head that reads them and has none of its own.
        """
        super().__init__(num_speculative_tokens, head, target_states=target_states, stream=stream)
        self._target_cache = target_cache
        # The pairs of a round's window are read by the next one's `propose`.
        self.unseen = num_speculative_tokens if target_cache is None else 0

    def _make_cache(self, state: DecodeState) -> KvCache:
        return super()._make_cache(state) if self._target_cache is None else self._target_cache

    def observe_prompt(self, state: DecodeState, window: Window, states: tuple[torch.Tensor, ...]) -> None:
        """Writes the head's KV of the chunk: the token after it is known, since it is never the prompt's last."""
        values = side_by_side(states)
        if self._target_cache is None:
            self._head.read_target(self._kept.successors(state, window), values, None, self._cache)
        self._kept.keep_last(window, values)

    def clear(self, slot: int) -> None:
        """Zeroes the head's own KV of the slot, and what was kept for it."""
        if self._target_cache is None:
            self._cache.clear(slot)
        self._kept.clear(slot)


class AutoRegressiveSpeculator(HeadSpeculator, StepwiseSpeculator):
    """Drafts one token after another.

    A round's first forward runs over the pairs that the head has not read: the target's hidden states of the window
    that was accepted. K - 1 more take the token drafted last and what the head made of the one before.
    """

    name: ClassVar[str] = "autoregressive"

    def __init__(
        self,
        num_speculative_tokens: int,
        head: DraftHead,
        *,
        target_states: tuple[int, ...],
        stream: int | None = None,
        target_cache: KvCache | None = None,
        advance_draft_positions: bool = True,
    ) -> None:
        """Takes the head as it was loaded.

        Args:
            num_speculative_tokens: `K`, at least 1.
            head: the drafter.
            target_states: which hidden states it reads.
            stream: of the noise with which drafts are sampled; None drafts greedily.
            target_cache: see `HeadSpeculator`.
            advance_draft_positions: each drafted token stands one position after the last. False: all stand where the
                first forward's last token stood.
        """
        super().__init__(
            num_speculative_tokens, head, target_states=target_states, stream=stream, target_cache=target_cache
        )
        self._advances = advance_draft_positions

    def begin(self, state: DecodeState, bucket: int) -> torch.Tensor:
        """Reads the pairs that the head has not read."""
        pairs, states, queries = self._kept.pairs(state, bucket)
        return gathered(self._head.read_target(pairs, self._kept.values, states, self._cache), queries)

    def draft(self, state: DecodeState, bucket: int, step: int, hidden: torch.Tensor) -> torch.Tensor:
        """Reads the head's own output, past the first draft, and drafts from it."""
        following = part_of(self._following, bucket, window_width(bucket))
        if step > 0:
            hidden = self._head.read_own(following, hidden, self._cache)
        hidden, logits = self._head.read_out(hidden)
        # The last pair stands at length - 2.
        shift = step - 1 if self._advances else -2
        self._chooser.draft(state, step, logits[:bucket], self._kept.slot_of_row(bucket), following, shift=shift)
        return hidden

    def propose_cost(self, shape: RoundShape) -> StepCost:
        """A forward over the one pair per row that there is at least, and K - 1 of one token; each with its logits."""
        depth = self.num_speculative_tokens
        steps = self._forward_cost(shape, 1, of_target=False).times(depth - 1)
        return self._forward_cost(shape, 1, of_target=True) + steps + self._head_cost(shape, 1).times(depth)


class ParallelSpeculator(HeadSpeculator):
    """Drafts all K tokens in one forward: masked places follow the pairs that the head has not read (P-EAGLE)."""

    name: ClassVar[str] = "parallel"
    confidence_reads_drafts = False

    @property
    def _masks(self) -> int:
        return self.num_speculative_tokens - 1

    def propose(self, state: DecodeState, bucket: int) -> None:
        """Reads what was committed and drafts K tokens for every live row of the bucket."""
        pairs, states, queries = self._kept.pairs(state, bucket)
        following = part_of(self._following, bucket, window_width(bucket))
        hidden = gathered(self._head.read_target(pairs, self._kept.values, states, self._cache), queries)
        _, logits = self._head.read_out(hidden)
        for step in range(self.num_speculative_tokens):
            of_step = logits[step * bucket : (step + 1) * bucket]
            self._chooser.draft(state, step, of_step, pairs.slot_of_row, following, shift=step - 1)

    def propose_cost(self, shape: RoundShape) -> StepCost:
        """One forward over a pair and K - 1 masked places per row, with the logits of all K."""
        depth = self.num_speculative_tokens
        return self._forward_cost(shape, depth, of_target=True) + self._head_cost(shape, depth)
