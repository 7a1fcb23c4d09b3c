"""What a drafting method is to the rest of the engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from ...graphs import DecodeState
from ...profiling.floor import RoundShape, StepCost


class BaseSpeculator(ABC):
    """Fills `draft_tokens` and `draft_count` for the live rows of a bucket, on the device.

    `propose` and `commit` are bodies of captured steps: fixed shapes, in-place, no host read. `admit` runs on the
    host between rounds.

    `propose` may run again on the same committed tokens, and then makes the same drafts. A whole round may run after
    `state.running` became false, whose outcome is dropped: `commit` must then leave what the method keeps as it is.
    """

    name: ClassVar[str]

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens

    @abstractmethod
    def allocate(self, state: DecodeState) -> None:
        """Allocates what the method keeps per slot, once, for the engine's `state`."""

    @abstractmethod
    def propose(self, state: DecodeState, bucket: int) -> None:
        """Drafts for the rows `state.slot_of_row[:bucket]`; `draft_count` 0 means no proposal."""

    def commit(self, state: DecodeState, bucket: int) -> None:  # noqa: B027 - most methods have nothing to do
        """Takes note of what was accepted; runs after accept, before the tokens are appended."""

    def admit(self, slot: int) -> None:  # noqa: B027
        """Forgets what `slot` held: a new request begins there."""

    def propose_cost(self, shape: RoundShape) -> StepCost:
        """The least that `propose` must move and compute in a round; here, the writing of its drafts."""
        return StepCost(bytes_written=shape.rows * (shape.num_drafts + 1) * 4)
