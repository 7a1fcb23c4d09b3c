"""The tokens of finished requests and the index over them: what suffix decoding knows beyond the request at hand."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from ...graphs.buckets import power_of_two_at_least
from ...kernels.suffix_index import PLANES, Tree, enter_all, extend

# Entering one token costs as much as rebuilding about so many.
_REBUILD_FACTOR = 8


class SuffixStore:
    """Finished requests, first in first out, in memory of a fixed size on the host.

    It holds at most `max_requests` requests and `capacity` tokens. When either would be exceeded, the oldest requests
    leave: as many as the new one needs, and then up to an eighth of the limit more, since the index of those that stay
    is built anew, which should be rare. Of a request longer than `capacity` the end is kept.
    """

    def __init__(self, *, depth: int, max_requests: int, capacity: int) -> None:
        """Allocates an empty store.

        Args:
            depth: the longest string counted, in tokens.
            max_requests: at least 0.
            capacity: in tokens, at least 1.
        """
        self.max_requests, self.capacity = max_requests, capacity
        self.index = Tree(
            np.zeros(capacity, dtype=np.int32),
            np.zeros((depth, power_of_two_at_least(capacity)), dtype=np.int32),
            np.zeros((PLANES, depth, capacity), dtype=np.int32),
        )
        self._sizes: deque[int] = deque()
        self._waiting: list[np.ndarray] = []

    @property
    def requests(self) -> int:
        """Requests in the index."""
        return len(self._sizes)

    @property
    def used(self) -> int:
        """Tokens in the index, at positions 0 to `used - 1`."""
        return sum(self._sizes)

    def add(self, tokens: Sequence[int]) -> None:
        """Takes note of a finished request; `refresh` puts it into the index."""
        if self.max_requests and tokens:
            self._waiting.append(np.asarray(tokens[-self.capacity :], dtype=np.int32))
            del self._waiting[: -self.max_requests]

    def refresh(self) -> bool:
        """Enters what was added since; returns whether that changed anything."""
        if not self._waiting:
            return False
        added, self._waiting = self._waiting, []
        # What would leave again at once need not be entered.
        kept: list[np.ndarray] = []
        room = self.capacity
        for sequence in reversed(added):
            if len(sequence) > room:
                break
            room -= len(sequence)
            kept.insert(0, sequence)
        tokens, requests = sum(len(sequence) for sequence in kept), len(kept)
        evicted = self._evict(tokens, requests) if len(kept) == len(added) else self.requests
        if evicted == 0 and tokens * _REBUILD_FACTOR < self.used:
            for sequence in kept:
                self._append(sequence)
                extend(self.index, self.used - len(sequence), self.used, self.used - len(sequence))
            return True
        first = sum(self._sizes[index] for index in range(evicted))
        remaining = self.index.tokens[first : self.used].copy()
        for _ in range(evicted):
            self._sizes.popleft()
        self.index.tokens[: len(remaining)] = remaining
        for sequence in kept:
            self._append(sequence)
        self.index.heads.fill(0)
        enter_all(self.index, np.repeat(np.cumsum([0, *self._sizes])[:-1], self._sizes).astype(np.int32))
        return True

    def _append(self, sequence: np.ndarray) -> None:
        begin = self.used
        self.index.tokens[begin : begin + len(sequence)] = sequence
        self._sizes.append(len(sequence))

    def _evict(self, tokens: int, requests: int) -> int:
        """How many of the oldest requests have to leave for so many more."""
        excess_tokens, excess_requests = (
            self.used + tokens - self.capacity,
            self.requests + requests - self.max_requests,
        )
        if excess_tokens <= 0 and excess_requests <= 0:
            return 0
        if excess_tokens > 0:
            excess_tokens = max(excess_tokens, min(self.used, self.capacity // 8))
        if excess_requests > 0:
            excess_requests = max(excess_requests, min(self.requests, self.max_requests // 8))
        evicted = freed = 0
        while evicted < self.requests and (freed < excess_tokens or evicted < excess_requests):
            freed += self._sizes[evicted]
            evicted += 1
        return evicted
