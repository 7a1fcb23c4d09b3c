"""Standard speculative sampling (Leviathan et al. 2023, section 2.3)."""

from __future__ import annotations

from typing import ClassVar

from ...graphs import DecodeState
from ...kernels.accept_standard import accept_standard
from .base import VerificationPolicy


class StandardVerification(VerificationPolicy):
    """A draft x stands with probability min(1, p(x) / q(x)); the first that falls is replaced from max(p - q, 0)."""

    name: ClassVar[str] = "standard"

    def judge(self, state: DecodeState, bucket: int) -> None:
        """Accepts by chance and resamples the first rejection; where drafts are not sampled, q is one-hot."""
        accept_standard(
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
