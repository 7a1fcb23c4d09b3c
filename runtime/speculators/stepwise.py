"""Methods that draft one token after another, so that drafting can stop before the last of K."""

from __future__ import annotations

from abc import abstractmethod

import torch

from ...graphs import DecodeState
from .base import BaseSpeculator
from .drafting import window_width


class StepwiseSpeculator(BaseSpeculator):
    """Splits `propose` into what every round needs, and one part per draft.

    Where no budget varies the depth, `propose` runs all of it as one step. Else `start` and `advance` are steps of
    their own, and what one leaves to the next lies in a static buffer.
    """

    _carried: torch.Tensor | None = None

    @abstractmethod
    def begin(self, state: DecodeState, bucket: int) -> torch.Tensor:
        """Catches up on what was committed, which every round does, and makes no draft.

        Returns [W, hidden], from which the first draft is made: row b's at b, W being `window_width(bucket)`.
        """

    @abstractmethod
    def draft(self, state: DecodeState, bucket: int, step: int, hidden: torch.Tensor) -> torch.Tensor:
        """Makes draft `step` of every row; takes what the part before returned, and returns the same for the next."""

    def propose(self, state: DecodeState, bucket: int) -> None:
        """Reads what was committed and drafts K tokens for every live row of the bucket."""
        hidden = self.begin(state, bucket)
        for step in range(self.num_speculative_tokens):
            hidden = self.draft(state, bucket, step, hidden)

    @property
    def splits(self) -> bool:
        """Whether the parts make up `propose`; not so in a class that has another one."""
        return type(self).propose is StepwiseSpeculator.propose

    def allocate_parts(self, state: DecodeState, size: int, dtype: torch.dtype) -> None:
        """Allocates what one part leaves to the next; part of `allocate`."""
        width = window_width(state.shape.max_bucket)
        self._carried = torch.zeros(width, size, dtype=dtype, device=state.device)

    def start(self, state: DecodeState, bucket: int) -> None:
        """The body of the first step: catches up, and no row has a draft."""
        state.draft_count.index_fill_(0, state.slot_of_row[:bucket].long(), 0)
        self._carry(bucket).copy_(self.begin(state, bucket))

    def advance(self, state: DecodeState, bucket: int, step: int) -> None:
        """The body of the step that makes draft `step`."""
        carried = self._carry(bucket)
        carried.copy_(self.draft(state, bucket, step, carried))

    def _carry(self, bucket: int) -> torch.Tensor:
        assert self._carried is not None  # made by `allocate`
        return self._carried[: window_width(bucket)]
