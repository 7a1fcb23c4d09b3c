"""The host's end of the output ring: what the rows have emitted since it last looked."""

from __future__ import annotations

from dataclasses import dataclass

from .state import REASON_SHIFT, DecodeState

_COUNT_MASK = (1 << REASON_SHIFT) - 1


@dataclass(frozen=True)
class Delivery:
    """What one row published since the last look."""

    tokens: list[int]
    finish_reason: int
    """A `FINISH_*` code: `FINISH_NONE` while the row is unfinished. `tokens` are then the row's last."""

    @property
    def finished(self) -> bool:
        """Whether the row publishes nothing more."""
        return self.finish_reason != 0


class Mailbox:
    """Reads the rings of a `DecodeState`, also while the device fills them. No token is lost or delivered twice.

    The device stores a row's tokens, then releases `published`; the host reads `published`, then the tokens, then tells
    in `taken` which places the device may use again. So two orders matter on the host: the word before the tokens, and
    the tokens before `taken`. An x86 machine keeps both for plain loads and stores. One that may reorder loads, such as
    aarch64, keeps a load after the one that its address is computed from, and a store after a load whose value decided
    that it is made: so the place of the first token is computed from the count just read, and `taken` is stored after
    the tokens have become Python integers.
    """

    def __init__(self, state: DecodeState) -> None:
        # NumPy's views: a look costs a tenth of what it costs through torch, and there is one per row and poll.
        host = state.host
        self._ring, self._published, self._taken = host.ring_tokens.numpy(), host.published.numpy(), host.taken.numpy()
        self._cancel = host.cancel.numpy()
        self._seen = [0] * len(self._published)

    def open(self, slot: int) -> None:
        """Starts a new request in `slot`, forgetting what was published before; only while no loop runs.

        The caller sets the device's `ring_count` of the slot to 0.
        """
        self._published[slot] = self._taken[slot] = self._seen[slot] = 0
        self._cancel[slot] = False

    def cancel(self, slot: int) -> None:
        """Asks the device to end the row of `slot`, which it does at the end of a round; at any time."""
        self._cancel[slot] = True

    def collect(self, slot: int) -> Delivery:
        """Takes what `slot` published since the last call.

        Raises:
            RuntimeError: the ring was overwritten before it was read; the device never does that.
        """
        word = int(self._published[slot])
        count, reason = word & _COUNT_MASK, word >> REASON_SHIFT
        fresh, size = count - self._seen[slot], self._ring.shape[1]
        if not 0 <= fresh <= size:
            raise RuntimeError(f"the output ring of slot {slot} overflowed: {fresh} tokens unread, {size} kept")
        tokens: list[int] = []
        if fresh:
            ring, start, end = self._ring[slot], (count - fresh) % size, count % size
            tokens = ring[start:end].tolist() if start < end else ring[start:].tolist() + ring[:end].tolist()
            self._seen[slot] = count
            self._taken[slot] = count
        return Delivery(tokens, reason)
