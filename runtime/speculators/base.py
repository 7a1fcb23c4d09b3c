"""What a drafting method is to the rest of the engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from ...graphs import DecodeState
from ...kernels.window import Window
from ...profiling.floor import RoundShape, StepCost
from ..speculative_methods import Evidence


class BaseSpeculator(ABC):
    """Fills `draft_tokens`, `draft_count` and `confidence` for the live rows of a bucket, on the device.

    `propose`, `commit` and `prefill` are bodies of captured steps: fixed shapes, in-place, no host read. `admit` and
    `clear` run on the host between rounds; `finish` runs on the host at any time.

    A drafter that keeps something per token, as a KV cache of its own, holds it by slot and position beside the
    target's and keeps it right in three places: `prefill` writes a chunk of the prompt, `propose` catches up on what
    was committed since it last ran, and `unseen` says how much of that may be missing when a request ends.

    `propose` may run again on the same committed tokens, and then makes the same drafts. A whole round may run after
    `state.running` became false, whose outcome is dropped: `commit` must then leave what the method keeps as it is.
    """

    name: ClassVar[str]

    unseen: int = 0
    """How many of the last tokens whose KV the target holds the drafter may not have seen between two rounds. A later
    prompt reuses a slot's tokens without these."""

    lookahead: int = 0
    """How many of the tokens after a position decide what the drafter keeps there. Of the tokens that a slot and a
    later prompt have in common, so many are not reused, but at least one token of the prompt is written anew."""

    target_states: tuple[int, ...] = ()
    """Which of the target's hidden states `observe` and `observe_prompt` get: indices into transformers'
    `hidden_states`, where 0 is the embedding, i the output of layer i - 1, and the number of layers the final norm's
    output. Without any, neither is called."""

    first_layer: int = 0
    """The target's layer with which verification begins, where `verify_hidden` says that those before it have run."""

    evidence: ClassVar[Evidence] = Evidence.NONE
    """What `confidence` says, for adaptive verification, where the registry of methods does not: of a user's class."""

    confidence_reads_drafts: bool = True
    """Whether the confidence at a position depends on the drafts before it. False where all come from one pass."""

    draft_confidence: torch.Tensor | None = None
    """float32 [rows, K] in the order of the bucket, for a method that leaves its confidences there and not in
    `DecodeState.confidence`: of each draft, the chance that it is accepted given that those before it are."""

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

    def verify_hidden(self, state: DecodeState, window: Window) -> torch.Tensor | None:
        """What the layers before `first_layer` left of the rows' windows, for a drafter that ran them; part of verify.

        They must have written their KV of every window, those without a draft included.

        Args:
            state: of the engine.
            window: the rows' windows, packed.

        Returns:
            [W, hidden] in the order of `window`, or None: verification runs all layers.
        """
        return None

    def expect_other_drafts(self) -> None:  # noqa: B027
        """Called before `allocate` where several methods draft: what is accepted may be the drafts of another.

        `propose` then still runs in every round, and catches up on up to K + 1 tokens that it did not draft.
        """

    def prefill(self, state: DecodeState, window: Window, hidden: torch.Tensor) -> None:  # noqa: B027
        """Takes in one chunk of a prompt, after the target has.

        Args:
            state: of the engine.
            window: the chunk, a window of one row, in the target's token ids.
            hidden: [W, hidden], the target's last hidden states there, after its final norm.
        """

    def observe(self, state: DecodeState, window: Window, states: tuple[torch.Tensor, ...]) -> None:  # noqa: B027
        """Keeps what it will read of the target; part of verify, after the forward.

        Steps may run with padding rows only, or with `state.running` false, in the middle of anything: what is kept
        of live rows must then stay as it is.

        Args:
            state: of the engine.
            window: the rows' windows.
            states: [W, hidden] of each of `target_states`.
        """

    def observe_prompt(self, state: DecodeState, window: Window, states: tuple[torch.Tensor, ...]) -> None:  # noqa: B027
        """Takes in what the target made of one chunk of a prompt; after `prefill`.

        Args:
            state: of the engine.
            window: the chunk, a window of one row.
            states: [W, hidden] of each of `target_states`.
        """

    def admit(self, slot: int) -> None:  # noqa: B027
        """Forgets what `slot` held: a new request begins there, with the length and the tokens of its prompt."""

    def finish(self, slot: int, tokens: Sequence[int]) -> None:  # noqa: B027
        """Takes note of a request that ended in `slot`, with its prompt and output.

        Rounds may be running: what the device reads must be left alone until `admit`.
        """

    def clear(self, slot: int) -> None:  # noqa: B027
        """Overwrites what `slot` holds, since it may not be finite."""

    def propose_cost(self, shape: RoundShape) -> StepCost:
        """The least that `propose` must move and compute in a round; here, the writing of its drafts."""
        return StepCost(bytes_written=shape.rows * (shape.num_drafts + 1) * 4)
