"""The Triton kernels of `window_attention` against its reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from window_cases import TOLERANCE, WindowCase, assert_close, attention_arguments, attention_expected

from draftgraph.kernels.window_attention_triton import window_attention_triton


def check(case, **options):
    args = attention_arguments(case, **options)
    ours = window_attention_triton(*args)
    assert ours.dtype == args[0].dtype
    assert_close(ours, attention_expected(args), TOLERANCE[args[0].dtype])
    assert (ours[case.rows < 0] == 0).all()


LENGTHS = st.sampled_from([0, 1, 2, 62, 63, 64, 65, 126, 127, 128, 129, 180])


@settings(max_examples=20, deadline=None)
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


SHAPES = {
    "chain": lambda j: j - 1,
    "star": lambda j: 0,
    "binary": lambda j: (j - 1) // 2,
    "comb": lambda j: max(j - 2, 0) if j % 2 else j - 1,
    "two chains": lambda j: max(j - 2, 0),
    "brush at the end": lambda j: min(j - 1, 31),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_a_tree_of_64_nodes(shape):
    """The last node's bit is the sign of its mask."""
    case = WindowCase([64], [63], tree=True, parent_of=SHAPES[shape], context=192)
    assert (case.ancestors < 0).any()
    check(case, dtype=torch.bfloat16 if shape == "binary" else torch.float32)


@settings(max_examples=6, deadline=None)
@given(counts=st.lists(st.integers(1, 64), min_size=1, max_size=2), seed=st.integers(0, 2**20))
def test_random_trees(counts, seed):
    bases = [seed % 97, seed % 61][: len(counts)]
    check(WindowCase(counts, bases, seed=seed, tree=True, context=192), window=seed % 2 * 70)


@pytest.mark.parametrize(("base", "window"), [(0, 0), (63, 64), (200, 0)])
def test_a_prefill_chunk(base, window):
    check(WindowCase([100], [base], padding=4, context=320), window=window)


@pytest.mark.parametrize("size", [16, 192, 256])
def test_the_larger_tiles_of_two_byte_types(size):
    """Float32 operands, which stand in for bfloat16 under the interpreter, have tiles of 16 queries only."""
    heads = 1 if size == 16 else 2
    check(WindowCase([70], [63], padding=1), heads=heads, key_dim=size, value_dim=size, dtype=torch.float16)
    check(WindowCase([20, 9], [63, 5], tree=True), key_dim=size, value_dim=size, dtype=torch.float16, window=32)


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
    args = attention_arguments(WindowCase([3], [70]))
    wide = attention_expected(args)
    args[0] = args[0].bfloat16()
    assert_close(window_attention_triton(*args), wide, 2**-6)


@pytest.fixture
def rows_alike(monkeypatch):
    """The interpreter's products round all rows of a matrix alike, as a GPU does; some BLAS on a CPU does not."""
    matmul = np.matmul

    def row_by_row(a, b, **options):
        assert a.ndim == 2
        return np.concatenate([matmul(a[row : row + 1], b, **options) for row in range(len(a))])

    monkeypatch.setattr(np, "matmul", row_by_row)


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_a_token_depends_on_what_it_sees_only(tree, rows_alike):
    """The bits of a token are the same as the first of its window, later in it, and among other rows."""
    case = WindowCase([5], [126], tree=tree)
    if tree:
        case.ancestors[:] = torch.tensor([1, 3, 7, 15, 31])
    args = attention_arguments(case)
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
    args = attention_arguments(WindowCase([2], [5], context=128))
    args[index] = change(args[index])
    with pytest.raises(ValueError, match=message):
        window_attention_triton(*args)


def test_float16_and_bfloat16_do_not_mix():
    args = attention_arguments(WindowCase([2], [5]), dtype=torch.float16)
    args[0] = args[0].bfloat16()
    with pytest.raises(ValueError, match="key_cache has dtype"):
        window_attention_triton(*args)
