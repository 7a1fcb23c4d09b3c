"""The Triton kernel of `compact_path` against its reference: it moves bits, so the caches must be equal."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftgraph.kernels.compact_path import compact_path_reference, compact_path_triton


def arguments(seed, rows, depth, nodes, sizes=(16, 8), layers=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    slots, context = rows + 2, 72
    path = torch.stack([torch.randperm(nodes, generator=generator)[:depth].sort().values for _ in range(rows)])
    path[torch.rand(rows, generator=generator) < 0.2] = torch.arange(depth)
    accepted = torch.randint(0, depth + 1, (rows,), generator=generator)
    base = torch.randint(0, context - nodes + 1, (rows,), generator=generator)
    slot_of_row = torch.randperm(slots - 1, generator=generator)[:rows]
    slot_of_row[accepted == 0] = slots - 1
    caches = [torch.randn(layers, slots, 2, context, size, generator=generator).to(dtype) for size in sizes]
    return [*caches, *(index.int() for index in (path, accepted, base, slot_of_row))]


def check(args):
    ours, theirs = ([a.clone() for a in args] for _ in range(2))
    compact_path_triton(*ours)
    compact_path_reference(*theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.float(), b.float())


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 2**20),
    st.integers(1, 3),
    st.sampled_from([(1, 1), (2, 5), (7, 16), (8, 64), (33, 64), (64, 64)]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn]),
)
def test_random_paths(seed, rows, path, dtype):
    depth, nodes = path
    check(arguments(seed, rows, depth, nodes, dtype=dtype))


def test_large_heads_in_several_blocks():
    check(arguments(1, 1, 5, 9, sizes=(576, 512), layers=1))
    check(arguments(1, 1, 5, 9, sizes=(80, 130), layers=1))


def test_one_layer_of_a_larger_cache():
    args = arguments(2, 2, 5, 9)
    large = [torch.randn(3, *cache.shape[1:]) for cache in args[:2]]
    check([large[0][1:2], large[1][1:2], *args[2:]])


def test_nothing_is_accepted():
    args = arguments(3, 2, 5, 9)
    args[3].zero_()
    before = args[0].clone()
    compact_path_triton(*args)
    assert torch.equal(args[0], before)


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda x: x.double(), "key_cache has dtype float64"),
        (0, lambda x: x[0], "key_cache has shape"),
        (1, lambda x: x.half(), "value_cache has dtype float16; accepted: float32"),
        (1, lambda x: x.transpose(3, 4).contiguous().transpose(3, 4), "value_cache has strides"),
        (2, lambda x: x.long(), "path has dtype int64; accepted: int32"),
        (2, lambda x: x.repeat(1, 20), "path has 100 columns; accepted: at most 64"),
        (3, lambda x: x[:1], r"accepted has shape \[1\]; accepted: \[2\]"),
        (5, lambda x: x.to("meta"), "slot_of_row is on meta"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused(index, change, message):
    args = arguments(4, 2, 5, 9)
    args[index] = change(args[index])
    with pytest.raises(ValueError, match=message):
        compact_path_triton(*args)
