"""A smaller language model drafts: ordinary decoding, all K steps in one captured step."""

from __future__ import annotations

from typing import ClassVar

import torch

from ...graphs import DecodeState
from ...graphs.buckets import MIN_WIDTH, power_of_two_at_least
from ...kernels.advance_draft import advance_draft
from ...kernels.draft_argmax import draft_argmax
from ...kernels.draft_distribution import draft_distribution
from ...kernels.pack_tail import pack_tail
from ...kernels.sample_target import sample_target
from ...kernels.window import Window
from ...model_zoo.decoder import DecoderModel, KvCache
from ...profiling.floor import RoundShape, StepCost, forward_cost
from ..model_sizes import model_sizes
from ..vocab_mapping import VocabMapping
from .base import BaseSpeculator

_TAIL = 2
# With all K drafts accepted the drafter has not seen two tokens: the last draft, which nothing was drafted after, and
# the target's own after it. With fewer accepted it lacks the target's own only, and writes the one before once more.


class DraftModelSpeculator(BaseSpeculator):
    """Drafts with a decoder that has a KV cache of its own over the engine's slots.

    A round's first forward takes the last two committed tokens of every row, which catches up whatever was accepted,
    and K - 1 more take one drafted token per row. KV of drafts that were rejected is overwritten by the next round
    before attention reads it, as it is for the target. Rows near their limit draft fewer tokens, on the device.

    With a `VocabMapping` the drafter has another vocabulary (token-level intersection, see `kernels/vocabulary.py`):
    its context is the committed tokens in its own ids, and its drafts are limited to the tokens that both have.
    """

    name: ClassVar[str] = "draft_model"
    unseen: ClassVar[int] = _TAIL - 1

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
        self._model, self._stream = model, stream
        self._draft_ids = None if mapping is None else mapping.draft_ids.to(model.device)
        self._target_ids = None if mapping is None else mapping.target_ids.to(model.device)
        self._allowed = None if mapping is None else mapping.allowed.to(model.device)

    def allocate(self, state: DecodeState) -> None:
        """Allocates the drafter's KV, [L, R1, Hkv, S, D] of it twice, and windows for the largest bucket."""
        rows, device = state.shape.max_bucket, state.device
        self._cache = self._model.allocate_cache(state.shape.slots + 1, state.shape.context)
        self._tail = _empty_window(rows, _width(rows * _TAIL), device)
        width = _width(rows)
        self._step = _empty_window(rows, width, device)._replace(
            # One token per row, row after row, whichever rows are live.
            cu_tokens=torch.arange(rows + 1, dtype=torch.int32, device=device)
        )
        self._last = torch.zeros(width, dtype=torch.int32, device=device)
        self._rows = torch.arange(width, dtype=torch.int32, device=device)
        self._chosen = torch.zeros(width, dtype=torch.int32, device=device)
        self._confidence = torch.zeros(width, dtype=torch.float32, device=device)
        self._log_normalizer = torch.zeros(width, dtype=torch.float32, device=device)
        self._threshold = torch.zeros(width, dtype=torch.float32, device=device)
        self._failed = torch.zeros(width, dtype=torch.bool, device=device)

    def propose(self, state: DecodeState, bucket: int) -> None:
        """Catches up and drafts K tokens for every live row of the bucket."""
        tail = _part(self._tail, bucket, _width(bucket * _TAIL))._replace(slot_of_row=state.slot_of_row[:bucket])
        step_window = _part(self._step, bucket, _width(bucket))
        last = self._last[: _width(bucket)]
        pack_tail(
            state.tokens,
            state.length,
            state.finished,
            tail.slot_of_row,
            self._draft_ids,
            _TAIL,
            tail.tokens,
            tail.positions,
            tail.slots,
            tail.rows,
            tail.cu_tokens,
            tail.base,
            last,
        )
        hidden = self._model.forward(tail, self._cache).index_select(0, last)
        positions = tail.positions.index_select(0, last)
        self._draft(state, bucket, 0, hidden, positions, step_window)
        for step in range(1, self.num_speculative_tokens):
            hidden = self._model.forward(step_window, self._cache)
            self._draft(state, bucket, step, hidden, step_window.positions, step_window)

    def prefill(self, state: DecodeState, window: Window, hidden: torch.Tensor) -> None:
        """Writes the drafter's KV of the chunk."""
        if self._draft_ids is not None:
            window = window._replace(tokens=self._draft_ids.index_select(0, window.tokens))
        self._model.forward(window, self._cache)

    def clear(self, slot: int) -> None:
        """Zeroes the drafter's KV of the slot."""
        self._cache.clear(slot)

    def propose_cost(self, shape: RoundShape) -> StepCost:
        """One forward of two tokens per row and K - 1 of one, with the logits of one token per row each."""
        sizes, rows = model_sizes(self._model.config), shape.rows
        dtype = self._model.dtype
        cost = forward_cost(
            sizes, width=_TAIL * rows, rows=rows, window=_TAIL, context=shape.context - 1, dtype=dtype, head=False
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

    def _draft(
        self,
        state: DecodeState,
        bucket: int,
        step: int,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        following: Window,
    ) -> None:
        """Draft `step` of every row, from the `hidden` of the token before it at `positions`; packs `following`."""
        width, slot_of_row = hidden.shape[0], state.slot_of_row[:bucket]
        logits = self._model.logits(hidden)[:bucket]
        draft_argmax(logits, self._allowed, self._chosen[:bucket], self._confidence[:bucket], self._failed[:bucket])
        if self._stream is not None:
            self._sample(state, bucket, step, logits, positions[:bucket])
        advance_draft(
            self._chosen[:width],
            self._confidence[:width],
            self._failed[:width],
            state.length,
            state.limit,
            state.finished,
            slot_of_row,
            self._target_ids,
            step,
            state.draft_tokens,
            state.confidence,
            state.draft_count,
            following.tokens,
            following.positions,
            following.slots,
            following.rows,
            following.base,
            following.slot_of_row,
        )

    def _sample(
        self, state: DecodeState, bucket: int, step: int, logits: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Replaces the likeliest token by a sample, and keeps the distribution where verification asks for it."""
        assert self._stream is not None
        slot_of_row = state.slot_of_row[:bucket]
        chosen, failed = self._chosen[:bucket], self._failed[:bucket]
        log_normalizer, threshold = self._log_normalizer[:bucket], self._threshold[:bucket]
        sample_target(
            logits,
            self._rows[:bucket],
            positions,
            self._step.cu_tokens[: bucket + 1],
            slot_of_row,
            state.temperature,
            state.top_k,
            state.top_p,
            state.min_p,
            state.seed,
            chosen,
            log_normalizer,
            threshold,
            failed,
            self._stream,
        )
        distributions = state.draft_distributions
        if distributions is not None:
            draft_distribution(
                logits,
                chosen,
                log_normalizer,
                threshold,
                state.temperature,
                state.finished,
                slot_of_row,
                step,
                distributions,
            )


def _width(tokens: int) -> int:
    """The width of a window that holds `tokens`."""
    return power_of_two_at_least(max(MIN_WIDTH, tokens))


def _empty_window(rows: int, width: int, device: torch.device) -> Window:
    def zeros(size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, device=device)

    return Window(
        tokens=zeros(width),
        positions=zeros(width),
        slots=zeros(width),
        rows=zeros(width),
        cu_tokens=zeros(rows + 1),
        base=zeros(rows),
        slot_of_row=zeros(rows),
    )


def _part(window: Window, rows: int, width: int) -> Window:
    """The window of a smaller bucket in the tensors of the largest."""
    return Window(
        tokens=window.tokens[:width],
        positions=window.positions[:width],
        slots=window.slots[:width],
        rows=window.rows[:width],
        cu_tokens=window.cu_tokens[: rows + 1],
        base=window.base[:rows],
        slot_of_row=window.slot_of_row[:rows],
    )
