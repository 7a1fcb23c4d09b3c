"""Who runs next: requests wait, then prefill chunk by chunk, then decode together in a bucket."""

from __future__ import annotations

from collections import deque

from .request import Phase, Request
from .slots import SlotPool


class Scheduler:
    """First come, first served, at round boundaries.

    One prefill chunk at most runs between two rounds, so a long prompt delays the others by no more than that.
    """

    def __init__(self, slots: SlotPool) -> None:
        self._slots = slots
        self._waiting: deque[Request] = deque()
        self._prefilling: deque[Request] = deque()
        self.decoding: list[Request] = []

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._waiting or self._prefilling or self.decoding)

    @property
    def wants_control(self) -> bool:
        """Whether the host must act before the next round: a slot to fill or a chunk to write."""
        return bool(self._prefilling or (self._waiting and self._slots.free))

    @property
    def waiting(self) -> bool:
        """Whether any request has no slot yet."""
        return bool(self._waiting)

    def unfinished(self) -> list[Request]:
        """Every request that has not finished."""
        return [*self._waiting, *self._prefilling, *self.decoding]

    def submit(self, request: Request) -> None:
        """Queues a request."""
        self._waiting.append(request)

    def admit(self) -> list[Request]:
        """Moves waiting requests into free slots; returns those moved, their `slot` and `reused` set."""
        admitted = []
        while self._waiting and self._slots.free:
            request = self._waiting.popleft()
            lease = self._slots.acquire(request.prompt_ids)
            request.slot, request.reused, request.prefilled = lease.slot, lease.reused, lease.reused
            request.phase = Phase.PREFILL
            self._prefilling.append(request)
            admitted.append(request)
        return admitted

    def ready(self) -> list[Request]:
        """Takes the requests whose prompt is written; the caller opens their slots and calls `start`."""
        done = [r for r in self._prefilling if r.prefilled >= r.prefill_target]
        for request in done:
            self._prefilling.remove(request)
        return done

    def start(self, request: Request) -> None:
        """Adds a request to the decoding rows."""
        request.phase = Phase.DECODE
        self.decoding.append(request)

    def next_to_prefill(self) -> Request | None:
        """The request whose chunk is next, in turn among those with prompt left to write."""
        for request in self._prefilling:
            if request.prefilled < request.prefill_target:
                self._prefilling.remove(request)
                self._prefilling.append(request)
                return request
        return None

    def finish(self, request: Request, cached: tuple[int, ...]) -> None:
        """Takes a request out, wherever it stands; `cached` is what its slot can be reused for."""
        if request.phase is Phase.WAITING:
            self._waiting.remove(request)
        elif request.phase is Phase.DECODE:
            self.decoding.remove(request)
        elif request in self._prefilling:  # unless `ready` took it out
            self._prefilling.remove(request)
        if request.slot >= 0:
            self._slots.release(request.slot, cached)
        request.phase = Phase.DONE
