"""What a verification rule is to the rest of the engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

from ...graphs import DecodeState
from ...kernels.sample_target import sample_target


class VerificationPolicy(ABC):
    """Decides which drafts stand, and the one token after them: fills `accepted`, `emitted` and `failed`.

    Rows of temperature 0 are greedy under every policy: their target distribution is one token.
    """

    name: ClassVar[str]
    repeats_plain_text: ClassVar[Literal["always", "greedy", "never"]] = "greedy"
    """At which temperatures a seed gives the text that it gives without drafts, up to rounding."""

    allows_any_budget: ClassVar[bool] = False
    """Whether what is emitted does not depend on which drafts are verified, or nothing is promised of it. Otherwise,
    where drafts are sampled, that must not follow from how they turned out."""

    def allocate(self, state: DecodeState) -> None:  # noqa: B027 - most rules keep nothing
        """Allocates what the rule keeps on the device, once, for the engine's `state`."""

    def accept(self, state: DecodeState, bucket: int) -> None:
        """The body of the accept step: the target's own token at every position, then the rule."""
        sample_target(
            state.logits,
            state.window_rows,
            state.window_positions,
            state.cu_tokens[: bucket + 1],
            state.slot_of_row[:bucket],
            state.temperature,
            state.top_k,
            state.top_p,
            state.min_p,
            state.seed,
            state.sampled,
            state.log_normalizer,
            state.threshold,
            state.token_failed,
        )
        self.judge(state, bucket)

    @abstractmethod
    def judge(self, state: DecodeState, bucket: int) -> None:
        """Applies the rule to what `sample_target` left."""
