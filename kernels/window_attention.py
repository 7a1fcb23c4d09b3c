"""Attention of packed windows over the rows' caches: prefill chunks, chains and trees."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from .float8 import dequantize
from .registration import define_op
from .triton_support import KernelSpec, constants_of
from .window_attention_sizes import combine_config, launch_config, launch_options
from .window_attention_triton import OPERANDS, attend_kernel, combine_kernel, window_attention_triton

# Slices of the cache start and end at multiples of it.
_BLOCK = 64
# The number of query rows of an SDPA call is a multiple of these. MKL's products take other paths for the rows that are
# left over, in float32 on Intel processors from head size 128 on at up to 16 of them.
_ROWS = {torch.float32: 16}
_ROWS_OTHERWISE = 4
_MOST_ROWS = 16


def window_attention_reference(
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
    """The specification of `window_attention`: no host read, no shape that depends on data."""
    width, num_heads, _ = query.shape
    context = key_cache.shape[2]
    group = num_heads // key_cache.shape[1]
    token = torch.arange(width, device=query.device)
    cached = torch.arange(context, device=query.device)

    row = torch.searchsorted(cu_tokens[1:].contiguous(), token, right=True)
    padding = row >= base.shape[0]
    row = row.clamp(max=base.shape[0] - 1)
    first, count = cu_tokens[row], cu_tokens[row + 1] - cu_tokens[row]
    own = token - first
    # Which window token a cached position holds: negative in the committed part, `count` or more after it.
    held = cached[None, :] - base[row][:, None]
    in_window = (held >= 0) & (held < count[:, None])
    if ancestors is None:
        in_window &= held <= own[:, None]
    else:
        in_window &= (ancestors[:, None] >> held.clamp(0, 63)) & 1 == 1
    visible = (held < 0) | in_window
    if sliding_window > 0:
        window_position = positions[(first[:, None] + held).clamp(0, width - 1)]
        key_position = torch.where(held < 0, cached[None, :], window_position)
        visible &= key_position > positions[:, None] - sliding_window

    keys, values = key_cache[slot_of_row[row]].float(), value_cache[slot_of_row[row]].float()
    if key_scale is not None and value_scale is not None:
        keys, values = dequantize(keys, key_scale), dequantize(values, value_scale)
    keys, values = (x.repeat_interleave(group, dim=1, output_size=num_heads) for x in (keys, values))
    scores = torch.einsum("whd,whsd->whs", query.float(), keys) * scale
    if soft_cap > 0.0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~visible[:, None, :], float("-inf"))
    # Zero, not uninitialised memory, where a hidden position holds what was never written.
    values = torch.where(visible[:, None, :, None], values, 0.0)
    result = torch.einsum("whs,whsd->whd", torch.softmax(scores, dim=-1), values)
    return torch.where(padding[:, None, None], 0.0, result).to(query.dtype)


@functools.lru_cache(maxsize=8)
def _chain_mask(group: int, capacity: int, dtype: torch.dtype) -> torch.Tensor:
    """The mask of 64 chain tokens whose cached positions are the last 64 of `capacity`: 0 or minus infinity.

    [64 * group + 3, capacity]: a row per token and head of a group, token by token, so that any run of tokens
    and any shorter context is a slice. Three rows more let a run be filled up to a multiple of 4.
    """
    token = torch.arange(_BLOCK * group + _MOST_ROWS - 1) // group + capacity - _BLOCK
    hidden = torch.arange(capacity)[None, :] > token[:, None]
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    soft_cap: float,
) -> torch.Tensor:
    """Softmax attention of `query[1, H, M, D]` over `key[1, H, N, D]` with an additive `mask[1, 1, M, N]`."""
    if soft_cap == 0.0:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    scores = (query.float() @ key.float().transpose(-1, -2)) * scale
    scores = soft_cap * torch.tanh(scores / soft_cap) + mask.float()
    return (torch.softmax(scores, dim=-1) @ value.float()).to(query.dtype)


def _slot_slice(cache: torch.Tensor, slot: int, left: int, stop: int) -> torch.Tensor:
    """`cache[slot, None, :, left:stop]`, in one call instead of three."""
    _, heads, _, size = cache.shape
    strides = cache.stride()
    offset = cache.storage_offset() + slot * strides[0] + left * strides[2]
    return cache.as_strided((1, heads, stop - left, size), strides, offset)


def _visibility_mask(
    positions: torch.Tensor | None,
    ancestors: torch.Tensor | None,
    tokens: tuple[int, int],
    count: int,
    base: int,
    keys: tuple[int, int],
    sliding_window: int,
) -> torch.Tensor:
    """Which cached positions the window tokens `tokens` of one row see, bool [tokens, keys].

    Args:
        positions: [count], of the row's window; needed for a sliding window.
        ancestors: [count] or None.
        tokens: the range of window tokens that ask.
        count: the tokens of the window.
        base: the cached position of window token 0.
        keys: the range of cached positions that are asked about.
        sliding_window: 0 for none.
    """
    cached = torch.arange(keys[0], keys[1])
    held = cached - base
    if ancestors is None:
        visible = held[None, :] <= torch.arange(tokens[0], tokens[1])[:, None]
    else:
        bits = (ancestors[tokens[0] : tokens[1], None] >> held.clamp(0, 63)) & 1
        visible = (held < 0) | ((held < count) & (bits == 1))
    if positions is not None:
        key_position = torch.where(held < 0, cached, positions[held.clamp(0, count - 1)])
        visible = visible & (key_position > positions[tokens[0] : tokens[1], None] - sliding_window)
    return visible


def _additive(visible: torch.Tensor, group: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """0 where visible, minus infinity elsewhere: [rows, keys], each token repeated for its group's heads."""
    mask = torch.zeros((rows, visible.shape[1]), dtype=dtype)
    repeated = visible.repeat_interleave(group, dim=0)
    mask[: repeated.shape[0]].masked_fill_(~repeated, float("-inf"))
    return mask


def _runs(reach: Sequence[int]) -> list[tuple[int, int]]:
    """Cuts `0..len(reach)` into runs whose `reach // 64` is the same."""
    if reach[0] // _BLOCK == reach[-1] // _BLOCK and isinstance(reach, range):
        return [(0, len(reach))]
    starts = [i for i in range(len(reach)) if i == 0 or reach[i] // _BLOCK != reach[i - 1] // _BLOCK]
    return list(zip(starts, [*starts[1:], len(reach)], strict=True))


def _window_attention_cpu(
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
    """The CPU implementation: one SDPA call per row and 64-block of the cache that the row's tokens reach.

    So a token's result depends, bit for bit, on what it sees only, and not on how many tokens its window has:
    its own block decides where the slice of the cache ends, and the number of query rows is a multiple of `_ROWS`.
    Plain decoding and verification then agree.
    """
    width, num_heads, head_dim = query.shape
    num_kv_heads, value_dim = value_cache.shape[1], value_cache.shape[3]
    group = num_heads // num_kv_heads
    multiple = _ROWS.get(query.dtype, _ROWS_OTHERWISE)
    grouped = query.view(width, num_kv_heads, group, head_dim)
    output: torch.Tensor | None = None
    bounds = cu_tokens.tolist()
    for row, (start, slot) in enumerate(zip(base.tolist(), slot_of_row.tolist(), strict=True)):
        first, count = bounds[row], bounds[row + 1] - bounds[row]
        if count == 0:
            continue
        row_positions = row_ancestors = None
        reach: Sequence[int] = range(start, start + count)
        numbers: Sequence[int] = reach
        if sliding_window > 0:
            row_positions = positions[first : first + count]
            numbers = row_positions.tolist()
        if ancestors is not None:
            row_ancestors = ancestors[first : first + count]
            # The last window token that each one sees; bit 63 makes a mask negative.
            reach = [start + (m & (2**64 - 1)).bit_length() - 1 for m in row_ancestors.tolist()]

        for begin, end in _runs(reach):
            stop = (reach[begin] // _BLOCK + 1) * _BLOCK
            left = 0
            if sliding_window > 0:
                oldest = min(numbers[begin:end]) // _BLOCK * _BLOCK - sliding_window + 1
                left = max(min(oldest, start), 0) // _BLOCK * _BLOCK
            tokens, length = end - begin, stop - left
            rows = -(-tokens * group // multiple) * multiple
            if row_ancestors is None and (sliding_window == 0 or max(numbers[begin:end]) < sliding_window):
                capacity = max(1024, 1 << (stop - 1).bit_length())
                offset = (reach[begin] % _BLOCK * group + 1) * capacity - length
                mask = _chain_mask(group, capacity, query.dtype).as_strided(
                    (1, 1, rows, length), (0, 0, capacity, 1), offset
                )
            else:
                visible = _visibility_mask(
                    row_positions, row_ancestors, (begin, end), count, start, (left, stop), sliding_window
                )
                mask = _additive(visible, group, rows, query.dtype)[None, None]

            # The tokens and heads of a group are the query rows of their key head.
            filled = rows != tokens * group
            shape = (1, num_kv_heads, rows, head_dim)
            asked = query.new_zeros(shape) if filled else query.new_empty(shape)
            asked.as_strided(
                (tokens, num_kv_heads, group, head_dim), (group * head_dim, rows * head_dim, head_dim, 1)
            ).copy_(grouped[first + begin : first + end])
            key, value = _slot_slice(key_cache, slot, left, stop), _slot_slice(value_cache, slot, left, stop)
            if key_scale is not None and value_scale is not None:
                key = dequantize(key, key_scale).to(query.dtype)
                value = dequantize(value, value_scale).to(query.dtype)
            result = _attend(asked, key, value, mask, scale, soft_cap)
            _, head_stride, row_stride, _ = result.stride()
            result = result.as_strided(
                (tokens, num_kv_heads, group, value_dim), (group * row_stride, head_stride, row_stride, 1)
            )
            if tokens == width:
                # With one query head per key head the reshape alone would be a view, which compiled code, told of dense
                # strides by the fake, would misread.
                return result.reshape(width, num_heads, value_dim).contiguous()
            if output is None:
                output = query.new_zeros((width, num_kv_heads, group, value_dim))
            output[first + begin : first + end].copy_(result)
    if output is None:
        return query.new_zeros((width, num_heads, value_dim))
    return output.view(width, num_heads, value_dim)


def _window_attention_fake(
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
    return query.new_empty((query.shape[0], query.shape[1], value_cache.shape[3]))


def kernel_specs() -> list[KernelSpec]:
    """Every head size, element type and option that a model can ask for, for verifies and prefill chunks."""
    verify: dict[str, Any] = {"width": 8, "rows": 1}
    prefill: dict[str, Any] = {"width": 256, "rows": 1}
    # Where it is left out, the second kernel is like that of another size.
    alone: dict[str, Any] = {"with_combine": False}
    specs: list[KernelSpec] = []
    for size in (64, 80, 96, 128, 192, 256):
        specs += _specs(f"{size}, bf16", "bf16", size, size, **verify, with_combine=size in (64, 96, 128, 256))
        if size <= 128:  # larger ones have the same tiles in a prefill
            specs += _specs(f"{size}, bf16, prefill", "bf16", size, size, **prefill, with_combine=size == 128)
    specs += _specs("512, bf16", "bf16", 512, 512, heads=(16, 2), **verify)
    specs += _specs("128, fp16", "fp16", 128, 128, **verify)
    specs += _specs("128, fp32", "fp32", 128, 128, **verify)
    specs += _specs("128, fp32, prefill", "fp32", 128, 128, **prefill)
    specs += _specs("256, fp32, prefill", "fp32", 256, 256, **prefill)
    specs += _specs("576 and 512, fp32", "fp32", 576, 512, heads=(16, 1), **verify, **alone)
    specs += _specs("128, bf16, float8 cache", "bf16", 128, 128, float8=True, **verify)
    specs += _specs("128, bf16, float8 cache, prefill", "bf16", 128, 128, float8=True, **prefill, **alone)
    specs += _specs("128, bf16, tree", "bf16", 128, 128, width=64, rows=1, tree=True)
    specs += _specs("128, bf16, 16 rows", "bf16", 128, 128, width=128, rows=16)
    specs += _specs("256, bf16, sliding, soft cap, tree", "bf16", 256, 256, sliding=True, cap=True, tree=True, **verify)
    specs += _specs("192 and 128, bf16", "bf16", 192, 128, heads=(128, 128), **verify, **alone)
    specs += _specs("576 and 512, bf16", "bf16", 576, 512, heads=(128, 1), **verify)
    specs += _specs("576 and 512, bf16, tree", "bf16", 576, 512, heads=(128, 1), tree=True, width=64, rows=1)
    specs += _specs("576 and 512, bf16, float8 cache", "bf16", 576, 512, heads=(16, 1), float8=True, **verify)
    return specs


def _specs(
    variant: str,
    kind: str,
    key_dim: int,
    value_dim: int,
    *,
    width: int,
    rows: int,
    heads: tuple[int, int] = (32, 8),
    tree: bool = False,
    sliding: bool = False,
    cap: bool = False,
    float8: bool = False,
    with_combine: bool = True,
) -> list[KernelSpec]:
    """The two kernels of one launch, at 4,096 cached positions per row."""
    length, context, element = 4096, 8256, 4 if kind == "fp32" else 2
    num_heads, num_kv_heads = heads
    constants = launch_config(
        width=width,
        rows=rows,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        context=context,
        key_dim=key_dim,
        value_dim=value_dim,
        bytes_each=element,
    )
    options = launch_options(constants, element, False, sliding=sliding)
    shared: dict[str, str] = dict.fromkeys(["positions", "cu_tokens", "base"], "*i32")
    shared |= {"output": f"*{kind}", "partial": "*fp32", "sliding_window": "i32", "num_rows": "i32"}
    shared |= dict.fromkeys(["context", "partial_size", "split_size", "num_splits"], "i32")
    shared |= {"num_heads": "i32", "group": "i32"}
    absent: dict[str, Any] = {"SLIDING": sliding}
    if tree:
        shared["ancestors"] = "*i64"
    else:
        absent["ancestors"] = None
    if float8:
        shared["value_scale"] = "*fp32"
    else:
        absent["value_scale"] = None

    cache = "*u8" if float8 else f"*{kind}"
    arguments = shared | {"query": f"*{kind}", "key_cache": cache, "value_cache": cache, "slot_of_row": "*i32"}
    arguments |= {"scale": "fp32", "soft_cap": "fp32"}
    for stride in ("query_", "query_head_", "key_slot_", "key_head_", "key_", "value_slot_", "value_head_", "value_"):
        arguments[f"{stride}stride"] = "i32:16"
    full = constants_of(constants) | absent | {"SOFT_CAP": cap, "OPERAND": OPERANDS[kind]}
    if float8:
        arguments["key_scale"] = "*fp32"
    else:
        full["key_scale"] = None
    if constants["num_splits"] == 1:
        del arguments["partial"]
        full["partial"] = None
    heads_moved = width * num_heads * (key_dim + value_dim) * element
    cached = rows * length * num_kv_heads * (key_dim + value_dim) * (1 if float8 else element)
    splits = -(-length // constants["split_size"])
    parts = width * num_heads * splits * (value_dim + 2) * 4 if constants["num_splits"] > 1 else 0
    shape = f"{rows} x {width // rows} tokens, {num_heads}/{num_kv_heads} heads, {length} cached"
    attend = KernelSpec(
        op="window_attention",
        variant=variant,
        kernel=attend_kernel,
        arguments=arguments,
        constants=full,
        shape=shape,
        bytes_moved=heads_moved + cached + parts,
        num_warps=options["num_warps"],
        hip_num_warps=launch_options(constants, element, True, sliding=sliding)["num_warps"],
        num_stages=options["num_stages"],
        # Float32 latents, wanted only for exactness, pass the smallest limit on NVIDIA, which allows more, and on AMD
        # have two registers' worth of accumulators.
        max_shared=(72 if kind == "fp32" and key_dim > 256 else 64) * 1024,
        max_registers=512 if kind == "fp32" and key_dim > 256 else 255,
    )
    if constants["num_splits"] == 1 or not with_combine:
        return [attend]
    combine = KernelSpec(
        op="window_attention",
        variant=f"{variant}: combine",
        kernel=combine_kernel,
        arguments=shared,
        constants=constants_of(combine_config(constants)) | absent,
        num_stages=3,
        shape=shape,
        bytes_moved=parts + width * num_heads * value_dim * element,
    )
    return [attend, combine]


_window_attention = define_op(
    "window_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor positions, "
    "Tensor cu_tokens, Tensor base, Tensor slot_of_row, Tensor? ancestors, float scale, int sliding_window, "
    "float soft_cap, Tensor? key_scale=None, Tensor? value_scale=None) -> Tensor",
    cpu=_window_attention_cpu,
    fake=_window_attention_fake,
    cuda=window_attention_triton,
)


def window_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    positions: torch.Tensor,
    cu_tokens: torch.Tensor,
    base: torch.Tensor,
    slot_of_row: torch.Tensor,
    ancestors: torch.Tensor | None,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of each window token over its row's cache, in which the window's own keys already lie.

    Token t of row b, window token `j = t - cu_tokens[b]`, sees the cached positions below `base[b]` and those
    window tokens j' (cached at `base[b] + j'`) that are at most j, or whose bit j' is set in `ancestors[t]`.
    A row's result depends, bit for bit, neither on the other rows nor on where in the pack it lies.

    Cached values that a token does not see must still be finite: they are multiplied with zero.

    Args:
        query: [W, Hq, Dk].
        key_cache: [R1, Hkv, S, Dk], S a multiple of 64.
        value_cache: [R1, Hkv, S, Dv].
        positions: int32 [W], absolute.
        cu_tokens: int32 [B + 1].
        base: int32 [B].
        slot_of_row: int32 [B].
        ancestors: int64 [W] with the token's own bit set, or None for a chain.
        scale: of the scores.
        sliding_window: keys whose position is at most the query's minus this are hidden; 0 for none.
        soft_cap: c in `c * tanh(score / c)` (Gemma 2); 0 for none.
        key_scale: float32 [Hkv], for caches of float8: what their keys are multiplied with.
        value_scale: float32 [Hkv], likewise; both or neither.

    Returns:
        [W, Hq, Dv], zero in padding.
    """
    return _window_attention(
        query,
        key_cache,
        value_cache,
        positions,
        cu_tokens,
        base,
        slot_of_row,
        ancestors,
        scale,
        sliding_window,
        soft_cap,
        key_scale,
        value_scale,
    )
