"""Drafting methods as a user would write them: one that works, one that knows the answer, and some that cannot work."""

from __future__ import annotations

from typing import ClassVar

import torch

from draftgraph import BaseSpeculator, DecodeState


class Successor(BaseSpeculator):
    """Drafts the tokens that follow in the vocabulary, as the tiny model often does, for rows of odd length."""

    name = "successor"

    def allocate(self, state: DecodeState) -> None:
        self.offsets = torch.arange(1, self.num_speculative_tokens + 1, dtype=torch.int32, device=state.device)

    def propose(self, state: DecodeState, bucket: int) -> None:
        slots = state.slot_of_row[:bucket].long()
        last = state.length[slots].long() - 1
        anchor = state.tokens[slots, last]
        state.draft_tokens[slots] = (anchor[:, None] // 7 * 7 + (anchor[:, None] + self.offsets) % 7).int()
        state.draft_count[slots] = torch.where(last % 2 == 0, self.num_speculative_tokens, 0).int()


class Oracle(BaseSpeculator):
    """Drafts what it was told the text is, in two rounds of three at most."""

    name = "oracle"
    text: ClassVar[list[int]] = [0]

    def allocate(self, state: DecodeState) -> None:
        self.known = torch.tensor(self.text, dtype=torch.int32).to(state.device)
        self.offsets = torch.arange(self.num_speculative_tokens, device=state.device)

    def propose(self, state: DecodeState, bucket: int) -> None:
        slots = state.slot_of_row[:bucket].long()
        end = state.length[slots].long()
        place = (end[:, None] + self.offsets).clamp(max=self.known.shape[0] - 1)
        state.draft_tokens[slots] = self.known[place]
        state.draft_count[slots] = torch.where(end % 3 != 0, self.num_speculative_tokens, 0).int()


class ReadsTheHost(Successor):
    """Looks at a value in a step."""

    def propose(self, state: DecodeState, bucket: int) -> None:
        if state.length.sum().item() > 0:
            super().propose(state, bucket)


class CommitsOnTheHost(Successor):
    """Looks at a value in another step."""

    def commit(self, state: DecodeState, bucket: int) -> None:
        self.seen = state.accepted.tolist()


class PrefillsOnTheHost(Successor):
    """Copies a prompt to the host."""

    def prefill(self, state, window, hidden) -> None:
        self.prompt = window.tokens.cpu()


class VerifiesOnTheHost(Successor):
    """Reads a value in a step that is part of verify."""

    def verify_hidden(self, state, window):
        return None if window.base.max().item() >= 0 else window.base


class ObservesOnTheHost(Successor):
    """Reads the target's states on the host."""

    target_states = (1,)

    def observe_prompt(self, state, window, states) -> None:
        self.seen = states[0].tolist()


class ReadsNoSuchState(Successor):
    """Asks for a layer that no small model has."""

    target_states = (0, 99)


class BeginsNowhere(Successor):
    """Leaves off at a layer that no small model has."""

    first_layer = 99


class OutOfTheVocabulary(Successor):
    """Drafts tokens that do not exist, of both signs, and more than there is room for."""

    def propose(self, state: DecodeState, bucket: int) -> None:
        slots = state.slot_of_row[:bucket].long()
        drafts = torch.full_like(state.draft_tokens[slots], 2**31 - 1)
        drafts[:, 1::2] = -7
        state.draft_tokens[slots] = drafts
        state.draft_count[slots] = 99


class AllocatesByValue(Successor):
    """Reads a value where it allocates."""

    def allocate(self, state: DecodeState) -> None:
        self.offsets = torch.zeros(int(state.length.max()))


class CannotBeMade(Successor):
    """Wants more than the number of drafts."""

    def __init__(self, num_speculative_tokens: int, table: str) -> None:
        super().__init__(num_speculative_tokens)


class Half(BaseSpeculator):
    """Has no `propose`."""

    def allocate(self, state: DecodeState) -> None:
        pass


class NotOne:
    """Not a speculator at all."""


def function(num_speculative_tokens: int) -> Successor:
    return Successor(num_speculative_tokens)
