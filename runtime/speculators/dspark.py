"""DSpark: a block of one pass, whose drafts are then chosen one after another, each by the one before it."""

from __future__ import annotations

from typing import ClassVar

import torch

from ...graphs import DecodeState
from ...kernels.gather_rows import gather_rows
from ...kernels.window import Window
from ...model_zoo.dspark.model import DSparkModel
from ...profiling.floor import RoundShape, StepCost
from .dflash import DFlashSpeculator
from .drafting import part_of, window_width
from .state_reader import product_cost


class DSparkSpeculator(DFlashSpeculator):
    """Drafts as `DFlashSpeculator`, with a Markov head that corrects each draft's logits by the draft before it.

    All of it is still one step: the corrections are unrolled, and the confidence is computed on the way.
    """

    name: ClassVar[str] = "dspark"
    confidence_reads_drafts = True

    draft_confidence: torch.Tensor | None = None
    """float32 [rows, K], written by `propose`: for row b of the bucket (of `state.slot_of_row[b]`) and draft k the
    probability, by the confidence head, that the draft is accepted if those before it are; 0 where there is no draft.
    Entry k depends on drafts 0 to k - 1 and not on draft k. `rows` is the largest bucket; rows past the bucket that ran
    keep what they had. `state.confidence` has the same by slot. None without a confidence head, where
    `state.confidence` is the drafter's largest probability, as with other methods."""

    _memory: torch.Tensor

    def __init__(
        self,
        num_speculative_tokens: int,
        head: DSparkModel,
        *,
        target_states: tuple[int, ...],
        stream: int | None = None,
        competing: int | None = None,
    ) -> None:
        """Takes the drafter as it was loaded.

        Args:
            num_speculative_tokens: see `DFlashSpeculator`.
            head: the drafter.
            target_states: see `DFlashSpeculator`.
            stream: see `DFlashSpeculator`.
            competing: only so many of the largest logits before correction compete (`dspark_draft_topk`); None for all.

        Raises:
            ValueError: see `DFlashSpeculator`.
        """
        super().__init__(num_speculative_tokens, head, target_states=target_states, stream=stream)
        self._corrector, self._competing = head, competing or 0

    def allocate(self, state: DecodeState) -> None:
        """Also allocates the confidence, and what a recurrent head begins a block with."""
        super().allocate(state)
        rows, rank = state.shape.max_bucket, self._corrector.config.markov_rank
        self._memory = torch.zeros((rows, rank), dtype=self._corrector.dtype, device=state.device)
        if self._corrector.has_confidence:
            size = (rows, self.num_speculative_tokens)
            self.draft_confidence = torch.zeros(size, dtype=torch.float32, device=state.device)

    def _draft(self, state: DecodeState, block: Window, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        """Chooses the drafts from left to right; see `DFlashSpeculator._draft`."""
        bucket = block.slot_of_row.shape[0]
        following, slots = part_of(self._following, bucket, window_width(bucket)), state.slot_of_row[:bucket]
        previous, memory = block.tokens[: bucket * self._queries : self._queries], self._memory[:bucket]
        for step in range(self.num_speculative_tokens):
            rows = slice(step * bucket, (step + 1) * bucket)
            corrected, memory, confidence = self._corrector.correct(
                previous, hidden[rows], logits[rows], memory, self._competing
            )
            self._chooser.draft(state, step, corrected, slots, following, confidence=confidence)
            previous = self._chooser.chosen(bucket)
        if self.draft_confidence is not None:
            gather_rows(state.confidence, slots, None, self.draft_confidence[:bucket])

    def propose_cost(self, shape: RoundShape) -> StepCost:
        """That of the block, and the corrections."""
        config, dtype = self._corrector.config, self._corrector.dtype
        elements = config.markov_elements
        if self._competing:
            elements -= (config.draft_vocab_size - self._competing) * config.markov_rank
        return super().propose_cost(shape) + product_cost(elements, shape.rows, dtype).times(
            self.num_speculative_tokens
        )
