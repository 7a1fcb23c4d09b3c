"""The ops of a forward on a real device against their references on the CPU, eagerly and replayed from a graph."""

from __future__ import annotations

import pytest
import torch
from window_cases import TOLERANCE, WindowCase, assert_close, attention_arguments, attention_expected, rotary_arguments

from draftgraph.kernels.compact_path import compact_path, compact_path_reference
from draftgraph.kernels.moe_experts import moe_experts, moe_experts_reference
from draftgraph.kernels.rope_and_cache import rope_and_cache, rope_and_cache_reference
from draftgraph.kernels.window_attention import window_attention

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch."))
SIZES = [(64, 64, 9, 3), (80, 80, 8, 8), (96, 96, 8, 2), (128, 128, 32, 8), (192, 128, 8, 8), (256, 256, 8, 2)]
SIZES += [(576, 512, 16, 1)]


def there(args):
    return [arg.to(DEVICE) if isinstance(arg, torch.Tensor) else arg for arg in args]


def case(*, tree=False, context=1088):
    return WindowCase([5, 1, 0, 16, 0], [700, 0, 64, 1023, 3], padding=4, context=context, tree=tree)


@DTYPES
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize(("key_dim", "value_dim", "heads", "kv_heads"), SIZES)
def test_window_attention(key_dim, value_dim, heads, kv_heads, tree, dtype):
    windows = case(tree=tree)
    for window, cap in ((0, 0.0), (128, 20.0)):
        args = attention_arguments(
            windows,
            heads=heads,
            kv_heads=kv_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            dtype=dtype,
            window=window,
            cap=cap,
        )
        # Weights are rounded to the operands' type, once per key.
        assert_close(window_attention(*there(args)).cpu(), attention_expected(args), 4 * TOLERANCE[dtype])


@pytest.mark.parametrize("size", [64, 128, 256])
def test_window_attention_with_a_float8_cache(size):
    args = attention_arguments(
        case(), heads=8, kv_heads=2, key_dim=size, value_dim=size, dtype=torch.bfloat16, float8=True
    )
    assert_close(window_attention(*there(args)).cpu(), attention_expected(args), 4 * TOLERANCE[torch.bfloat16])


@DTYPES
def test_a_prefill_chunk(dtype):
    args = attention_arguments(
        WindowCase([500], [300], padding=12, context=1088), heads=8, kv_heads=2, key_dim=128, value_dim=128, dtype=dtype
    )
    assert_close(window_attention(*there(args)).cpu(), attention_expected(args), 4 * TOLERANCE[dtype])


def test_a_tokens_bits_depend_on_what_it_sees_only():
    windows = WindowCase([8], [1000], context=1088)
    args = there(attention_arguments(windows, heads=32, kv_heads=8, key_dim=128, value_dim=128, dtype=torch.bfloat16))
    together = window_attention(*args)
    for own in range(8):
        alone = list(args)
        alone[0], alone[3] = args[0].roll(-own, 0), args[3].roll(-own, 0)
        alone[4] = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
        alone[5] = torch.tensor([1000 + own], dtype=torch.int32, device=DEVICE)
        assert torch.equal(window_attention(*alone)[0], together[own])


@DTYPES
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("size", "half"), [(64, 32), (80, 16), (128, 64), (256, 128)])
def test_rope_and_cache(size, half, interleaved, dtype):
    args = rotary_arguments(
        case(),
        heads=8,
        kv_heads=2,
        size=size,
        value_size=size,
        half=half,
        dtype=dtype,
        norm=True,
        unit_offset=interleaved,
        interleaved=interleaved,
    )
    device = there(args)
    assert_close(rope_and_cache(*device).cpu(), rope_and_cache_reference(*args), TOLERANCE[dtype])
    for index in (10, 11):
        assert_close(device[index][:-1].cpu(), args[index][:-1], TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize("width", [1, 8, 300])
def test_moe_experts(width, dtype):
    generator = torch.Generator().manual_seed(width)
    experts, top, hidden, inner = 16, 4, 512, 192

    def normal(*shape):
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    chosen = torch.stack([torch.randperm(experts, generator=generator)[:top] for _ in range(width)]).int()
    rows = torch.zeros(width, dtype=torch.int32)
    rows[width - width // 4 :] = -1
    weights = torch.rand(width, top, generator=generator)
    args = [hidden**0.5 * normal(width, hidden), chosen, weights, rows]
    args += [normal(experts, 2 * inner, hidden), normal(experts, hidden, inner), "silu"]
    # The inner values are rounded once, after sums of another order.
    assert_close(moe_experts(*there(args)).cpu(), moe_experts_reference(*args), 4 * TOLERANCE[dtype])


@pytest.mark.parametrize("depth", [1, 7, 64])
def test_compact_path(depth):
    generator = torch.Generator().manual_seed(depth)
    path = torch.randperm(64, generator=generator)[:depth].sort().values[None].int()
    index = [torch.tensor([i], dtype=torch.int32) for i in (depth, 30, 1)]
    caches = [torch.randn(4, 3, 2, 128, size, generator=generator).bfloat16() for size in (128, 512)]
    device = there([*caches, path, *index])
    compact_path(*device)
    compact_path_reference(*caches, path, *index)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(device[:2], caches, strict=True))


def test_a_graph_follows_the_lengths():
    """One capture, replayed after the windows have changed in place."""
    options = {"heads": 8, "kv_heads": 2, "key_dim": 128, "value_dim": 128, "dtype": torch.bfloat16}
    first = attention_arguments(WindowCase([3, 5], [10, 900], context=1088), **options)
    second = attention_arguments(WindowCase([7, 1], [1000, 0], context=1088, seed=1), **options)
    device = there(first)
    window_attention(*device)  # makes the workspace
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = window_attention(*device)
    for args in (first, second, first):
        for target, source in zip(device, args, strict=True):
            if isinstance(target, torch.Tensor):
                target.copy_(source)
        graph.replay()
        assert_close(output.cpu(), attention_expected(args), 4 * TOLERANCE[torch.bfloat16])
