"""The target's hidden states that a drafter has not read yet, and which tokens they belong to."""

from __future__ import annotations

import torch

from ...graphs import DecodeState
from ...kernels.keep_prompt_state import keep_prompt_state
from ...kernels.keep_states import keep_states
from ...kernels.pack_unseen import pack_unseen
from ...kernels.tokens_after import tokens_after
from ...kernels.window import Window
from .drafting import empty_window, part_of, window_width


class TargetStates:
    """Static buffers: what verify saw, in the order of its packed windows, and the last of each slot's prompt.

    A drafter pairs the hidden state at position j with token j + 1. After a round the states of a row's window up to
    its last accepted draft are those that it has not read, and `pairs` packs them with their tokens. The last token of
    a prompt is never prefilled, so the pair of the last prefilled token is read with the first round's.
    """

    def __init__(self, state: DecodeState, size: int, *, mask_state: torch.Tensor | None, mask_token: int, masks: int):
        """Allocates for an engine.

        Args:
            state: its decode state.
            size: columns of the hidden states side by side.
            mask_state: [size], what masked places read, for drafters that draft in parallel.
            mask_token: their token.
            masks: the most of them in a row.
        """
        shape, device = state.shape, state.device
        slots = shape.slots + 1
        self._after_verify = shape.max_width
        """Where the states of prompts begin: one per slot."""
        self._blank = shape.max_width + slots
        """What masked places and padding read."""
        self.values = torch.zeros((self._blank + 1, size), dtype=state.logits.dtype, device=device)
        if mask_state is not None:
            self.values[self._blank] = mask_state
        self._mask_token, self._masks = mask_token, masks
        self._seen = torch.zeros(slots, dtype=torch.int32, device=device)
        self._start = torch.zeros(slots, dtype=torch.int32, device=device)
        rows = shape.max_bucket
        # A round leaves at most K + 1 pairs of a row.
        width = window_width(rows * (shape.num_drafts + 1 + masks))
        self._window = empty_window(rows, width, device)
        self._states = torch.zeros(width, dtype=torch.int32, device=device)
        self._queries = torch.zeros(window_width(rows * (masks + 1)), dtype=torch.int32, device=device)

    def keep(self, state: DecodeState, window: Window, states: tuple[torch.Tensor, ...]) -> None:
        """Keeps what verify saw of the live rows; nothing in a round that the engine drops.

        Args:
            state: of the engine.
            window: the rows' windows.
            states: [W, hidden] each, written side by side where they are kept.
        """
        column = 0
        for values in states:
            keep_states(
                values,
                window.rows,
                window.base,
                window.cu_tokens,
                window.slot_of_row,
                state.running,
                column,
                self.values,
                self._seen,
                self._start,
            )
            column += values.shape[1]

    def keep_last(self, window: Window, values: torch.Tensor) -> None:
        """Keeps the last hidden state of a prompt's chunk, [W, size]: it is read once more, in the first round."""
        where = (window.base, window.cu_tokens, window.slot_of_row)
        keep_prompt_state(values, *where, self._after_verify, self.values, self._seen, self._start)

    def admit(self, state: DecodeState, slot: int) -> None:
        """Forgets what was kept of a slot's last request."""
        self._seen[slot].copy_(state.length[slot] - 1)

    def clear(self, slot: int) -> None:
        """Zeroes what was kept of a slot's prompt, since it may not be finite."""
        self.values[self._after_verify + slot].zero_()

    def successors(self, state: DecodeState, window: Window) -> Window:
        """A prompt's chunk as the drafter reads it: each position has the token after it."""
        tokens = torch.empty_like(window.tokens)
        tokens_after(state.tokens, state.length, None, window.slots, window.positions, 1, tokens)
        return window._replace(tokens=tokens)

    def pairs(self, state: DecodeState, bucket: int) -> tuple[Window, torch.Tensor, torch.Tensor]:
        """What the rows of a bucket have not read.

        Returns:
            The window of tokens; int32 [W], the row of `values` that each of them reads; and int32 [N], where the
            places are packed from which drafts are made: entry `k * bucket + b` for row b's draft k, N at least
            `bucket * (masks + 1)`.
        """
        width = window_width(bucket * (state.shape.num_drafts + 1 + self._masks))
        window = part_of(self._window, bucket, width)
        states, queries = self._states[:width], self._queries[: window_width(bucket * (self._masks + 1))]
        pack_unseen(
            state.tokens,
            state.length,
            state.limit,
            state.finished,
            state.slot_of_row[:bucket],
            self._seen,
            self._start,
            self._masks,
            self._mask_token,
            self._blank,
            0,
            window.tokens,
            window.positions,
            window.slots,
            window.rows,
            window.cu_tokens,
            window.base,
            window.slot_of_row,
            states,
            queries,
        )
        return window, states, queries

    def slot_of_row(self, bucket: int) -> torch.Tensor:
        """int32 [B]: the slots of the rows that `pairs` packed anything for, the reserved one for the others."""
        return self._window.slot_of_row[:bucket]


def side_by_side(states: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """[W, n * hidden]; a single one is taken as it is."""
    return states[0] if len(states) == 1 else torch.cat(states, 1)
