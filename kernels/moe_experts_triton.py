"""The Triton kernels of `moe_experts`: tokens are sorted by expert on the device, so that a weight is read once.

Four launches, whose grids depend on shapes only: the pairs of a token and an expert that it chose are sorted by
expert; tiles of pairs with one expert take the product with gate and up; then that with down; then a token's experts
are summed. Each sum has a fixed order, which depends on no other token.
"""

from __future__ import annotations

from typing import Any

import torch

from .triton_support import INTERPRETED, check_some, check_tensor, jit, next_power_of_2, round_to, tl
from .workspace import workspace

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
OPERANDS: dict[str, Any] = {} if tl is None else {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16}
"""Types in which products are taken."""


@jit(unspecialized=["num_pairs"])
def sort_kernel(  # type: ignore[no-untyped-def]
    experts,
    rows,
    order,
    offsets,
    num_pairs,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per expert, and one more: where its pairs begin among all, and which they are, in order."""
    expert = tl.program_id(0)
    begin = 0
    for first in range(0, num_pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        inside = pair < num_pairs
        live = inside & (tl.load(rows + pair // TOP, mask=inside, other=-1) >= 0)
        chosen = tl.load(experts + pair, mask=live, other=0)
        begin += tl.sum((live & (chosen < expert)).to(tl.int32), 0)
    tl.store(offsets + expert, begin)
    for first in range(0, num_pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        inside = pair < num_pairs
        live = inside & (tl.load(rows + pair // TOP, mask=inside, other=-1) >= 0)
        mine = live & (tl.load(experts + pair, mask=live, other=-1) == expert)
        place = begin + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(order + place, pair, mask=mine)
        begin += tl.sum(mine.to(tl.int32), 0)


@jit
def _tile(offsets, tile, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):  # type: ignore[no-untyped-def]
    # The expert of a tile, its first place in the order of pairs, and where the expert's places end. An expert with n
    # pairs has ceil(n / BLOCK_M) tiles; past the last tile, the expert is NUM_EXPERTS or more.
    index = tl.arange(0, EXPERTS)
    inside = index < NUM_EXPERTS
    begins = tl.load(offsets + index, mask=inside, other=0)
    ends = tl.load(offsets + index + 1, mask=inside, other=0)
    tiles = tl.where(inside, (ends - begins + BLOCK_M - 1) // BLOCK_M, 0)
    through = tl.cumsum(tiles, 0)
    expert = tl.sum((through <= tile).to(tl.int32), 0)
    within = tile - tl.sum(tl.where(index == expert, through - tiles, 0), 0)
    first = tl.sum(tl.where(index == expert, begins, 0), 0) + within * BLOCK_M
    end = tl.sum(tl.where(index == expert, ends, 0), 0)
    return expert, first, end


@jit
def _gelu_tanh(x):  # type: ignore[no-untyped-def]
    # 0.5 x (1 + tanh(z)) is x times the logistic function of 2z.
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@jit
def gate_up_kernel(  # type: ignore[no-untyped-def]
    x,
    order,
    offsets,
    gate_up,
    inner,
    x_stride,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """One program per tile of pairs and block of the intermediate size: act(gate x) * up x, in the sorted order."""
    expert, first, end = _tile(offsets, tl.program_id(0), NUM_EXPERTS, EXPERTS, BLOCK_M)
    if expert >= NUM_EXPERTS:
        return
    kind: tl.constexpr = inner.dtype.element_ty
    place = first + tl.arange(0, BLOCK_M)
    real = place < end
    token = tl.load(order + place, mask=real, other=0) // TOP
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_column = column < INTERMEDIATE
    at = tl.arange(0, BLOCK_K)
    source = x + token.to(tl.int64)[:, None] * x_stride + at[None, :]
    gates = gate_up + (expert.to(tl.int64) * 2 * INTERMEDIATE + column)[None, :] * HIDDEN + at[:, None]
    ups = gates + INTERMEDIATE * HIDDEN
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in range(0, HIDDEN, BLOCK_K):
        in_hidden = begin + at < HIDDEN
        weight_mask = in_hidden[:, None] & in_column[None, :]
        a = tl.load(source + begin, mask=real[:, None] & in_hidden[None, :], other=0).to(OPERAND)
        g = tl.load(gates + begin, mask=weight_mask, other=0).to(OPERAND)
        u = tl.load(ups + begin, mask=weight_mask, other=0).to(OPERAND)
        gate = tl.dot(a, g, gate, input_precision="ieee")
        up = tl.dot(a, u, up, input_precision="ieee")
    if ACTIVATION == "silu":
        gate = gate * tl.sigmoid(gate)
    elif ACTIVATION == "gelu":
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        gate = _gelu_tanh(gate)
    target = inner + place.to(tl.int64)[:, None] * INTERMEDIATE + column[None, :]
    tl.store(target, round_to(gate * up, kind), mask=real[:, None] & in_column[None, :])


@jit
def down_kernel(  # type: ignore[no-untyped-def]
    inner,
    order,
    offsets,
    weights,
    down,
    partial,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """One program per tile of pairs and block of the hidden size: the weighted product, in the pairs' own order."""
    expert, first, end = _tile(offsets, tl.program_id(0), NUM_EXPERTS, EXPERTS, BLOCK_M)
    if expert >= NUM_EXPERTS:
        return
    place = first + tl.arange(0, BLOCK_M)
    real = place < end
    pair = tl.load(order + place, mask=real, other=0)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_column = column < HIDDEN
    at = tl.arange(0, BLOCK_K)
    source = inner + place.to(tl.int64)[:, None] * INTERMEDIATE + at[None, :]
    matrix = down + (expert.to(tl.int64) * HIDDEN + column)[None, :] * INTERMEDIATE + at[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in range(0, INTERMEDIATE, BLOCK_K):
        in_inner = begin + at < INTERMEDIATE
        a = tl.load(source + begin, mask=real[:, None] & in_inner[None, :], other=0).to(OPERAND)
        b = tl.load(matrix + begin, mask=in_inner[:, None] & in_column[None, :], other=0).to(OPERAND)
        total = tl.dot(a, b, total, input_precision="ieee")
    total *= tl.load(weights + pair, mask=real, other=0.0)[:, None]
    target = partial + pair.to(tl.int64)[:, None] * HIDDEN + column[None, :]
    tl.store(target, total, mask=real[:, None] & in_column[None, :])


@jit
def sum_kernel(  # type: ignore[no-untyped-def]
    partial,
    rows,
    output,
    HIDDEN: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per token and block of the hidden size: the sum over the token's experts, zero in padding."""
    token = tl.program_id(0)
    live = tl.load(rows + token) >= 0
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < HIDDEN
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP):
        source = partial + (token * TOP + choice).to(tl.int64) * HIDDEN + at
        total += tl.load(source, mask=inside & live, other=0.0)
    tl.store(output + token.to(tl.int64) * HIDDEN + at, round_to(total, output.dtype.element_ty), mask=inside)


def launch_config(*, pairs: int, num_experts: int, bytes_each: int) -> dict[str, int]:
    """Blocks and warps of the products, from shapes only.

    A tile has room for the pairs that an expert usually gets, at least the 16 that tensor cores take. With so few the
    products wait for the weights alone.

    Args:
        pairs: `W * k`.
        num_experts: `E`.
        bytes_each: of an operand of the products.
    """
    if bytes_each == 4:
        return {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32}
    block_m = min(max(16, next_power_of_2(pairs // num_experts)), 64)
    return {"BLOCK_M": block_m, "BLOCK_N": 64, "BLOCK_K": 64}


def tile_count(pairs: int, num_experts: int, block_m: int) -> int:
    """The most tiles that so many pairs can form, however they lie in experts."""
    touched = min(pairs, num_experts)
    return touched + (pairs - touched) // block_m


def _kernel_type(kind: torch.dtype) -> Any:
    # The interpreter multiplies numbers of bfloat16 as if they were integers.
    if kind == torch.bfloat16 and not INTERPRETED:
        return OPERANDS["bf16"]
    return OPERANDS["fp16" if kind == torch.float16 else "fp32"]


def moe_experts_triton(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    rows: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """The launches for CUDA tensors, or for CPU tensors under the interpreter.

    Raises:
        ValueError: an argument that the kernels could not take.
    """
    device, kinds = x.device, (x.dtype,)
    check_tensor("x", x, dtypes=_FLOATS, shape=(None, None), contiguous=False)
    width, hidden = x.shape
    check_tensor("experts", experts, dtypes=(torch.int32,), shape=(width, None), device=device)
    top = experts.shape[1]
    check_some("experts", "expert of a token", top)
    check_tensor("weights", weights, dtypes=(torch.float32,), shape=(width, top), device=device)
    check_tensor("rows", rows, dtypes=(torch.int32,), shape=(width,), device=device)
    check_tensor("gate_up", gate_up, dtypes=kinds, shape=(None, None, hidden), device=device)
    num_experts, intermediate = gate_up.shape[0], gate_up.shape[1] // 2
    check_some("gate_up", "expert", num_experts)
    check_tensor("down", down, dtypes=kinds, shape=(num_experts, hidden, intermediate), device=device)
    if activation not in ("silu", "gelu", "gelu_tanh"):
        raise ValueError(f"activation is {activation!r}; accepted: silu, gelu, gelu_tanh")
    output = torch.empty((width, hidden), dtype=x.dtype, device=device)
    pairs = width * top
    if pairs == 0:
        return output.zero_()

    operand = _kernel_type(x.dtype)
    blocks = launch_config(pairs=pairs, num_experts=num_experts, bytes_each=4 if operand == OPERANDS["fp32"] else 2)
    sizes = {
        "HIDDEN": hidden,
        "INTERMEDIATE": intermediate,
        "NUM_EXPERTS": num_experts,
        "EXPERTS": next_power_of_2(num_experts),
    }
    order = workspace("moe_experts.order", pairs, torch.int32, device)
    offsets = workspace("moe_experts.offsets", num_experts + 1, torch.int32, device)
    inner = workspace("moe_experts.inner", pairs * intermediate, x.dtype, device)
    partial = workspace("moe_experts.partial", pairs * hidden, torch.float32, device)
    sort_kernel[(num_experts + 1,)](
        experts, rows, order, offsets, pairs, TOP=top, BLOCK=min(1024, next_power_of_2(pairs)), num_warps=4
    )
    tiles = tile_count(pairs, num_experts, blocks["BLOCK_M"])
    gate_up_kernel[(tiles, -(-intermediate // blocks["BLOCK_N"]))](
        x,
        order,
        offsets,
        gate_up,
        inner,
        x.stride(0),
        TOP=top,
        ACTIVATION=activation,
        OPERAND=operand,
        num_warps=4,
        num_stages=3,
        **sizes,
        **blocks,
    )
    down_kernel[(tiles, -(-hidden // blocks["BLOCK_N"]))](
        inner,
        order,
        offsets,
        weights,
        down,
        partial,
        OPERAND=operand,
        num_warps=4,
        num_stages=3,
        **sizes,
        **blocks,
    )
    block = min(1024, next_power_of_2(hidden))
    sum_kernel[(width, -(-hidden // block))](partial, rows, output, HIDDEN=hidden, TOP=top, BLOCK=block, num_warps=4)
    return output
