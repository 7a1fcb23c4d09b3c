"""Medusa heads draft, all K of them from one hidden state of the target."""

from __future__ import annotations

from typing import ClassVar

import torch

from ...graphs import DecodeState
from ...kernels.gather_rows import gathered
from ...kernels.window import Window
from ...model_zoo.medusa.model import MedusaModel
from ...profiling.floor import RoundShape, StepCost
from .base import BaseSpeculator
from .drafting import DraftChooser, part_of, step_window, window_width
from .target_states import TargetStates, side_by_side


class MedusaSpeculator(BaseSpeculator):
    """Head i drafts the token i + 2 places after the last one whose hidden state is known: the anchor's successors."""

    name: ClassVar[str] = "medusa"
    confidence_reads_drafts = False
    lookahead = 1

    _kept: TargetStates

    def __init__(
        self,
        num_speculative_tokens: int,
        heads: MedusaModel,
        *,
        target_states: tuple[int, ...],
        stream: int | None = None,
    ) -> None:
        """Takes the heads as they were loaded.

        Args:
            num_speculative_tokens: `K`, from 1 to the number of heads.
            heads: the drafter.
            target_states: the target's last hidden state.
            stream: of the noise with which drafts are sampled, see `kernels/philox.py`; None drafts greedily.
        """
        super().__init__(num_speculative_tokens)
        self.target_states, self._heads = target_states, heads
        self._chooser = DraftChooser(stream, subset=heads.target_ids)

    def allocate(self, state: DecodeState) -> None:
        """Allocates what the heads read of the target."""
        self._kept = TargetStates(state, self._heads.state_size, mask_state=None, mask_token=0, masks=0)
        rows = state.shape.max_bucket
        self._following = step_window(rows, window_width(rows), state.device)
        self._chooser.allocate(state, window_width(rows))
        self._state = state

    def propose(self, state: DecodeState, bucket: int) -> None:
        """Drafts K tokens for every live row of the bucket."""
        pairs, states, queries = self._kept.pairs(state, bucket)
        following = part_of(self._following, bucket, window_width(bucket))
        hidden = gathered(self._kept.values, queries, states)
        for step in range(self.num_speculative_tokens):
            logits = self._heads.logits(step, hidden)[:bucket]
            self._chooser.draft(state, step, logits, pairs.slot_of_row, following, shift=step - 1)

    def observe(self, state: DecodeState, window: Window, states: tuple[torch.Tensor, ...]) -> None:
        """Keeps the hidden states of the windows."""
        self._kept.keep(state, window, states)

    def observe_prompt(self, state: DecodeState, window: Window, states: tuple[torch.Tensor, ...]) -> None:
        """Keeps the last hidden state of the chunk."""
        self._kept.keep_last(window, side_by_side(states))

    def propose_cost(self, shape: RoundShape) -> StepCost:
        """K heads: their blocks, and their projections to the vocabulary."""
        config, dtype = self._heads.config, self._heads.dtype
        hidden, vocab = config.target_hidden_size, config.draft_vocab_size
        elements = (config.num_layers * hidden + vocab) * hidden
        head = StepCost(
            bytes_read=elements * dtype.itemsize,
            bytes_written=shape.rows * vocab * dtype.itemsize,
            operations=2 * elements * shape.rows,
            dtype=dtype,
        )
        return head.times(self.num_speculative_tokens)

    def admit(self, slot: int) -> None:
        """Forgets the slot's last request."""
        self._kept.admit(self._state, slot)

    def clear(self, slot: int) -> None:
        """Zeroes what was kept for the slot."""
        self._kept.clear(slot)
