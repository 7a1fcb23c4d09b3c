"""Keeps the hidden states that verify saw, and which of them a drafter has not read."""

from __future__ import annotations

import torch

from .gather_rows import column_block
from .registration import define_op
from .triton_support import KernelSpec, check_some, check_tensor, jit, row_range, tl

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def keep_states_reference(
    values: torch.Tensor,
    rows: torch.Tensor,
    base: torch.Tensor,
    cu_tokens: torch.Tensor,
    slot_of_row: torch.Tensor,
    running: torch.Tensor,
    column: int,
    kept: torch.Tensor,
    seen: torch.Tensor,
    start: torch.Tensor,
) -> None:
    """The specification of `keep_states`; reads nothing on the host.

    Nothing is written in a round that the engine drops, nor of padding: not of tokens without a row, and not for the
    reserved slot, which padding rows share.

    Args:
        values: float32, float16 or bfloat16 [W, S], neither 0, in the order of the packed windows.
        rows: int32 [W], -1 in padding.
        base: int32 [B], the position of each row's first token.
        cu_tokens: int32 [B + 1], where it is packed.
        slot_of_row: int32 [B].
        running: bool [1], false in a round that the engine drops.
        column: where `values` belong in a row of `kept`.
        kept: [N, C], like `values`, N at least W and C at least `column + S`; the first W rows are written.
        seen: int32 [R1], written: how many positions the drafter has read, all before the window.
        start: int32 [R1], written: which row of `kept` the next one is.
    """
    width, size = values.shape
    part = kept[:width, column : column + size]
    part.copy_(torch.where(((rows >= 0) & running)[:, None], values, part))
    moves, slots = running & (slot_of_row < seen.shape[0] - 1), slot_of_row.long()
    for of_slot, now in ((seen, base), (start, cu_tokens[:-1])):
        of_slot.index_copy_(0, slots, torch.where(moves, now, of_slot.index_select(0, slots)))


@jit(unspecialized=["columns", "kept_columns", "column", "num_rows", "reserved_slot"])
def _keep_states_kernel(  # type: ignore[no-untyped-def]
    values,
    rows,
    base,
    cu_tokens,
    slot_of_row,
    running,
    kept,
    seen,
    start,
    columns,
    kept_columns,
    column,
    num_rows,
    reserved_slot,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    goes_on = tl.load(running).to(tl.int32) != 0
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (place < columns) & goes_on & (tl.load(rows + token) >= 0)
    moved = tl.load(values + token * columns + place, mask=inside)
    tl.store(kept + token * kept_columns + column + place, moved, mask=inside)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        row = tl.arange(0, ROWS)
        slot = tl.load(slot_of_row + row, mask=row < num_rows, other=0)
        moves = (row < num_rows) & goes_on & (slot < reserved_slot)
        tl.store(seen + slot, tl.load(base + row, mask=moves, other=0), mask=moves)
        tl.store(start + slot, tl.load(cu_tokens + row, mask=moves, other=0), mask=moves)


def keep_states_triton(
    values: torch.Tensor,
    rows: torch.Tensor,
    base: torch.Tensor,
    cu_tokens: torch.Tensor,
    slot_of_row: torch.Tensor,
    running: torch.Tensor,
    column: int,
    kept: torch.Tensor,
    seen: torch.Tensor,
    start: torch.Tensor,
) -> None:
    """The launch for CUDA tensors, or for CPU tensors under the interpreter.

    Raises:
        ValueError: an argument that the kernel could not take.
    """
    device, int32 = values.device, (torch.int32,)
    check_tensor("values", values, dtypes=_FLOATS, shape=(None, None), device=device)
    width, columns = values.shape
    check_some("values", "row", width)
    check_some("values", "column", columns)
    check_tensor("rows", rows, dtypes=int32, shape=(width,), device=device)
    check_tensor("slot_of_row", slot_of_row, dtypes=int32, shape=(None,), device=device)
    num_rows = slot_of_row.shape[0]
    check_tensor("base", base, dtypes=int32, shape=(num_rows,), device=device)
    check_tensor("cu_tokens", cu_tokens, dtypes=int32, shape=(num_rows + 1,), device=device)
    check_tensor("running", running, dtypes=(torch.bool,), shape=(1,), device=device)
    check_tensor("kept", kept, dtypes=(values.dtype,), shape=(None, None), device=device)
    check_tensor("seen", seen, dtypes=int32, shape=(None,), device=device)
    check_tensor("start", start, dtypes=int32, shape=(seen.shape[0],), device=device)
    check_some("seen", "slot", seen.shape[0])
    if kept.shape[0] < width:
        raise ValueError(f"kept has {kept.shape[0]} rows; accepted: at least {width}, one per token")
    if kept.shape[1] < columns:
        raise ValueError(f"kept has {kept.shape[1]} columns; accepted: at least {columns}, those of values")
    if not 0 <= column <= kept.shape[1] - columns:
        raise ValueError(f"column is {column}; accepted: 0 to {kept.shape[1] - columns}")
    block = column_block(columns)
    _keep_states_kernel[(width, -(-columns // block))](
        values,
        rows,
        base,
        cu_tokens,
        slot_of_row,
        running,
        kept,
        seen,
        start,
        columns,
        kept.shape[1],
        column,
        num_rows,
        seen.shape[0] - 1,
        ROWS=row_range(num_rows),
        BLOCK=block,
        num_warps=4,
    )


def kernel_specs() -> list[KernelSpec]:
    """One row and several, in two types that models have."""
    sizes = ["columns", "kept_columns", "column", "num_rows", "reserved_slot"]
    return [
        KernelSpec(
            op="keep_states",
            variant=f"{kind}, {num_rows} row{'s' if num_rows > 1 else ''}",
            kernel=_keep_states_kernel,
            arguments={
                "values": f"*{kind}",
                "kept": f"*{kind}",
                "running": "*i1",
                **dict.fromkeys(["rows", "base", "cu_tokens", "slot_of_row", "seen", "start"], "*i32"),
                **dict.fromkeys(sizes, "i32"),
            },
            constants={"ROWS": row_range(num_rows), "BLOCK": column_block(4096)},
            num_stages=3,
            shape=f"{width} tokens of {num_rows} row{'s' if num_rows > 1 else ''}, hidden 4096",
            bytes_moved=width * (4 + 2 * 4096 * (4 if kind == "fp32" else 2)) + 20 * num_rows,
            max_registers=64,
        )
        for kind, num_rows, width in (("bf16", 1, 8), ("bf16", 16, 128), ("fp32", 1, 8))
    ]


def _keep_states_fake(*args: object) -> None:
    return None


keep_states = define_op(
    "keep_states(Tensor values, Tensor rows, Tensor base, Tensor cu_tokens, Tensor slot_of_row, Tensor running, "
    "int column, Tensor(a!) kept, Tensor(b!) seen, Tensor(c!) start) -> ()",
    cpu=keep_states_reference,
    fake=_keep_states_fake,
    cuda=keep_states_triton,
)
"""`draftgraph::keep_states`; see `keep_states_reference`."""
