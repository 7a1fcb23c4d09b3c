"""Block verification (Sun et al. 2024, arXiv 2403.10444)."""

from __future__ import annotations

from typing import ClassVar

from ...graphs import DecodeState
from ...kernels.accept_block import accept_block
from .base import VerificationPolicy


class BlockVerification(VerificationPolicy):
    """Drafts are judged as a block, by the joint probability of their prefixes.

    It keeps the target's distribution, as `standard` does, and never accepts fewer tokens in expectation.
    """

    name: ClassVar[str] = "block"

    def judge(self, state: DecodeState, bucket: int) -> None:
        """Accepts the longest prefix that its joint probability lets stand; where drafts are not sampled, q is
        one-hot.
        """
        accept_block(
            state.logits,
            state.sampled,
            state.log_normalizer,
            state.threshold,
            state.token_failed,
            state.window_positions,
            state.draft_tokens,
            state.draft_distributions,
            state.temperature,
            state.seed,
            state.cu_tokens[: bucket + 1],
            state.slot_of_row[:bucket],
            state.accepted,
            state.emitted,
            state.failed,
        )
