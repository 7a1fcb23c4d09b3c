"""From a drafter's logits to drafts: the likeliest token, or a sample whose distribution is kept."""

from __future__ import annotations

import torch

from ...graphs import DecodeState
from ...graphs.buckets import MIN_WIDTH, power_of_two_at_least
from ...kernels.advance_draft import advance_draft
from ...kernels.draft_argmax import draft_argmax
from ...kernels.draft_distribution import draft_distribution
from ...kernels.draft_positions import draft_positions
from ...kernels.sample_target import sample_target
from ...kernels.widen_logits import widen_logits, widening_places
from ...kernels.window import Window


class DraftChooser:
    """Chooses one draft of every row, and makes it the window from which the next one is drafted."""

    _chosen: torch.Tensor
    _confidence: torch.Tensor
    _failed: torch.Tensor
    _log_normalizer: torch.Tensor
    _threshold: torch.Tensor
    _rows: torch.Tensor
    _ends: torch.Tensor
    _positions: torch.Tensor
    _places: torch.Tensor | None

    def __init__(
        self,
        stream: int | None,
        *,
        allowed: torch.Tensor | None = None,
        target_ids: torch.Tensor | None = None,
        subset: torch.Tensor | None = None,
    ) -> None:
        """Takes what holds for every draft.

        Args:
            stream: of the noise with which drafts are sampled, see `kernels/philox.py`; None drafts greedily.
            allowed: bool [Vd], the tokens that the target has too, where the drafter has another vocabulary.
            target_ids: int32 [Vd], the target's id of each token, where the drafter has another vocabulary.
            subset: int32 [Vd], the target's id of each token, where the drafter knows a part of the target's
                vocabulary and reads the target's ids.
        """
        self._stream, self._allowed, self._target_ids, self._subset = stream, allowed, target_ids, subset

    def allocate(self, state: DecodeState, width: int) -> None:
        """Allocates what one draft of the largest bucket needs; `width` is that of its window."""
        rows, device = state.shape.max_bucket, state.device

        def zeros(kind: torch.dtype) -> torch.Tensor:
            return torch.zeros(width, dtype=kind, device=device)

        self._chosen, self._confidence = zeros(torch.int32), zeros(torch.float32)
        self._failed = zeros(torch.bool)
        self._log_normalizer, self._threshold = zeros(torch.float32), zeros(torch.float32)
        self._rows = torch.arange(rows, dtype=torch.int32, device=device)
        self._ends = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._positions = torch.zeros(state.shape.num_drafts * rows, dtype=torch.int32, device=device)
        self._places = None
        if self._stream is not None and self._subset is not None:
            self._places = widening_places(self._subset, state.shape.vocab_size)

    def draft(
        self,
        state: DecodeState,
        step: int,
        logits: torch.Tensor,
        slot_of_row: torch.Tensor,
        following: Window,
        *,
        margin: int = 0,
        shift: int | None = None,
        confidence: torch.Tensor | None = None,
    ) -> None:
        """Draft `step` of every row, and the window of the next one.

        Args:
            state: `draft_tokens`, `draft_count`, `confidence` and, where it keeps them, the draft's distribution.
            step: which draft, 0 to K - 1.
            logits: [B, Vd].
            slot_of_row: int32 [B].
            following: written, one token per row; of width W, at least B.
            margin: drafts that are made past the row's room.
            shift: where the next window's token stands, counted from `length`; `step`, where a language model keeps it,
                unless it is given.
            confidence: float32 [B], in place of the drafter's largest probability.
        """
        bucket, width = slot_of_row.shape[0], following.tokens.shape[0]
        chosen, failed = self._chosen[:bucket], self._failed[:bucket]
        ids = self._subset
        if self._places is not None:
            # Samples and their distribution are in the target's vocabulary, as is the noise under coupling.
            whole = logits.new_empty((bucket, state.shape.vocab_size))
            widen_logits(logits, self._places, whole)
            logits, ids = whole, None
        draft_argmax(logits, self._allowed, ids, chosen, self._confidence[:bucket], failed)
        if self._stream is not None:
            self._sample(state, step, logits, slot_of_row, self._stream)
        if confidence is not None:
            self._confidence[:bucket].copy_(confidence)
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
            step if shift is None else shift,
            margin,
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

    def chosen(self, bucket: int) -> torch.Tensor:
        """int32 [B]: every row's last draft, in the ids that the drafter reads; the next call of `draft` overwrites it.

        It is there whether or not the row had room for it; the first token that it knows where the logits failed.
        """
        return self._chosen[:bucket]

    def _sample(
        self, state: DecodeState, step: int, logits: torch.Tensor, slot_of_row: torch.Tensor, stream: int
    ) -> None:
        """Replaces the likeliest token by a sample, and keeps the distribution where verification asks for it."""
        bucket = slot_of_row.shape[0]
        chosen, failed = self._chosen[:bucket], self._failed[:bucket]
        log_normalizer, threshold = self._log_normalizer[:bucket], self._threshold[:bucket]
        positions = self._positions[: state.shape.num_drafts * bucket].view(state.shape.num_drafts, bucket)
        if step == 0:
            # Of all drafts at once: the first is made before any other.
            draft_positions(state.length, slot_of_row, positions)
        sample_target(
            logits,
            self._rows[:bucket],
            # Of the token before the draft, as the target's noise is keyed.
            positions[step],
            self._ends[: bucket + 1],
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
            stream,
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


def window_width(tokens: int) -> int:
    """The width of a window that holds `tokens`."""
    return power_of_two_at_least(max(MIN_WIDTH, tokens))


def empty_window(rows: int, width: int, device: torch.device) -> Window:
    """A window of padding, in tensors of its own."""

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


def step_window(rows: int, width: int, device: torch.device) -> Window:
    """A window of one token per row, row after row, whichever rows are live."""
    ends = torch.arange(rows + 1, dtype=torch.int32, device=device)
    return empty_window(rows, width, device)._replace(cu_tokens=ends)


def part_of(window: Window, rows: int, width: int) -> Window:
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
