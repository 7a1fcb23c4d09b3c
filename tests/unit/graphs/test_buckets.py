"""Buckets, widths and chunks."""

from __future__ import annotations

import itertools

import pytest

from draftgraph.graphs.buckets import (
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
    assert widths[0] == 2
    assert all(b == 2 * a for a, b in itertools.pairwise(widths))
    assert widths[-1] >= bucket * (drafts + 1)
    assert len(widths) == 1 or widths[-2] < bucket * (drafts + 1)


def test_exact_runs_at_one_width_whatever_the_method():
    assert {exact_widths(2, k) for k in range(16)} == {(32,)}
    with pytest.raises(ValueError, match="at most 15 speculative tokens, got 16"):
        exact_widths(1, 16)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 20, 84, 200, 255, 256, 257, 700, 2000])
def test_chunks_cover_a_prompt_without_much_padding(exact, length):
    widths = prefill_widths(exact)
    remaining, computed, chunks = length, 0, 0
    while remaining > 0:
        width = chunk_width(remaining, widths)
        assert width in widths
        remaining -= min(width, remaining)
        computed += width
        chunks += 1
    assert chunks <= length // PREFILL_CHUNK + 8
    if not exact:
        assert computed <= 1.5 * length + 4
