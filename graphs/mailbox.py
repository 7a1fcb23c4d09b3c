"""The host's end of the output ring: what the rows have emitted since it last looked."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .state import DecodeState


@dataclass(frozen=True)
class Delivery:
    """What one row published since the last look."""

    tokens: list[int]
    finished: bool
    finish_reason: int
    """A `FINISH_*` code; meaningful when `finished`."""


class Mailbox:
    """Reads the ring of a `DecodeState`. No token is lost or delivered twice."""

    def __init__(self, state: DecodeState) -> None:
        self._state = state
        self._seen = [0] * (state.shape.slots + 1)

    def open(self, slot: int) -> None:
        """Starts a new request in `slot`: what was published before is forgotten."""
        self._state.ring_count[slot] = 0
        self._seen[slot] = 0

    def collect(self, slot: int) -> Delivery:
        """Takes what `slot` published since the last call.

        Raises `RuntimeError` when the ring was overwritten before it was read.
        """
        state = self._state
        # The count is read before the tokens and after the flags it must not run ahead of.
        finished = bool(state.finished[slot])
        count, size = int(state.ring_count[slot]), state.ring_tokens.shape[1]
        seen = self._seen[slot]
        if count - seen > size:
            raise RuntimeError(f"the output ring of slot {slot} overflowed: {count - seen} tokens unread, {size} kept")
        tokens: list[int] = []
        if count > seen:
            start, end = seen % size, count % size
            ring = state.ring_tokens[slot]
            tokens = ring[start:end].tolist() if start < end else torch.cat((ring[start:], ring[:end])).tolist()
        self._seen[slot] = count
        return Delivery(tokens, finished, int(state.finish_reason[slot]) if finished else 0)
