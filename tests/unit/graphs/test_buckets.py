"""Buckets, widths and chunks."""

from __future__ import annotations

import itertools

import pytest

from draftgraph.graphs.buckets import (
    MIN_WIDTH,
    PASS_COST,
    PREFILL_CHUNK,
    batch_buckets,
    bucket_for,
    chunk_width,
    exact_widths,
    prefill_widths,
    validated_buckets,
    verify_widths,
)


@pytest.mark.parametrize(("size", "expected"), [(1, (1,)), (2, (1, 2)), (3, (1, 2, 4)), (16, (1, 2, 4, 8, 16))])
def test_buckets_are_powers_of_two_that_hold_the_batch(size, expected):
    assert batch_buckets(size) == expected


def test_the_smallest_bucket_that_fits_is_chosen():
    assert [bucket_for(n, (1, 2, 4)) for n in (1, 2, 3, 4)] == [1, 2, 4, 4]
    with pytest.raises(ValueError, match="5 rows do not fit the largest bucket, 4"):
        bucket_for(5, (1, 2, 4))


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        ((), "positive integers"),
        ((0, 4), "positive integers"),
        ((4, 2), "ascending"),
        ((2, 2, 4), "ascending"),
        ((1, 2), r"\(2\) must hold max_batch_size \(4\)"),
    ],
)
def test_bad_buckets_are_refused(buckets, message):
    with pytest.raises(ValueError, match=message):
        validated_buckets(buckets, 4)


@pytest.mark.parametrize("bucket", [1, 2, 4, 8])
@pytest.mark.parametrize("drafts", [0, 1, 4, 8, 15])
def test_widths_are_powers_of_two_up_to_the_full_windows(bucket, drafts):
    widths = verify_widths(bucket, drafts)
    assert widths[0] == MIN_WIDTH
    assert all(b == 2 * a for a, b in itertools.pairwise(widths))
    assert widths[-1] >= bucket * (drafts + 1)
    assert len(widths) == 1 or widths[-2] < bucket * (drafts + 1)


def test_exact_runs_at_one_width_whatever_the_method():
    assert {exact_widths(2, k) for k in range(16)} == {(32,)}
    with pytest.raises(ValueError, match="at most 15 speculative tokens, got 16"):
        exact_widths(1, 16)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 20, 84, 106, 200, 255, 256, 257, 700, 2000])
def test_chunks_cover_a_prompt_at_the_least_cost(exact, length):
    widths = prefill_widths(exact)
    chunks, remaining = [], length
    while remaining > 0:
        chunks.append(chunk_width(remaining, widths))
        assert chunks[-1] in widths
        remaining -= chunks[-1]

    def cheapest(left: int) -> int:
        return min((w + PASS_COST + (cheapest(left - w) if left > w else 0)) for w in widths)

    if length <= 300:
        assert sum(w + PASS_COST for w in chunks) == cheapest(length)
    whole = max(0, length // PREFILL_CHUNK - 1)
    assert chunks[:whole] == [PREFILL_CHUNK] * whole


def test_a_prompt_that_nearly_fills_a_width_is_one_chunk():
    widths = prefill_widths(exact=False)
    assert [chunk_width(n, widths) for n in (1, 16, 40, 64, 106, 128, 240, 256, 900)] == [
        16, 16, 64, 64, 128, 128, 256, 256, 256,
    ]  # fmt: skip
