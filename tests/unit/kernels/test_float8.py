"""float8 caches on the CPU: what the ops write and read is what torch's conversions give."""

from __future__ import annotations

import pytest
import torch

from draftgraph.kernels.float8 import FLOAT8, check_cache_scales, dequantize, quantize
from draftgraph.kernels.rope_and_cache import rope_and_cache
from draftgraph.kernels.window_attention import window_attention, window_attention_reference

SLOTS, HEADS, KV_HEADS, CONTEXT, SIZE, WIDTH = 3, 4, 2, 128, 16, 5


def test_quantizing_saturates_and_keeps_nan():
    scale = torch.tensor([2.0, 0.5])
    x = torch.tensor([[1e9, float("nan"), -1e9, 3.0], [0.25, -0.0, 1e9, 0.0]])
    values = dequantize(quantize(x, scale)[:, None], scale)[:, 0]
    expected = torch.tensor([[896.0, float("nan"), -896.0, 3.0], [0.25, -0.0, 224.0, 0.0]])
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


def window(base):
    return {
        "positions": torch.arange(WIDTH, dtype=torch.int32) + base,
        "cu_tokens": torch.tensor([0, WIDTH], dtype=torch.int32),
        "base": torch.tensor([base], dtype=torch.int32),
        "slot_of_row": torch.tensor([1], dtype=torch.int32),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_what_rope_and_cache_writes_attention_reads(dtype):
    key_scale, value_scale = torch.tensor([0.02, 0.01]), torch.tensor([0.015, 0.03])
    caches = [torch.zeros(SLOTS, KV_HEADS, CONTEXT, SIZE).to(FLOAT8) for _ in range(2)]
    wide = [torch.zeros(SLOTS, KV_HEADS, CONTEXT, SIZE, dtype=dtype) for _ in range(2)]
    tables = torch.randn(2, CONTEXT, SIZE // 2)
    for base in (0, WIDTH):
        where = window(base)
        qkv = torch.randn(WIDTH, (HEADS + 2 * KV_HEADS) * SIZE).to(dtype)
        slots, rows = torch.ones(WIDTH, dtype=torch.int32), torch.zeros(WIDTH, dtype=torch.int32)

        def rotate(caches, *scales, qkv=qkv, slots=slots, rows=rows, where=where):
            return rope_and_cache(
                qkv,
                None,
                None,
                *tables,
                where["positions"],
                slots,
                rows,
                where["cu_tokens"],
                where["base"],
                *caches,
                HEADS,
                1e-6,
                False,
                False,
                *scales,
            )

        query = rotate(caches, key_scale, value_scale)
        assert torch.equal(rotate(wide), query)
    for cache, plain, scale in zip(caches, wide, (key_scale, value_scale), strict=True):
        written = cache[1, :, : 2 * WIDTH]
        assert torch.equal(
            written.float(),
            (plain[1, :, : 2 * WIDTH].float() / scale[:, None, None]).clamp(-448, 448).to(FLOAT8).float(),
        )
    args = [query, *caches, *where.values(), None, 0.25, 0, 0.0, key_scale, value_scale]
    result, expected = window_attention(*args), window_attention_reference(*args)
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2 if dtype == torch.bfloat16 else 1e-5)


def test_scales_come_with_float8_caches_and_not_without():
    cache, scale = torch.zeros(SLOTS, KV_HEADS, CONTEXT, SIZE), torch.ones(KV_HEADS)
    with pytest.raises(ValueError, match="key_scale is given, and the cache"):
        check_cache_scales(cache, cache, scale, None, torch.device("cpu"))
    with pytest.raises(ValueError, match="key_scale is missing, and the cache"):
        check_cache_scales(cache.to(FLOAT8), cache, None, None, torch.device("cpu"))
    with pytest.raises(ValueError, match="key_cache has shape"):
        check_cache_scales(cache[0], cache, None, None, torch.device("cpu"))
    check_cache_scales(cache, cache, None, None, torch.device("cpu"))
