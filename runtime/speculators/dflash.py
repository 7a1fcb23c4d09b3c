"""Drafters of blocks: one pass over an anchor and masks, whose context is made of the target's hidden states alone."""

from __future__ import annotations

from typing import ClassVar

import torch

from ...graphs import DecodeState
from ...kernels.pack_block import pack_block
from ...kernels.window import Window
from ...model_zoo.dflash.config import MOST_QUERIES
from ...model_zoo.dflash.model import DFlashModel
from ...profiling.floor import RoundShape, StepCost
from .drafting import empty_window, part_of, window_width
from .state_reader import StateSpeculator
from .target_states import side_by_side


class DFlashSpeculator(StateSpeculator):
    """Drafts all K tokens of a row in one pass over a block of queries.

    `propose` is one step from the projection of the hidden states to the drafts. It first makes keys and values, for
    all layers at once, of the target's hidden states of what was accepted; then the queries run over them and each
    other, at the positions from the anchor's on. Their own keys and values lie where the next round's context will.
    """

    name: ClassVar[str] = "dflash"
    confidence_reads_drafts = False

    _ancestors: torch.Tensor
    _block: Window
    _masked: torch.Tensor

    def __init__(
        self,
        num_speculative_tokens: int,
        head: DFlashModel,
        *,
        target_states: tuple[int, ...],
        stream: int | None = None,
    ) -> None:
        """Takes the drafter as it was loaded.

        Args:
            num_speculative_tokens: `K`, from 1 to what its block holds.
            head: the drafter.
            target_states: which hidden states it reads; see `BaseSpeculator.target_states`.
            stream: of the noise with which drafts are sampled, see `kernels/philox.py`; None drafts greedily.

        Raises:
            ValueError: more queries per row than one attention op tells apart.
        """
        super().__init__(num_speculative_tokens, head, target_states=target_states, stream=stream)
        self._drafter = head
        self._queries = head.config.queries(num_speculative_tokens)
        if self._queries > MOST_QUERIES:
            raise ValueError(f"{self._queries} queries per row; accepted: at most {MOST_QUERIES}")

    def allocate(self, state: DecodeState) -> None:
        """Allocates the drafter's KV, what it reads of the target, and its queries."""
        super().allocate(state)
        rows, size = state.shape.max_bucket, self._queries
        width = window_width(rows * size)
        ends = torch.arange(rows + 1, dtype=torch.int32, device=state.device) * size
        self._block = empty_window(rows, width, state.device)._replace(cu_tokens=ends)
        # All of a row's queries see each other; as a signed integer, 64 bits are -1.
        every = -1 if size == MOST_QUERIES else (1 << size) - 1
        self._ancestors = torch.full((width,), every, dtype=torch.int64, device=state.device)
        self._masked = torch.arange(width, device=state.device) % size != 0

    def observe_prompt(self, state: DecodeState, window: Window, states: tuple[torch.Tensor, ...]) -> None:
        """Writes the context's keys and values of the chunk. Nothing of it is left for the first round."""
        self._drafter.precompute_and_store_context_kv(window, side_by_side(states), None, self._cache)

    def propose(self, state: DecodeState, bucket: int) -> None:
        """Reads what was committed and drafts K tokens for every live row of the bucket."""
        context, states, _ = self._kept.pairs(state, bucket)
        self._drafter.precompute_and_store_context_kv(context, self._kept.values, states, self._cache)
        block = self._pack(state, bucket)
        hidden = self._drafter.read_block(block, self._masked[: block.tokens.shape[0]], self._cache)
        drafts = self.num_speculative_tokens
        self._draft(state, block, *self._drafter.read_out(hidden, bucket, self._queries, drafts))

    def _pack(self, state: DecodeState, bucket: int) -> Window:
        """The queries of a bucket's rows."""
        width = window_width(bucket * self._queries)
        block = part_of(self._block, bucket, width)._replace(ancestors=self._ancestors[:width])
        pack_block(
            state.tokens,
            state.length,
            state.finished,
            state.slot_of_row[:bucket],
            self._queries,
            self._drafter.mask_token,
            block.tokens,
            block.positions,
            block.slots,
            block.rows,
            block.base,
            block.slot_of_row,
        )
        return block

    def _draft(self, state: DecodeState, block: Window, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        """Chooses the drafts.

        Args:
            state: written.
            block: the queries.
            hidden: [K * B, H], after the final norm: draft by draft, all rows of one side by side.
            logits: [K * B, Vd].
        """
        bucket = block.slot_of_row.shape[0]
        following, slots = part_of(self._following, bucket, window_width(bucket)), state.slot_of_row[:bucket]
        for step in range(self.num_speculative_tokens):
            self._chooser.draft(state, step, logits[step * bucket : (step + 1) * bucket], slots, following)

    def propose_cost(self, shape: RoundShape) -> StepCost:
        """Context of one token per row, a pass over the queries, and the logits of K drafts."""
        # With the queries of a row goes one token of context, at least.
        forward = self._forward_cost(shape, self._queries, of_target=True)
        return forward + self._head_cost(shape, self.num_speculative_tokens)
