"""The Triton kernels of `window_attention`: the cache is read in parallel splits, whose results are then combined.

A split is a fixed range of cached positions, whatever the lengths, and inside it keys come in fixed blocks. So what a
query attends to is summed in one order, and its result depends, bit for bit, only on what it sees: blocks and splits
that it does not see add exact zeros or are not read.
"""

from __future__ import annotations

from typing import Any

import torch

from .float8 import FLOAT8, check_cache_scales, decode_e4m3
from .triton_support import INTERPRETED, check_some, check_tensor, jit, on_amd, round_to, tl
from .window_attention_sizes import combine_config, launch_config, launch_options
from .workspace import workspace

OPERANDS: dict[str, Any] = {} if tl is None else {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16}
"""Types in which products are taken."""
_SIZES = (
    "sliding_window",
    "num_rows",
    "context",
    "partial_size",
    "split_size",
    "num_splits",
    "num_heads",
    "group",
)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@jit
def _load_keys(cache, places, stride, loaded, FIRST: tl.constexpr, SIZE: tl.constexpr, END: tl.constexpr, operand):  # type: ignore[no-untyped-def]
    # [places, SIZE], zero where not loaded, in the type of the products' operands.
    at = FIRST + tl.arange(0, SIZE)
    mask = loaded[:, None]
    if FIRST + SIZE > END:
        mask = mask & (at < END)[None, :]
    x = tl.load(cache + places.to(tl.int64)[:, None] * stride + at[None, :], mask=mask, other=0)
    if cache.dtype.element_ty == tl.uint8:
        return decode_e4m3(x).to(operand)
    return x.to(operand)


@jit(unspecialized=_SIZES)
def attend_kernel(  # type: ignore[no-untyped-def]  # noqa: D103
    query,
    key_cache,
    value_cache,
    positions,
    cu_tokens,
    base,
    slot_of_row,
    ancestors,
    key_scale,
    value_scale,
    output,
    partial,
    scale,
    soft_cap,
    sliding_window,
    num_rows,
    context,
    query_stride,
    query_head_stride,
    key_slot_stride,
    key_head_stride,
    key_stride,
    value_slot_stride,
    value_head_stride,
    value_stride,
    partial_size,
    split_size,
    num_splits,
    num_heads,
    group,
    ROWS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_1: tl.constexpr,
    KEY_2: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_1: tl.constexpr,
    VALUE_2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SLIDING: tl.constexpr,
    OPERAND: tl.constexpr,
):
    # One program per tile of queries, key head and split. A tile holds BLOCK_M of one row's (token, head of the group)
    # pairs, token by token. Which row and which of its tiles this program has follows from the rows' token counts.
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    rows = tl.arange(0, ROWS)
    begins = tl.load(cu_tokens + rows, mask=rows < num_rows, other=0)
    ends = tl.load(cu_tokens + rows + 1, mask=rows < num_rows, other=0)
    tiles = ((ends - begins) * group + BLOCK_M - 1) // BLOCK_M
    tiles_through = tl.cumsum(tiles, 0)
    row = tl.sum((tiles_through <= tile).to(tl.int32), 0)
    # The grid has a tile for the worst way that tokens can lie in rows.
    if row >= ROWS:
        return
    tile -= tl.sum(tl.where(rows == row, tiles_through - tiles, 0), 0)
    first = tl.load(cu_tokens + row)
    count = tl.load(cu_tokens + row + 1) - first
    start = tl.load(base + row)
    slot = tl.load(slot_of_row + row).to(tl.int64)

    pair = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    own = pair // group
    head = kv_head * group + pair % group
    real = own < count
    token = first + tl.minimum(own, count - 1)
    stop = start + (tl.minimum(tl.max(own, 0), count - 1) + 1 if ancestors is None else count)
    stop = tl.minimum(stop, context)
    left = 0
    query_position = tl.load(positions + token)
    if SLIDING:
        left = tl.minimum(tl.maximum(tl.min(query_position, 0) - sliding_window + 1, 0), start)
    begin = tl.maximum(split * split_size, left // BLOCK_N * BLOCK_N)
    end = tl.minimum(split * split_size + split_size, stop)
    if begin >= end:
        return

    at_1 = tl.arange(0, KEY_1)
    query_at = query + token.to(tl.int64)[:, None] * query_stride + head[:, None] * query_head_stride
    query_1 = tl.load(query_at + at_1[None, :], mask=real[:, None] & (at_1 < KEY_DIM)[None, :], other=0).to(OPERAND)
    if KEY_2 > 0:
        at_2 = KEY_1 + tl.arange(0, KEY_2)
        mask_2 = real[:, None] & (at_2 < KEY_DIM)[None, :]
        query_2 = tl.load(query_at + at_2[None, :], mask=mask_2, other=0).to(OPERAND)
    if ancestors is not None:
        seen = tl.load(ancestors + token)

    keys = key_cache + slot * key_slot_stride + kv_head * key_head_stride
    values = value_cache + slot * value_slot_stride + kv_head * value_head_stride
    if key_scale is not None:
        scale *= tl.load(key_scale + kv_head)
    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    sum_1 = tl.zeros((BLOCK_M, VALUE_1), tl.float32)
    if VALUE_2 > 0:
        sum_2 = tl.zeros((BLOCK_M, VALUE_2), tl.float32)
    for block in range(begin, end, BLOCK_N):
        place = block + tl.arange(0, BLOCK_N)
        # What is not loaded counts as zero: the cache may hold anything where nothing was written.
        loaded = (place >= left) & (place < stop)
        key_1 = _load_keys(keys, place, key_stride, loaded, 0, KEY_1, KEY_DIM, OPERAND)
        score = tl.dot(query_1, tl.trans(key_1), input_precision="ieee")
        if KEY_2 > 0:
            key_2 = _load_keys(keys, place, key_stride, loaded, KEY_1, KEY_2, KEY_DIM, OPERAND)
            score = tl.dot(query_2, tl.trans(key_2), score, input_precision="ieee")
        score *= scale
        if SOFT_CAP:
            score = soft_cap * (1.0 - 2.0 / (tl.exp(score * (2.0 / soft_cap)) + 1.0))
        held = place - start
        if ancestors is None:
            visible = held[None, :] <= own[:, None]
        else:
            bit = (seen[:, None] >> tl.minimum(tl.maximum(held, 0), 63).to(tl.int64)[None, :]) & 1
            visible = (held < 0)[None, :] | ((held < count)[None, :] & (bit == 1))
        visible = visible & loaded[None, :]
        if SLIDING:
            window_at = first + tl.minimum(tl.maximum(held, 0), count - 1)
            key_position = tl.where(held < 0, place, tl.load(positions + window_at))
            visible = visible & (key_position[None, :] > query_position[:, None] - sliding_window)
        # Powers of two: exp(x) = 2**(x * log2(e)).
        score = tl.where(visible, score * 1.4426950408889634, float("-inf"))
        highest = tl.maximum(maximum, tl.max(score, 1))
        finite = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp2(score - finite[:, None])
        shrink = tl.exp2(maximum - finite)
        total = total * shrink + tl.sum(weight, 1)
        maximum = highest
        weight = weight.to(OPERAND)
        value_1 = _load_keys(values, place, value_stride, loaded, 0, VALUE_1, VALUE_DIM, OPERAND)
        sum_1 = tl.dot(weight, value_1, sum_1 * shrink[:, None], input_precision="ieee")
        if VALUE_2 > 0:
            value_2 = _load_keys(values, place, value_stride, loaded, VALUE_1, VALUE_2, VALUE_DIM, OPERAND)
            sum_2 = tl.dot(weight, value_2, sum_2 * shrink[:, None], input_precision="ieee")

    value_1_at = tl.arange(0, VALUE_1)
    mask_1 = real[:, None] & (value_1_at < VALUE_DIM)[None, :]
    place_of = (token * num_heads + head).to(tl.int64)
    if partial is None:
        factor = 1.0 / tl.where(total > 0.0, total, 1.0)
        if value_scale is not None:
            factor *= tl.load(value_scale + kv_head)
        target = output + place_of[:, None] * VALUE_DIM
        kind: tl.constexpr = output.dtype.element_ty
        tl.store(target + value_1_at[None, :], round_to(sum_1 * factor[:, None], kind), mask=mask_1)
        if VALUE_2 > 0:
            value_2_at = VALUE_1 + tl.arange(0, VALUE_2)
            mask_2 = real[:, None] & (value_2_at < VALUE_DIM)[None, :]
            tl.store(target + value_2_at[None, :], round_to(sum_2 * factor[:, None], kind), mask=mask_2)
    else:
        # The workspace: the sums of values, then the maxima, then the sums of weights.
        part = place_of * num_splits + split
        target = partial + part[:, None] * VALUE_DIM
        tl.store(target + value_1_at[None, :], sum_1, mask=mask_1)
        if VALUE_2 > 0:
            value_2_at = VALUE_1 + tl.arange(0, VALUE_2)
            mask_2 = real[:, None] & (value_2_at < VALUE_DIM)[None, :]
            tl.store(target + value_2_at[None, :], sum_2, mask=mask_2)
        maxima = partial + partial_size.to(tl.int64) * VALUE_DIM
        tl.store(maxima + part, maximum, mask=real)
        tl.store(maxima + partial_size + part, total, mask=real)


@jit(unspecialized=_SIZES)
def combine_kernel(  # type: ignore[no-untyped-def]  # noqa: D103
    positions,
    cu_tokens,
    base,
    ancestors,
    value_scale,
    output,
    partial,
    sliding_window,
    num_rows,
    context,
    partial_size,
    num_heads,
    group,
    split_size,
    num_splits,
    ROWS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    SLIDING: tl.constexpr,
):
    # One program per token and head; the splits are added in the order of their positions.
    token = tl.program_id(0)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK_VALUE)
    inside = at < VALUE_DIM
    target = output + (token * num_heads + head).to(tl.int64) * VALUE_DIM + at
    kind: tl.constexpr = output.dtype.element_ty
    rows = tl.arange(0, ROWS)
    ends = tl.load(cu_tokens + rows + 1, mask=rows < num_rows, other=2147483647)
    row = tl.sum((ends <= token).to(tl.int32), 0)
    if row >= num_rows:
        tl.store(target, tl.zeros((BLOCK_VALUE,), kind), mask=inside)
        return
    first = tl.load(cu_tokens + row)
    start = tl.load(base + row)
    # A chain's token sees the window up to itself, a tree's may see all of it.
    stop = start + (token + 1 if ancestors is None else tl.load(cu_tokens + row + 1)) - first
    stop = tl.minimum(stop, context)
    left = 0
    if SLIDING:
        left = tl.minimum(tl.maximum(tl.load(positions + token) - sliding_window + 1, 0), start)

    maxima = partial + partial_size.to(tl.int64) * VALUE_DIM
    part = (token * num_heads + head).to(tl.int64) * num_splits
    maximum = float("-inf")
    total = 0.0
    result = tl.zeros((BLOCK_VALUE,), tl.float32)
    for block in range(
        left // split_size // BLOCK_SPLITS * BLOCK_SPLITS, (stop + split_size - 1) // split_size, BLOCK_SPLITS
    ):
        split = block + tl.arange(0, BLOCK_SPLITS)
        seen = (split * split_size + split_size > left) & (split * split_size < stop)
        highest = tl.load(maxima + part + split, mask=seen, other=float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(highest, 0))
        finite = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weight = tl.exp2(highest - finite)
        shrink = tl.exp2(maximum - finite)
        totals = tl.load(maxima + partial_size + part + split, mask=seen, other=0.0)
        total = total * shrink + tl.sum(weight * totals, 0)
        sums = tl.load(
            partial + (part + split)[:, None] * VALUE_DIM + at[None, :],
            mask=seen[:, None] & inside[None, :],
            other=0.0,
        )
        result = result * shrink + tl.sum(weight[:, None] * sums, 0)
        maximum = new_maximum
    factor = 1.0 / tl.where(total > 0.0, total, 1.0)
    if value_scale is not None:
        factor *= tl.load(value_scale + head // group)
    tl.store(target, round_to(result * factor, kind), mask=inside)


def _operand_type(query: torch.dtype, cache: torch.dtype) -> torch.dtype:
    """The type in which products are taken: the cache's, or the query's if the cache is of float8.

    Raises:
        ValueError: one is float16 and the other bfloat16.
    """
    if cache in (FLOAT8, query):
        return query
    if torch.float32 in (query, cache):
        return torch.float32
    raise ValueError(f"key_cache has dtype {cache}; accepted with queries of {query}: that, float32 or {FLOAT8}")


def _kernel_type(operand: torch.dtype) -> Any:
    """Triton's type of the operands. The interpreter multiplies numbers of bfloat16 as if they were integers."""
    if operand == torch.bfloat16 and not INTERPRETED:
        return OPERANDS["bf16"]
    return OPERANDS["fp16" if operand == torch.float16 else "fp32"]


def window_attention_triton(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    positions: torch.Tensor,
    cu_tokens: torch.Tensor,
    base: torch.Tensor,
    slot_of_row: torch.Tensor,
    ancestors: torch.Tensor | None,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """The launches for CUDA tensors, or for CPU tensors under the interpreter.

    The grid and the workspace depend on shapes only. A token that sees nothing gives zeros.

    Raises:
        ValueError: an argument that the kernels could not take.
    """
    device = query.device
    check_cache_scales(key_cache, value_cache, key_scale, value_scale, device)
    num_slots, num_kv_heads, context, key_dim = key_cache.shape
    for what, count in (
        ("slot", num_slots),
        ("head", num_kv_heads),
        ("position", context),
        ("number per key", key_dim),
    ):
        check_some("key_cache", what, count)
    value_dim = value_cache.shape[3]
    check_tensor("query", query, dtypes=_FLOATS, shape=(None, None, key_dim), contiguous=False)
    width, num_heads, _ = query.shape
    check_some("query", "head", num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(f"query has {num_heads} heads; accepted: a multiple of the caches' {num_kv_heads}")
    cache_kinds = (*_FLOATS, FLOAT8)
    sizes = (num_slots, num_kv_heads, context)
    check_tensor("key_cache", key_cache, dtypes=cache_kinds, shape=(*sizes, key_dim), device=device, contiguous=False)
    same = (key_cache.dtype,)
    check_tensor("value_cache", value_cache, dtypes=same, shape=(*sizes, value_dim), device=device, contiguous=False)
    operand = _kernel_type(_operand_type(query.dtype, key_cache.dtype))
    bytes_each = 4 if operand == OPERANDS["fp32"] else 2
    rows, int32 = base.shape[0], (torch.int32,)
    check_tensor("base", base, dtypes=int32, shape=(None,), device=device)
    check_tensor("slot_of_row", slot_of_row, dtypes=int32, shape=(rows,), device=device)
    check_tensor("cu_tokens", cu_tokens, dtypes=int32, shape=(rows + 1,), device=device)
    check_tensor("positions", positions, dtypes=int32, shape=(width,), device=device)
    if ancestors is not None:
        check_tensor("ancestors", ancestors, dtypes=(torch.int64,), shape=(width,), device=device)
    if sliding_window < 0 or soft_cap < 0.0:
        raise ValueError(f"sliding_window is {sliding_window} and soft_cap {soft_cap}; accepted: 0 for none, or more")
    if width == 0 or rows == 0:
        return query.new_zeros((width, num_heads, value_dim))

    constants = launch_config(
        width=width,
        rows=rows,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        context=context,
        key_dim=key_dim,
        value_dim=value_dim,
        bytes_each=bytes_each,
    )
    options = launch_options(constants, bytes_each, on_amd(), sliding=sliding_window > 0)
    num_splits, block_m = constants["num_splits"], constants["BLOCK_M"]
    partial_size = width * num_heads * num_splits
    partial: torch.Tensor | None = None
    if num_splits == 1:
        output = query.new_zeros((width, num_heads, value_dim))
    else:
        output = query.new_empty((width, num_heads, value_dim))
        partial = workspace("window_attention", partial_size * (value_dim + 2), torch.float32, device)
    if key_scale is not None:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    tiles = (width * constants["group"] + rows * (block_m - 1)) // block_m
    attend_kernel[(tiles, num_kv_heads, num_splits)](
        query,
        key_cache,
        value_cache,
        positions,
        cu_tokens,
        base,
        slot_of_row,
        ancestors,
        key_scale,
        value_scale,
        output,
        partial,
        scale,
        soft_cap,
        sliding_window,
        rows,
        context,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        partial_size,
        SOFT_CAP=soft_cap > 0.0,
        SLIDING=sliding_window > 0,
        OPERAND=operand,
        **constants,
        **options,
    )
    if num_splits > 1:
        combine_kernel[(width, num_heads)](
            positions,
            cu_tokens,
            base,
            ancestors,
            value_scale,
            output,
            partial,
            sliding_window,
            rows,
            context,
            partial_size,
            SLIDING=sliding_window > 0,
            num_warps=4,
            **combine_config(constants),
        )
    return output
