"""What decides how many drafts a round makes and verifies, as the programs see it; and the budget of fixed depth."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from ...graphs import DecodeState
from ...kernels.keep_drafting import keep_drafting
from ...kernels.plan_window import plan_window


class Budget(ABC):
    """Runs in captured steps: fixed shapes, in place, no host read."""

    varies_depth: bool
    """Whether fewer drafts than K may be made, where the drafter makes one after another."""

    def __init__(self, state: DecodeState) -> None:
        self.stop = torch.zeros(1, dtype=torch.int32, device=state.device)
        """int32 [1]: 0 where another draft is to be made, 1 where not."""

    @abstractmethod
    def keep(self, state: DecodeState, bucket: int, step: int) -> None:
        """Sets `stop` for draft `step`: before the first one, and after each that was made."""

    @abstractmethod
    def plan(self, state: DecodeState, bucket: int, widths: torch.Tensor) -> None:
        """The budget step: which drafts every row verifies, its window, and the first of `widths` that holds them."""

    def note(self, state: DecodeState, bucket: int) -> None:  # noqa: B027 - a fixed budget has nothing to learn
        """Takes note of what was accepted; after accept, before commit."""

    def admit(self, slot: int) -> None:  # noqa: B027
        """Forgets what `slot` held; on the host, between rounds."""

    def prepare(self, bucket: int, widths: Sequence[int]) -> None:  # noqa: B027
        """Allocates what the program of a bucket needs."""


class FixedBudget(Budget):
    """All drafts, up to the depth for the number of live rows (`num_speculative_tokens_per_batch_size`)."""

    def __init__(self, state: DecodeState, *, varies_depth: bool = False) -> None:
        """`varies_depth`: whether the depth depends on the number of rows, so that drafts beyond it are not made."""
        super().__init__(state)
        self.varies_depth = varies_depth

    def keep(self, state: DecodeState, bucket: int, step: int) -> None:
        """Goes on as far as the depth and the rows' room reach."""
        rows = state.slot_of_row[:bucket]
        by_depth = (None, None, None, None, None)
        keep_drafting(
            state.finished, state.length, state.limit, state.draft_limit, rows, *by_depth, step, self.stop
        )  # fmt: skip

    def plan(self, state: DecodeState, bucket: int, widths: torch.Tensor) -> None:
        """Every draft that the depth and the row's room allow."""
        plan_window(
            state.finished,
            state.length,
            state.limit,
            state.draft_count,
            state.draft_limit,
            state.slot_of_row[:bucket],
            widths,
            state.cu_tokens[: bucket + 1],
            state.base[:bucket],
            state.width_index,
        )
