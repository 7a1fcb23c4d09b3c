"""The target's first layers draft, with its own norm and head, and verification begins where they left off."""

from __future__ import annotations

from typing import ClassVar

import torch

from ...graphs import DecodeState
from ...kernels.gather_rows import gathered
from ...kernels.gather_window import gather_window
from ...kernels.pack_tail import pack_tail
from ...kernels.put_rows import put_rows
from ...kernels.window import Window
from ...model_zoo.decoder import DecoderModel, KvCache
from ...profiling.floor import RoundShape, StepCost, forward_cost
from ..model_sizes import model_sizes
from .drafting import DraftChooser, empty_window, part_of, step_window, window_width
from .stepwise import StepwiseSpeculator


class LayerSkipSpeculator(StepwiseSpeculator):
    """Early exit (LayerSkip, Elhoushi et al. 2024): the target without its upper layers is the drafter.

    The lower layers run once for the anchor and once for each draft, K + 1 times in all, and write their part of the
    target's own KV cache. Their outputs are kept, so that verification runs the upper layers alone, over all of a
    window at once. KV and outputs of rejected drafts are overwritten by the next round before anything reads them.
    """

    name: ClassVar[str] = "layerskip"

    _anchor: Window
    _step: Window
    _last: torch.Tensor
    _kept: torch.Tensor

    def __init__(
        self,
        num_speculative_tokens: int,
        target: DecoderModel,
        cache: KvCache,
        *,
        exit_layer: int,
        stream: int | None = None,
        width: int | None = None,
    ) -> None:
        """Takes the target with its cache.

        Args:
            num_speculative_tokens: `K`, at least 1.
            target: the model that is verified with.
            cache: the target's.
            exit_layer: how many layers draft, from 1 to all.
            stream: of the noise with which drafts are sampled, see `kernels/philox.py`; None drafts greedily.
            width: the one width of all passes, where the engine is to run at one; None: the narrowest that will do.
        """
        super().__init__(num_speculative_tokens)
        self.first_layer = exit_layer
        self._target, self._cache, self._fixed_width = target, cache, width
        self._chooser = DraftChooser(stream)

    def allocate(self, state: DecodeState) -> None:
        """Allocates the lower layers' outputs, [R1, K + 1, hidden], and windows for the largest bucket."""
        rows, device = state.shape.max_bucket, state.device
        width = self._width(rows)
        self._anchor = empty_window(rows, width, device)
        self._step = step_window(rows, width, device)
        self._last = torch.zeros(window_width(rows), dtype=torch.int32, device=device)
        self._kept = torch.zeros(
            (state.shape.slots + 1, self.num_speculative_tokens + 1, self._target.config.hidden_size),
            dtype=self._target.dtype,
            device=device,
        )
        self._chooser.allocate(state, width)

    def begin(self, state: DecodeState, bucket: int) -> torch.Tensor:
        """Runs the lower layers for every anchor."""
        slot_of_row, width, narrow = state.slot_of_row[:bucket], self._width(bucket), window_width(bucket)
        window = part_of(self._anchor, bucket, width)._replace(slot_of_row=slot_of_row)
        last = self._last[:narrow]
        pack_tail(
            state.tokens,
            state.length,
            state.finished,
            slot_of_row,
            None,
            1,
            window.tokens,
            window.positions,
            window.slots,
            window.rows,
            window.cu_tokens,
            window.base,
            last,
        )
        hidden = gathered(self._run_lower_layers(window), last)
        put_rows(hidden, slot_of_row, 0, self._kept)
        return hidden

    def draft(self, state: DecodeState, bucket: int, step: int, hidden: torch.Tensor) -> torch.Tensor:
        """Drafts from the lower layers' last output, and runs them for the draft: it is verified too."""
        slot_of_row, following = state.slot_of_row[:bucket], part_of(self._step, bucket, self._width(bucket))
        # The chooser stops where no draft can follow. The lower layers go one token further. The one draft too many
        # that the row so counts is cut off by the budget.
        logits = self._target.logits(self._target.final_norm(hidden))[:bucket]
        self._chooser.draft(state, step, logits, slot_of_row, following, margin=1)
        hidden = self._run_lower_layers(following)[: window_width(bucket)]
        put_rows(hidden, slot_of_row, step + 1, self._kept)
        return hidden

    def verify_hidden(self, state: DecodeState, window: Window) -> torch.Tensor:
        """The lower layers' outputs of the windows, [W, hidden]."""
        hidden = self._kept.new_empty((window.tokens.shape[0], self._kept.shape[2]))
        gather_window(self._kept, state.length, window.slots, window.positions, hidden)
        return hidden

    def clear(self, slot: int) -> None:
        """Zeroes what is kept of the slot."""
        self._kept[slot].zero_()

    def propose_cost(self, shape: RoundShape) -> StepCost:
        """K + 1 passes of the lower layers over one token per row, and K of the head."""
        sizes, rows, dtype = model_sizes(self._target.config), shape.rows, self._target.dtype
        step = forward_cost(
            sizes,
            width=rows,
            rows=rows,
            window=1,
            context=shape.context,
            dtype=dtype,
            kv_dtype=shape.kv_dtype,
            head=False,
            layers=(0, self.first_layer),
        )
        head = StepCost(
            bytes_read=sizes.head * dtype.itemsize,
            bytes_written=rows * sizes.vocab_size * dtype.itemsize,
            operations=2 * rows * sizes.head,
            dtype=dtype,
        )
        depth = self.num_speculative_tokens
        return step.times(depth + 1) + head.times(depth)

    def _run_lower_layers(self, window: Window) -> torch.Tensor:
        hidden = self._target.embed(window.tokens)
        return self._target.forward_range(hidden, window, self._cache, 0, self.first_layer)

    def _width(self, rows: int) -> int:
        return self._fixed_width or window_width(rows)
