"""A smaller language model drafts: ordinary decoding."""

from __future__ import annotations

from typing import ClassVar

import torch

from ...graphs import DecodeState
from ...kernels.gather_rows import gathered
from ...kernels.pack_tail import pack_tail
from ...kernels.window import Window
from ...model_zoo.decoder import DecoderModel, KvCache
from ...profiling.floor import RoundShape, StepCost, forward_cost
from ..model_sizes import model_sizes
from ..vocab_mapping import VocabMapping
from .drafting import DraftChooser, empty_window, part_of, step_window, window_width
from .stepwise import StepwiseSpeculator

_TAIL = 2
# With all K drafts accepted the drafter has not seen two tokens: the last draft, which nothing was drafted after, and
# the target's own after it. With fewer accepted it lacks the target's own only, and writes the one before once more.


class DraftModelSpeculator(StepwiseSpeculator):
    """Drafts with a decoder that has a KV cache of its own over the engine's slots.

    A round's first forward takes the last two committed tokens of every row, which catches up whatever was accepted,
    and K - 1 more take one drafted token per row. KV of drafts that were rejected is overwritten by the next round
    before attention reads it, as it is for the target. Rows near their limit draft fewer tokens, on the device.

    With a `VocabMapping` the drafter has another vocabulary (token-level intersection, see `kernels/vocabulary.py`):
    its context is the committed tokens in its own ids, and its drafts are limited to the tokens that both have.
    """

    name: ClassVar[str] = "draft_model"
    unseen = _TAIL - 1

    _cache: KvCache
    _tail: Window
    _step: Window

    def __init__(
        self,
        num_speculative_tokens: int,
        model: DecoderModel,
        *,
        stream: int | None = None,
        mapping: VocabMapping | None = None,
    ) -> None:
        """Takes the drafter as it was loaded.

        Args:
            num_speculative_tokens: `K`, at least 1.
            model: the drafter.
            stream: of the noise with which drafts are sampled, see `kernels/philox.py`; None drafts greedily.
            mapping: between the target's vocabulary and the drafter's; None where they are the same.
        """
        super().__init__(num_speculative_tokens)
        self._model, self._tail_size = model, _TAIL
        self._draft_ids = None if mapping is None else mapping.draft_ids.to(model.device)
        self._chooser = DraftChooser(
            stream,
            allowed=None if mapping is None else mapping.allowed.to(model.device),
            target_ids=None if mapping is None else mapping.target_ids.to(model.device),
        )

    def expect_other_drafts(self) -> None:
        """Catches up on K + 1 tokens in each round: as many may be accepted without its having drafted any.

        What it drafted in vain stands in its cache at their positions.
        """
        self._tail_size = max(_TAIL, self.num_speculative_tokens + 1)
        self.unseen = self._tail_size - 1

    def allocate(self, state: DecodeState) -> None:
        """Allocates the drafter's KV, [L, R1, Hkv, S, D] of it twice, and windows for the largest bucket."""
        rows, device = state.shape.max_bucket, state.device
        width = window_width(rows)
        self._cache = self._model.allocate_cache(state.shape.slots + 1, state.shape.context)
        self._tail = empty_window(rows, window_width(rows * self._tail_size), device)
        self._step = step_window(rows, width, device)
        self._last = torch.zeros(width, dtype=torch.int32, device=device)
        self._chooser.allocate(state, width)

    def begin(self, state: DecodeState, bucket: int) -> torch.Tensor:
        """Takes the last committed tokens of every row."""
        slot_of_row, size = state.slot_of_row[:bucket], self._tail_size
        tail = part_of(self._tail, bucket, window_width(bucket * size))._replace(slot_of_row=slot_of_row)
        last = self._last[: window_width(bucket)]
        pack_tail(
            state.tokens,
            state.length,
            state.finished,
            slot_of_row,
            self._draft_ids,
            size,
            tail.tokens,
            tail.positions,
            tail.slots,
            tail.rows,
            tail.cu_tokens,
            tail.base,
            last,
        )
        return gathered(self._model.forward(tail, self._cache), last)

    def draft(self, state: DecodeState, bucket: int, step: int, hidden: torch.Tensor) -> torch.Tensor:
        """Takes the draft before, past the first one, and drafts the next."""
        following = part_of(self._step, bucket, window_width(bucket))
        if step > 0:
            hidden = self._model.forward(following, self._cache)
        logits = self._model.logits(hidden)[:bucket]
        self._chooser.draft(state, step, logits, state.slot_of_row[:bucket], following)
        return hidden

    def prefill(self, state: DecodeState, window: Window, hidden: torch.Tensor) -> None:
        """Writes the drafter's KV of the chunk."""
        if self._draft_ids is not None:
            window = window._replace(tokens=gathered(self._draft_ids[:, None], window.tokens).flatten())
        self._model.forward(window, self._cache)

    def clear(self, slot: int) -> None:
        """Zeroes the drafter's KV of the slot."""
        self._cache.clear(slot)

    def propose_cost(self, shape: RoundShape) -> StepCost:
        """One forward of the tail of every row and K - 1 of one token, with the logits of one token per row each."""
        sizes, rows, tail = model_sizes(self._model.config), shape.rows, self._tail_size
        dtype = self._model.dtype
        cost = forward_cost(
            sizes,
            width=tail * rows,
            rows=rows,
            window=tail,
            context=max(0, shape.context + 1 - tail),
            dtype=dtype,
            head=False,
        )
        head = StepCost(
            bytes_read=sizes.head * dtype.itemsize,
            bytes_written=rows * sizes.vocab_size * dtype.itemsize,
            operations=2 * rows * sizes.head,
            dtype=dtype,
        )
        step = forward_cost(sizes, width=rows, rows=rows, window=1, context=shape.context, dtype=dtype, head=False)
        depth = self.num_speculative_tokens
        return cost + step.times(depth - 1) + head.times(depth)
