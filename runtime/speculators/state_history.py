"""The target's last hidden states of every slot, for drafters that read some of them again in the next round."""

from __future__ import annotations

import torch

from ...graphs import DecodeState
from ...graphs.buckets import power_of_two_at_least
from ...kernels.keep_ring import keep_ring
from ...kernels.pack_unseen import pack_unseen
from ...kernels.window import Window
from .drafting import empty_window, part_of, window_width


class StateHistory:
    """A ring of hidden states per slot: that at position j lies at place j modulo the ring's size.

    Module i of a chain of prediction modules reads tokens up to i + 1 after a position. So in each round it makes the
    last i of its positions from drafts, and has to make them anew from what was accepted, with the hidden states that
    the target had there. Rejected positions need no undo: the next round's window overwrites them, and the ring is so
    large that it overwrites nothing else that is read.
    """

    def __init__(self, state: DecodeState, size: int, *, modules: int) -> None:
        """Allocates for an engine.

        Args:
            state: its decode state.
            size: columns of the hidden states.
            modules: how many modules are applied one after another.
        """
        shape, device = state.shape, state.device
        slots = shape.slots + 1
        self._again = modules - 1
        """How many positions before a round's window are read again."""
        self._ring = power_of_two_at_least(shape.num_drafts + modules)
        self._blank = slots * self._ring
        """What padding reads, and what nothing is written to."""
        self.values = torch.zeros((self._blank + 1, size), dtype=state.logits.dtype, device=device)
        self._seen = torch.zeros(slots, dtype=torch.int32, device=device)
        # Where the states begin, which follows from their positions in a ring.
        self._start = torch.zeros(slots, dtype=torch.int32, device=device)
        rows = shape.max_bucket
        width = window_width(rows * self.pairs_per_row(shape.num_drafts))
        self._window = empty_window(rows, width, device)
        self._states = torch.zeros(width, dtype=torch.int32, device=device)
        self._queries = torch.zeros(window_width(rows), dtype=torch.int32, device=device)

    def pairs_per_row(self, drafts: int) -> int:
        """The most positions of a row that a round reads."""
        return drafts + 1 + self._again

    def keep(self, state: DecodeState, window: Window, values: torch.Tensor) -> None:
        """Keeps what verify saw of the live rows, [W, size]; nothing in a round that the engine drops."""
        self._keep(window, values, state.running)

    def keep_last(self, window: Window, values: torch.Tensor) -> None:
        """Keeps the last hidden states of a prompt's chunk, [W, size]: they are read again in the first round."""
        self._keep(window, values, None)

    def _keep(self, window: Window, values: torch.Tensor, running: torch.Tensor | None) -> None:
        keep_ring(
            values,
            window.positions,
            window.slots,
            window.rows,
            window.base,
            window.cu_tokens,
            window.slot_of_row,
            running,
            self._ring,
            self._again,
            self.values,
            self._seen,
        )

    def admit(self, state: DecodeState, slot: int) -> None:
        """Forgets what was kept of a slot's last request."""
        self._seen[slot].copy_(state.length[slot] - 1)

    def clear(self, slot: int) -> None:
        """Zeroes what was kept of a slot, since it may not be finite."""
        self.values[slot * self._ring : (slot + 1) * self._ring].zero_()

    def pairs(self, state: DecodeState, bucket: int) -> tuple[Window, torch.Tensor, torch.Tensor]:
        """What the rows of a bucket have to read: the positions that are new, and before them those read again.

        Returns:
            The window of tokens, each the one after its position; int32 [W], the row of `values` that each of them
            reads; and int32 [N], N at least `bucket`, where the last place of each row is packed.
        """
        window = part_of(self._window, bucket, window_width(bucket * self.pairs_per_row(state.shape.num_drafts)))
        states, queries = self._states[: window.tokens.shape[0]], self._queries[: window_width(bucket)]
        pack_unseen(
            state.tokens,
            state.length,
            state.limit,
            state.finished,
            state.slot_of_row[:bucket],
            self._seen,
            self._start,
            0,
            0,
            self._blank,
            self._ring,
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
