"""Coupled verification: a draft stands when it is the very token that the target samples."""

from __future__ import annotations

from typing import ClassVar

from ...graphs import DecodeState
from ...kernels.accept_coupled import accept_coupled
from .base import VerificationPolicy


class CoupledVerification(VerificationPolicy):
    """The target's token at a position is argmax(log p + Gumbel(seed, position)), drafts or no drafts.

    So the text depends on the seed alone, at any temperature. Greedy decoding is its zero-temperature case.
    """

    name: ClassVar[str] = "coupled"
    repeats_plain_text = "always"
    allows_any_budget = True

    def judge(self, state: DecodeState, bucket: int) -> None:
        """Accepts drafts while they equal the target's sample."""
        accept_coupled(
            state.sampled,
            state.token_failed,
            state.draft_tokens,
            state.cu_tokens[: bucket + 1],
            state.slot_of_row[:bucket],
            state.accepted,
            state.emitted,
            state.failed,
        )
