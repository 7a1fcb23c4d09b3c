"""An answer as it is being made."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .outputs import GenerationResult, StreamChunk
from .request import Request

if TYPE_CHECKING:
    from .engine import Engine


class TokenStream(Iterator[StreamChunk]):
    """Yields `StreamChunk`s; closing it, or leaving its `with` block, frees what it holds in the engine.

    Streams are pulled: taking a chunk advances every request of the engine, and what other streams gain
    meanwhile is kept for them.
    """

    def __init__(self, engine: Engine, requests: list[Request]) -> None:
        self._engine = engine
        self._requests = requests
        self._ready: deque[StreamChunk] = deque()

    def __next__(self) -> StreamChunk:
        while not self._ready:
            self._collect()
            if self._ready:
                break
            if all(r.result is not None for r in self._requests):
                raise StopIteration
            self._engine._advance(self._requests)
        return self._ready.popleft()

    @property
    def results(self) -> tuple[GenerationResult | None, ...]:
        """The finished answer of each of the `n` samples; None while it is being made."""
        return tuple(r.result for r in self._requests)

    def cancel(self) -> None:
        """Ends the answer with reason `cancelled`; its last chunk can still be taken."""
        self._engine._cancel(self._requests)

    def close(self) -> None:
        """Cancels what is unfinished and drops what was not taken."""
        self.cancel()
        for request in self._requests:
            request.chunks.clear()
        self._ready.clear()

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        # A stream that is dropped half-way, as `break` in a for loop does, must not keep its slot.
        if any(r.result is None for r in self._requests):
            self.close()

    def _collect(self) -> None:
        for request in self._requests:
            self._ready.extend(request.chunks)
            request.chunks.clear()
