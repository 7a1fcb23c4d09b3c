"""The Triton kernel of `rope_and_cache` against its reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from window_cases import TOLERANCE, WindowCase, assert_close, rotary_arguments

from draftgraph.kernels.float8 import FLOAT8
from draftgraph.kernels.rope_and_cache import rope_and_cache_reference, rope_and_cache_triton


def check(args):
    """Same queries, same caches in every slot but the reserved one, which the kernel leaves as it is."""
    ours = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    theirs = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    tolerance = TOLERANCE[args[0].dtype]
    assert_close(rope_and_cache_triton(*ours), rope_and_cache_reference(*theirs), tolerance)
    for index in (10, 11):
        assert_close(ours[index][:-1], theirs[index][:-1], 2**-3 if args[index].dtype == FLOAT8 else tolerance)
        assert torch.equal(ours[index][-1].float(), args[index][-1].float())


@settings(max_examples=20, deadline=None)
@given(
    counts=st.lists(st.integers(0, 3), min_size=1, max_size=3),
    padding=st.integers(0, 2),
    seed=st.integers(0, 2**20),
    shape=st.sampled_from(
        [
            (3, 1, 16, 16, 8),
            (4, 2, 20, 12, 4),
            (2, 2, 24, 24, 12),
            (4, 1, 8, 16, 1),
            (1, 1, 80, 80, 16),
            (3, 1, 40, 0, 8),
        ]
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    norm=st.booleans(),
    unit_offset=st.booleans(),
    interleaved=st.booleans(),
)
def test_random_windows(counts, padding, seed, shape, dtype, norm, unit_offset, interleaved):
    bases = [(seed * 7 + 13 * row) % 40 for row in range(len(counts))]
    case = WindowCase(counts, bases, padding=padding, context=64, seed=seed)
    if case.width == 0:
        return
    heads, kv_heads, size, value_size, half = shape
    check(
        rotary_arguments(
            case,
            heads=heads,
            kv_heads=kv_heads,
            size=size,
            value_size=value_size,
            half=half,
            dtype=dtype,
            norm=norm,
            unit_offset=unit_offset,
            interleaved=interleaved,
        )
    )


PLAIN = {"heads": 2, "kv_heads": 1, "size": 16, "value_size": 16, "half": 8, "dtype": torch.float32}
PLAIN |= {"norm": False, "unit_offset": False, "interleaved": False}


def test_a_tree_rotates_by_depth_and_writes_by_index():
    case = WindowCase([9, 6], [0, 31], padding=1, context=64, seed=3, tree=True)
    check(rotary_arguments(case, **PLAIN))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_alone_of_many_heads(dtype):
    """The context of a drafter of blocks: no queries, and the heads of all layers."""
    case = WindowCase([3, 0, 2], [0, 5, 31], padding=3, context=64, seed=3)
    arguments = rotary_arguments(case, **PLAIN | {"heads": 0, "kv_heads": 10, "dtype": dtype})
    check(arguments)
    assert rope_and_cache_triton(*arguments).shape == (case.width, 0, 16)


def test_a_row_that_points_to_the_reserved_slot_writes_there():
    case = WindowCase([2], [5], context=64, seed=1)
    case.slots[:] = case.num_slots - 1
    ours = rotary_arguments(case, **PLAIN)
    theirs = [a.clone() if isinstance(a, torch.Tensor) else a for a in ours]
    rope_and_cache_triton(*ours)
    rope_and_cache_reference(*theirs)
    assert_close(ours[10], theirs[10], 1e-5)


def test_the_last_position_of_the_cache():
    case = WindowCase([4], [60], context=64, seed=2)
    check(rotary_arguments(case, **PLAIN))


def test_a_float8_cache():
    case = WindowCase([5, 3], [0, 17], padding=2, context=64, seed=5)
    args = rotary_arguments(case, **(PLAIN | {"dtype": torch.bfloat16}), float8=True)
    args[0] *= 100  # some values saturate
    ours = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    theirs = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    rope_and_cache_triton(*ours)
    rope_and_cache_reference(*theirs)
    for index in (10, 11):
        a, b = ours[index][:-1].view(torch.uint8), theirs[index][:-1].view(torch.uint8)
        # A value at the border of two codes may fall on the other side.
        assert (a.int() - b.int()).abs().max() <= 1
        assert (a != b).float().mean() < 0.001


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda x: x.double(), "qkv has dtype float64; accepted: float32 or bfloat16 or float16"),
        (0, lambda x: x[:, :-1].contiguous(), r"qkv has shape \[2, 63\]; accepted: \[any, 64\]"),
        (0, lambda x: x.t().contiguous().t(), "qkv has strides"),
        (3, lambda x: x.half(), "cos has dtype float16"),
        (3, lambda x: x.repeat(1, 2), "cos has 16 angles"),
        (5, lambda x: x.long(), "positions has dtype int64; accepted: int32"),
        (8, lambda x: x[1:], r"cu_tokens has shape \[1\]; accepted: \[2\]"),
        (10, lambda x: x.bfloat16(), "key_cache has dtype bfloat16; accepted: float32"),
        (11, lambda x: x[:, :, 1:], "value_cache has shape"),
        (10, lambda x: x[0], "key_cache has shape"),
        (16, lambda x: torch.ones(1), "key_scale is given, and the cache has dtype"),
        (6, lambda x: x.to("meta"), "slots is on meta"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused(index, change, message):
    args = rotary_arguments(WindowCase([2], [5], context=64), **PLAIN)
    args[index] = change(args[index])
    with pytest.raises(ValueError, match=message):
        rope_and_cache_triton(*args)
