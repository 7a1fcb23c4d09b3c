"""Several methods draft, and for each row the first that has drafts wins."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch

from ...graphs import DecodeState
from ...kernels.merge_drafts import merge_drafts
from ...kernels.put_rows import put_rows
from ...kernels.window import Window
from ...profiling.floor import RoundShape, StepCost
from ..speculative_methods import UNKNOWN_CONFIDENCE, Evidence
from .base import BaseSpeculator


class EnsembleSpeculator(BaseSpeculator):
    """Runs every method's `propose` in every round, each into buffers of its own, and merges them on the device.

    No method is skipped because another one drafted: what runs in a round cannot depend on what it finds. So list
    methods that cost little before the one that costs much, and expect to pay for all of them.
    """

    name: ClassVar[str] = "ensemble"
    evidence: ClassVar[Evidence] = Evidence.PROBABILITY
    draft_confidence: torch.Tensor | None = None
    """What members leave in the order of the bucket is put beside the confidences of the others."""

    _tokens: torch.Tensor
    _count: torch.Tensor
    _confidence: torch.Tensor
    _views: tuple[DecodeState, ...]

    def __init__(self, num_speculative_tokens: int, members: Sequence[BaseSpeculator]) -> None:
        """Takes the methods, the preferred one first; all of them draft up to `num_speculative_tokens`."""
        super().__init__(num_speculative_tokens)
        self.members = tuple(members)
        for member in self.members:
            member.expect_other_drafts()
        self.unseen = max(member.unseen for member in self.members)
        self.confidence_reads_drafts = any(member.confidence_reads_drafts for member in self.members)
        self.lookahead = max(member.lookahead for member in self.members)
        self.target_states = tuple(sorted({layer for member in self.members for layer in member.target_states}))

    def allocate(self, state: DecodeState) -> None:
        """Allocates drafts [M, R1, K], counts and confidences for M methods, and what each of them keeps."""
        members, device = len(self.members), state.device
        shape = (members, *state.draft_tokens.shape)
        self._tokens = torch.full(shape, -1, dtype=torch.int32, device=device)
        self._confidence = torch.zeros(shape, dtype=torch.float32, device=device)
        self._count = torch.zeros(shape[:2], dtype=torch.int32, device=device)
        for member, kept in zip(self.members, self._confidence, strict=True):
            if member.evidence is Evidence.POSITION:
                kept.fill_(UNKNOWN_CONFIDENCE)
        self._views = tuple(
            dataclasses.replace(
                state,
                draft_tokens=self._tokens[member],
                draft_count=self._count[member],
                confidence=self._confidence[member],
            )
            for member in range(members)
        )
        for member, view in zip(self.members, self._views, strict=True):
            member.allocate(view)

    def propose(self, state: DecodeState, bucket: int) -> None:
        """Drafts with every method; the first that has drafts for a row fills in the row's."""
        for member, view in zip(self.members, self._views, strict=True):
            member.propose(view, bucket)
            if member.draft_confidence is not None:
                put_rows(member.draft_confidence[:bucket], state.slot_of_row[:bucket], 0, view.confidence[:, None])
        merge_drafts(
            self._tokens,
            self._count,
            self._confidence,
            state.finished,
            state.slot_of_row[:bucket],
            state.draft_tokens,
            state.draft_count,
            state.confidence,
        )

    def commit(self, state: DecodeState, bucket: int) -> None:
        """Every method takes note: of what was verified, whoever drafted it."""
        for member in self.members:
            member.commit(state, bucket)

    def prefill(self, state: DecodeState, window: Window, hidden: torch.Tensor) -> None:
        """Every method takes in the chunk."""
        for member in self.members:
            member.prefill(state, window, hidden)

    def observe(self, state: DecodeState, window: Window, states: tuple[torch.Tensor, ...]) -> None:
        """Every method keeps what it reads."""
        for member in self.members:
            if member.target_states:
                member.observe(state, window, self._states_of(member, states))

    def observe_prompt(self, state: DecodeState, window: Window, states: tuple[torch.Tensor, ...]) -> None:
        """Every method takes in what it reads of the chunk."""
        for member in self.members:
            if member.target_states:
                member.observe_prompt(state, window, self._states_of(member, states))

    def _states_of(self, member: BaseSpeculator, states: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(states[self.target_states.index(layer)] for layer in member.target_states)

    def admit(self, slot: int) -> None:
        """Every method forgets what the slot held."""
        for member in self.members:
            member.admit(slot)

    def finish(self, slot: int, tokens: Sequence[int]) -> None:
        """Every method takes note of a request that ended."""
        for member in self.members:
            member.finish(slot, tokens)

    def clear(self, slot: int) -> None:
        """Every method overwrites what the slot holds."""
        for member in self.members:
            member.clear(slot)

    def propose_cost(self, shape: RoundShape) -> StepCost:
        """That of all methods, and of the merge."""
        drafts = shape.rows * (2 * shape.num_drafts + 1) * 4
        merge = StepCost(bytes_read=len(self.members) * drafts, bytes_written=drafts)
        return sum((member.propose_cost(shape) for member in self.members), merge)
