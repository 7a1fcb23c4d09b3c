"""The padded shapes for which steps are captured: batch buckets, verify widths and prefill chunks."""

from __future__ import annotations

import functools
from collections.abc import Iterable

MIN_WIDTH = 4
"""The narrowest verify. Fewer positions would save nothing: the weights are read all the same, and on a CPU oneDNN's
products of one or two rows take longer than those of four. In float32 a single row rounds differently from all others.
"""

EXACT_POSITIONS_PER_ROW = 16
"""With `exact=True` every round runs at this many positions per row of the largest bucket."""

PREFILL_CHUNK = 256
"""The most prompt tokens that one prefill chunk writes."""

PASS_COST = 24
"""What a pass over the weights costs beside its tokens, in tokens. About this many on a CPU (SmolLM2-135M, bfloat16, 2
cores: 13 ms for the weights, 0.6 ms for a token); a GPU would bear more, which makes chunks fewer, never wrong."""


def power_of_two_at_least(n: int) -> int:
    """The smallest power of two that is `n` or more; `n` must be positive."""
    return 1 << (n - 1).bit_length()


def batch_buckets(max_batch_size: int) -> tuple[int, ...]:
    """Powers of two up to and including the one that holds `max_batch_size` rows."""
    if max_batch_size < 1:
        raise ValueError(f"max_batch_size must be at least 1, got {max_batch_size}")
    return tuple(1 << i for i in range(power_of_two_at_least(max_batch_size).bit_length()))


def validated_buckets(buckets: Iterable[int], max_batch_size: int) -> tuple[int, ...]:
    """Checks a user's buckets: ascending, positive, the last one holding `max_batch_size` rows."""
    result = tuple(buckets)
    if not result or any(not isinstance(b, int) or b < 1 for b in result):
        raise ValueError(f"batch_buckets must be positive integers, got {result!r}")
    if list(result) != sorted(set(result)):
        raise ValueError(f"batch_buckets must be in ascending order without repeats, got {result!r}")
    if result[-1] < max_batch_size:
        raise ValueError(
            f"the largest of batch_buckets ({result[-1]}) must hold max_batch_size ({max_batch_size}) rows"
        )
    return result


def bucket_for(rows: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds `rows` rows."""
    for bucket in buckets:
        if rows <= bucket:
            return bucket
    raise ValueError(f"{rows} rows do not fit the largest bucket, {buckets[-1]}")


def verify_widths(bucket: int, num_drafts: int) -> tuple[int, ...]:
    """The widths at which a bucket's verify is captured, ascending; the last holds every row's full window."""
    widest = power_of_two_at_least(max(MIN_WIDTH, bucket * (num_drafts + 1)))
    widths = []
    width = MIN_WIDTH
    while width <= widest:
        widths.append(width)
        width *= 2
    return tuple(widths)


def exact_widths(bucket: int, num_drafts: int) -> tuple[int]:
    """The one width of a bucket under `exact=True`, the same with and without speculation.

    Raises `ValueError` when a row's window does not fit its share.
    """
    if num_drafts + 1 > EXACT_POSITIONS_PER_ROW:
        raise ValueError(
            f"exact=True allows at most {EXACT_POSITIONS_PER_ROW - 1} speculative tokens, got {num_drafts}: "
            "plain and speculative decoding must run at one width"
        )
    return (power_of_two_at_least(bucket) * EXACT_POSITIONS_PER_ROW,)


def prefill_widths(exact: bool) -> tuple[int, ...]:
    """The widths at which a prefill chunk is captured, ascending; one only under `exact=True`."""
    if exact:
        return (PREFILL_CHUNK,)
    return (16, 64, 128, PREFILL_CHUNK)


def chunk_width(remaining: int, widths: tuple[int, ...]) -> int:
    """The width of the next chunk of a prompt of which `remaining` tokens are left.

    The first of the chunks that cost least together, where a chunk costs its width, padding included, and
    `PASS_COST` for reading the weights once more.
    """
    return _cheapest_chunks(remaining, widths)[1]


@functools.lru_cache(maxsize=4096)
def _cheapest_chunks(remaining: int, widths: tuple[int, ...]) -> tuple[int, int]:
    """The least cost of `remaining` tokens, and the width of the first chunk."""
    widest = widths[-1]
    if remaining > 2 * widest:
        return 0, widest  # the cost is not compared with any other
    best = (0, 0)
    for width in reversed(widths):
        rest = remaining - width
        cost = width + PASS_COST + (_cheapest_chunks(rest, widths)[0] if rest > 0 else 0)
        if best[1] == 0 or cost < best[0]:
            best = (cost, width)
    return best
