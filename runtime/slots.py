"""Slots of the decode state: who has which, and what each still holds for a later prompt to reuse."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Lease:
    """A slot given to a request, and how much of its prompt the slot already holds."""

    slot: int
    reused: int
    """Leading prompt tokens whose KV is valid in the slot."""


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading items `a` and `b` share."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    low, high = 0, n
    while low < high:  # slices compare at C speed, so bisection beats a Python loop
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class SlotPool:
    """Hands out slots, preferring one whose cached tokens begin the new prompt, else the least recently used."""

    def __init__(self, slots: int, *, reuse_multiple: int | None, lookahead: int = 0) -> None:
        """Creates a pool of `slots` free slots.

        Args:
            slots: how many there are.
            reuse_multiple: reuse only multiples of this many tokens; None reuses nothing. A multiple of the
                prefill chunk makes a reused prefix bit-identical to a computed one.
            lookahead: how many of the tokens after a position decide what a slot holds there; so many of the tokens
                in common are not reused, and at least so many of a prompt's besides the last.
        """
        self._free: OrderedDict[int, tuple[int, ...]] = OrderedDict((slot, ()) for slot in range(slots))
        self._multiple, self._lookahead = reuse_multiple, lookahead

    @property
    def free(self) -> int:
        """How many slots are free."""
        return len(self._free)

    def acquire(self, prompt: tuple[int, ...]) -> Lease:
        """Takes a free slot for `prompt`; at most all but the last of its tokens are reused.

        Raises `IndexError` when no slot is free.
        """
        best_slot, best = -1, 0
        if self._multiple is not None:
            for slot, cached in self._free.items():
                shared = max(min(common_prefix(cached, prompt), len(prompt) - 1) - self._lookahead, 0)
                shared -= shared % self._multiple
                if shared > best:
                    best_slot, best = slot, shared
        if best_slot < 0:
            if not self._free:
                raise IndexError("no slot is free")
            best_slot = next(iter(self._free))
        del self._free[best_slot]
        return Lease(best_slot, best)

    def release(self, slot: int, cached: tuple[int, ...]) -> None:
        """Gives `slot` back; `cached` are the tokens whose KV it holds from position 0 on."""
        self._free[slot] = cached
