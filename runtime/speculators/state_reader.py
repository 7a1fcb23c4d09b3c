"""What all drafters that read the target's hidden states and have a KV cache have in common."""

from __future__ import annotations

import torch

from ...graphs import DecodeState
from ...kernels.window import Window
from ...model_zoo.decoder import KvCache
from ...model_zoo.draft_head import StateReader
from ...profiling.floor import RoundShape, StepCost, forward_cost
from ..model_sizes import model_sizes
from .base import BaseSpeculator
from .drafting import DraftChooser, step_window, window_width
from .target_states import TargetStates


class StateSpeculator(BaseSpeculator):
    """Keeps a drafter's KV and the target's hidden states for it.

    What the drafter makes of its own output is never kept: the next round overwrites it.
    """

    _cache: KvCache
    _kept: TargetStates

    def __init__(
        self,
        num_speculative_tokens: int,
        head: StateReader,
        *,
        target_states: tuple[int, ...],
        stream: int | None = None,
    ) -> None:
        """Takes the drafter as it was loaded.

        Args:
            num_speculative_tokens: `K`, at least 1.
            head: the drafter.
            target_states: which hidden states it reads; see `BaseSpeculator.target_states`.
            stream: of the noise with which drafts are sampled, see `kernels/philox.py`; None drafts greedily.
        """
        super().__init__(num_speculative_tokens)
        self.target_states = target_states
        # The states of a round's window are read by the next one's `propose`.
        self.unseen = num_speculative_tokens + 1
        self._head = head
        self._chooser = DraftChooser(stream, subset=head.target_ids)

    @property
    def _masks(self) -> int:
        """Masked places of a row."""
        return 0

    def allocate(self, state: DecodeState) -> None:
        """Allocates the drafter's KV, if it has any, and what it reads of the target."""
        head = self._head
        self._cache = self._make_cache(state)
        self._kept = TargetStates(
            state, head.state_size, mask_state=head.mask_state, mask_token=head.mask_token, masks=self._masks
        )
        rows = state.shape.max_bucket
        self._following = step_window(rows, window_width(rows), state.device)
        self._chooser.allocate(state, window_width(rows))
        self._state = state

    def _make_cache(self, state: DecodeState) -> KvCache:
        return self._head.allocate_cache(state.shape.slots + 1, state.shape.context)

    def _forward_cost(self, shape: RoundShape, tokens: int, *, of_target: bool) -> StepCost:
        """A forward of so many tokens per row."""
        rows, dtype = shape.rows, self._head.dtype
        layers = forward_cost(
            model_sizes(self._head.layers),
            width=tokens * rows,
            rows=rows,
            window=tokens,
            context=shape.context - 1,
            dtype=dtype,
            head=False,
        )
        return layers + product_cost(self._head.config.matrix_elements(of_target=of_target), rows * tokens, dtype)

    def _head_cost(self, shape: RoundShape, drafts: int) -> StepCost:
        """The logits of so many drafts per row at once."""
        config, dtype, width = self._head.config, self._head.dtype, shape.rows * drafts
        product = product_cost(config.logits_per_token * self._head.layers.hidden_size, width, dtype)
        return product + StepCost(bytes_written=width * config.draft_vocab_size * dtype.itemsize)

    def observe(self, state: DecodeState, window: Window, states: tuple[torch.Tensor, ...]) -> None:
        """Keeps the hidden states of the windows."""
        self._kept.keep(state, window, states)

    def admit(self, slot: int) -> None:
        """Forgets the slot's last request."""
        self._kept.admit(self._state, slot)

    def clear(self, slot: int) -> None:
        """Zeroes the drafter's KV of the slot, and what was kept for it."""
        self._cache.clear(slot)
        self._kept.clear(slot)


def product_cost(elements: int, width: float, dtype: torch.dtype) -> StepCost:
    """Matrices of so many elements, applied to `width` tokens."""
    return StepCost(bytes_read=elements * dtype.itemsize, operations=2 * elements * width, dtype=dtype)
