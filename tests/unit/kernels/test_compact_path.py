"""`compact_path` against a loop over its definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import assert_same_effect, check_capture_safe, check_registration

from draftgraph.kernels.compact_path import _compact_path, compact_path, compact_path_reference


def by_loop(key_cache, value_cache, path, accepted, base, slot_of_row):
    for cache in (key_cache, value_cache):
        before = cache.clone()
        for row, slot in enumerate(slot_of_row.tolist()):
            for i in range(int(accepted[row])):
                cache[:, slot, :, base[row] + i] = before[:, slot, :, base[row] + path[row, i]]


def random_arguments(seed, rows, depth, nodes=12, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    slots, context = rows + 2, 40
    path = torch.stack([torch.randperm(nodes, generator=generator)[:depth].sort().values for _ in range(rows)])
    path[torch.rand(rows, generator=generator) < 0.2] = torch.arange(depth)
    accepted = torch.randint(0, depth + 1, (rows,), generator=generator)
    base = torch.randint(0, context - nodes + 1, (rows,), generator=generator)
    slot_of_row = torch.randperm(slots - 1, generator=generator)[:rows]
    slot_of_row[accepted == 0] = slots - 1
    return [
        torch.randn(2, slots, 2, context, 5, generator=generator).to(dtype),
        torch.randn(2, slots, 2, context, 3, generator=generator).to(dtype),
        *(index.int() for index in (path, accepted, base, slot_of_row)),
    ]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**20), st.integers(1, 4), st.integers(1, 12))
def test_it_does_what_the_loop_does(seed, rows, depth):
    assert_same_effect(compact_path, by_loop, random_arguments(seed, rows, depth))


def test_targets_that_are_sources_of_others():
    args = random_arguments(0, 1, 4)
    args[2][0] = torch.tensor([1, 2, 3, 4])
    args[3][0] = 4
    assert_same_effect(compact_path, by_loop, args)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_other_types(dtype):
    ours, theirs = random_arguments(3, 3, 6, dtype=dtype), random_arguments(3, 3, 6, dtype=dtype)
    compact_path(*ours)
    by_loop(*[t.float() if t.is_floating_point() else t for t in theirs])
    expected = [t.float() for t in theirs[:2]]
    by_loop(*expected, *theirs[2:])
    assert all(torch.equal(a.float(), b) for a, b in zip(ours[:2], expected, strict=True))


def test_the_last_position_of_the_cache_is_not_disturbed():
    args = random_arguments(5, 1, 6, nodes=6)
    args[4][0], args[3][0] = 34, 2
    assert_same_effect(compact_path, by_loop, args)


def test_registration_and_capture():
    args = random_arguments(1, 2, 4)
    check_registration(_compact_path, args)
    check_capture_safe(compact_path_reference, args)
