"""The Triton kernels of `window_attention` against its reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from window_cases import TOLERANCE, WindowCase, assert_close

from draftgraph.kernels.float8 import FLOAT8
from draftgraph.kernels.window_attention import window_attention_reference
from draftgraph.kernels.window_attention_triton import window_attention_triton


def arguments(
    case, *, heads=2, kv_heads=1, key_dim=16, value_dim=16, dtype=torch.float32, window=0, cap=0.0, float8=False
):
    """What is not the past or the window of a row is NaN in the caches."""
    kind = FLOAT8 if float8 else dtype
    caches = [case.normal(case.num_slots, kv_heads, case.context, dim) for dim in (key_dim, value_dim)]
    for cache in caches:
        written = torch.zeros(case.num_slots, case.context, dtype=torch.bool)
        for slot, base, count in zip(case.slot_of_row.tolist(), case.bases, case.counts, strict=True):
            written[slot, : base + count] = True
        cache.masked_fill_(~written[:, None, :, None], float("nan"))
    scales = [torch.rand(kv_heads, generator=case.generator) + 0.5 for _ in range(2)] if float8 else [None, None]
    return [
        case.normal(case.width, heads, key_dim, dtype=dtype),
        *(cache.to(kind) for cache in caches),
        case.positions,
        case.cu_tokens,
        case.base,
        case.slot_of_row,
        case.ancestors,
        key_dim**-0.5,
        window,
        cap,
        *scales,
    ]


def expected(args):
    """The reference does not multiply NaN with zero weights on the side of the values; keys it masks after."""
    clean = [torch.nan_to_num(a.float()).to(a.dtype) if i in (1, 2) else a for i, a in enumerate(args)]
    return window_attention_reference(*clean)


def check(case, **options):
    args = arguments(case, **options)
    ours = window_attention_triton(*args)
    assert ours.dtype == args[0].dtype
    assert_close(ours, expected(args), TOLERANCE[args[0].dtype])
    assert (ours[case.rows < 0] == 0).all()


LENGTHS = st.sampled_from([0, 1, 2, 62, 63, 64, 65, 126, 127, 128, 129, 180])


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 4), LENGTHS), min_size=1, max_size=3),
    padding=st.integers(0, 2),
    seed=st.integers(0, 2**20),
    shape=st.sampled_from([(1, 1, 16, 16), (3, 1, 16, 32), (4, 2, 24, 16), (2, 1, 20, 12)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    tree=st.booleans(),
    window=st.sampled_from([0, 0, 1, 3, 64, 100]),
    cap=st.sampled_from([0.0, 0.0, 2.0]),
)
def test_random_windows(rows, padding, seed, shape, dtype, tree, window, cap):
    counts, bases = [count for count, _ in rows], [base for _, base in rows]
    case = WindowCase(counts, bases, padding=padding, seed=seed, tree=tree)
    heads, kv_heads, key_dim, value_dim = shape
    check(
        case, heads=heads, kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim, dtype=dtype, window=window, cap=cap
    )


HEAD_SIZES = [(64, 64, 3, 1), (80, 80, 2, 1), (96, 96, 2, 1), (128, 128, 2, 2)]
HEAD_SIZES += [(192, 128, 2, 1), (256, 256, 2, 1), (576, 512, 5, 1)]


@pytest.mark.parametrize(("key_dim", "value_dim", "heads", "kv_heads"), HEAD_SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_head_sizes(key_dim, value_dim, heads, kv_heads, dtype):
    case = WindowCase([3, 2], [70, 0], padding=1, seed=key_dim)
    check(case, heads=heads, kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim, dtype=dtype)


@pytest.mark.parametrize("seed", range(4))
def test_trees_of_64_nodes(seed):
    check(WindowCase([64], [65 * seed % 128], seed=seed, tree=True, context=256), dtype=torch.float32)


@settings(max_examples=6, deadline=None)
@given(counts=st.lists(st.integers(1, 64), min_size=1, max_size=2), seed=st.integers(0, 2**20))
def test_random_trees(counts, seed):
    bases = [seed % 97, seed % 61][: len(counts)]
    check(WindowCase(counts, bases, seed=seed, tree=True, context=192), window=seed % 2 * 70)


@pytest.mark.parametrize(("base", "window"), [(0, 0), (63, 64), (200, 0)])
def test_a_prefill_chunk(base, window):
    check(WindowCase([100], [base], padding=4, context=320), window=window)


def test_the_whole_cache():
    check(WindowCase([4], [188]))
    check(WindowCase([64], [128], tree=True))


def test_only_padding():
    check(WindowCase([0, 0], [5, 0], padding=3))


def test_rows_on_the_reserved_slot():
    case = WindowCase([2, 1], [9, 0])
    case.slot_of_row[:] = case.num_slots - 1
    case.bases, case.counts = [9, 0], [2, 1]
    check(case)


def test_many_rows_and_few_splits():
    check(WindowCase([1, 2, 0, 1, 3, 1, 1, 2], [0, 64, 7, 128, 150, 1, 31, 63], padding=5))


@pytest.mark.parametrize("context", [64, 4096], ids=["one split", "64 splits"])
def test_the_number_of_splits(context):
    check(WindowCase([3], [60 if context == 64 else 900], context=context), value_dim=32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_a_float8_cache(dtype):
    check(WindowCase([3, 2], [70, 5], padding=1), heads=4, kv_heads=2, dtype=dtype, float8=True)


def test_wider_caches_than_queries():
    args = arguments(WindowCase([3], [70]))
    wide = expected(args)
    args[0] = args[0].bfloat16()
    assert_close(window_attention_triton(*args), wide, 2**-6)


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_a_token_depends_on_what_it_sees_only(tree):
    """The bits of a token are the same as the first of its window, later in it, and among other rows."""
    case = WindowCase([5], [126], tree=tree)
    if tree:
        case.ancestors[:] = torch.tensor([1, 3, 7, 15, 31])
    args = arguments(case)
    # One width for both, as `exact` has.
    window = window_attention_triton(*args)
    for own in range(5):
        alone = list(args)
        alone[0] = args[0].roll(-own, 0)
        alone[3] = args[3].roll(-own, 0)
        alone[4] = torch.tensor([0, 1], dtype=torch.int32)
        alone[5] = torch.tensor([126 + own], dtype=torch.int32)
        if tree:
            alone[7] = torch.ones(5, dtype=torch.int64)
        assert torch.equal(window_attention_triton(*alone)[0], window[own])


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda x: x.double(), "query has dtype float64; accepted: float32 or bfloat16 or float16"),
        (0, lambda x: x[..., :8], r"query has shape \[2, 2, 8\]; accepted: \[any, any, 16\]"),
        (0, lambda x: x[..., None, :].transpose(-1, -2), "query has shape"),
        (0, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), "query has strides"),
        (1, lambda x: x.int(), "key_cache has dtype int32"),
        (1, lambda x: x.to("meta"), "key_cache is on meta"),
        (2, lambda x: x.half(), "value_cache has dtype float16; accepted: float32"),
        (2, lambda x: x[:, :, :64], "value_cache has shape"),
        (3, lambda x: x.long(), "positions has dtype int64; accepted: int32"),
        (4, lambda x: x[:1], r"cu_tokens has shape \[1\]; accepted: \[2\]"),
        (6, lambda x: x.repeat(2), r"slot_of_row has shape \[2\]; accepted: \[1\]"),
        (7, lambda x: torch.ones(2, dtype=torch.int32), "ancestors has dtype int32; accepted: int64"),
        (9, lambda x: -1, "sliding_window is -1"),
        (11, lambda x: torch.ones(1), "key_scale is given"),
    ],
)
def test_what_the_kernels_cannot_take_is_refused(index, change, message):
    args = arguments(WindowCase([2], [5], context=128))
    args[index] = change(args[index])
    with pytest.raises(ValueError, match=message):
        window_attention_triton(*args)


def test_float16_and_bfloat16_do_not_mix():
    args = arguments(WindowCase([2], [5]), dtype=torch.float16)
    args[0] = args[0].bfloat16()
    with pytest.raises(ValueError, match="key_cache has dtype"):
        window_attention_triton(*args)
