"""Methods that draft one token after another, so that drafting can stop before the last of K."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from ...graphs import DecodeState
from .base import BaseSpeculator


class StepwiseSpeculator(BaseSpeculator):
    """Splits `propose` into what every round needs, and one part per draft.

    Where no budget varies the depth, `propose` runs all of it as one step. Else `start` and `advance` are steps of
    their own, and what one leaves to the next lies in a static buffer.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._left: dict[tuple[int, bool], torch.Tensor] = {}
        """What `begin` leaves, and what each draft leaves, of a bucket: made when a part first runs, which is before
        any is captured."""

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

    def start(self, state: DecodeState, bucket: int) -> None:
        """The body of the first step: catches up, and no row has a draft."""
        state.draft_count.zero_()
        self._leave(bucket, self.begin(state, bucket), begun=True)

    def advance(self, state: DecodeState, bucket: int, step: int) -> None:
        """The body of the step that makes draft `step`."""
        hidden = self._left[bucket, step == 0]
        self._leave(bucket, self.draft(state, bucket, step, hidden), begun=False)

    def _leave(self, bucket: int, hidden: torch.Tensor, *, begun: bool) -> None:
        if (bucket, begun) not in self._left:
            self._left[bucket, begun] = torch.empty_like(hidden)
        self._left[bucket, begun].copy_(hidden)
