"""Times of several things against each other on a machine that is never quiet.

What shares a machine with others is now and then interrupted, slowed by a full cache or a lower clock. So contenders
take turns, call by call, in blocks. What counts in a block is each one's fastest call, which was not interrupted; a
ratio compares two contenders within a block, where they had the same machine; the blocks' median ratio is taken.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Contender:
    """Something that is timed."""

    run: Callable[[], object]
    """Must be done when it returns; what it leaves must not change how long the next call takes."""
    prepare: Callable[[], object] | None = None
    """Called before each `run`, not timed."""

    def seconds(self) -> float:
        """Times one call."""
        if self.prepare is not None:
            self.prepare()
        start = time.perf_counter()
        self.run()
        return time.perf_counter() - start


@dataclass(frozen=True)
class Times:
    """Seconds of every contender's fastest call in every block."""

    blocks: Mapping[str, tuple[float, ...]]

    def ratio(self, subject: str, reference: str) -> float:
        """The subject's time over the reference's, the median over the blocks."""
        return statistics.median(a / b for a, b in zip(self.blocks[subject], self.blocks[reference], strict=True))

    def seconds(self, name: str) -> float:
        """A contender's time in its fastest block: what it takes when nothing disturbs it."""
        return min(self.blocks[name])


def interleave(contenders: Mapping[str, Contender], *, blocks: int, turns: int) -> Times:
    """Times the contenders in turns.

    Args:
        contenders: by name; each has run before, so that nothing is compiled or allocated now.
        blocks: how many blocks; an odd number has a middle one.
        turns: calls of each contender in a block.

    Raises:
        ValueError: fewer than one block or turn.
    """
    if blocks < 1 or turns < 1:
        raise ValueError(f"blocks and turns must be at least 1, got {blocks} and {turns}")
    fastest: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(blocks):
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(turns):
            for name, contender in contenders.items():
                times[name].append(contender.seconds())
        for name, measured in times.items():
            fastest[name].append(min(measured))
    return Times({name: tuple(each) for name, each in fastest.items()})
