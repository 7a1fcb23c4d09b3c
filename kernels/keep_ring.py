"""Keeps hidden states in a ring per slot, for drafters that read some of them again in the next round."""

from __future__ import annotations

import torch

from .gather_rows import column_block
from .registration import define_op
from .triton_support import KernelSpec, check_some, check_tensor, jit, row_range, tl

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def keep_ring_reference(
    values: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    base: torch.Tensor,
    cu_tokens: torch.Tensor,
    slot_of_row: torch.Tensor,
    running: torch.Tensor | None,
    ring: int,
    again: int,
    kept: torch.Tensor,
    seen: torch.Tensor,
) -> None:
    """The specification of `keep_ring`; reads nothing on the host.

    That at position j of a slot lies at `slot * ring + j % ring`. Of each row the last `ring` positions of its window
    are kept. Nothing is written in a round that the engine drops, nor of padding: not of tokens without a row, and
    `seen` not for the reserved slot, which padding rows share.

    Args:
        values: float32, float16 or bfloat16 [W, S], neither 0, in the order of the packed windows.
        positions: int32 [W].
        slots: int32 [W].
        rows: int32 [W], -1 in padding.
        base: int32 [B], the position of each row's first token.
        cu_tokens: int32 [B + 1], where it is packed.
        slot_of_row: int32 [B].
        running: bool [1], false in a round that the engine drops; None: the window is a chunk of a prompt.
        ring: how many positions of a slot are kept, at least 1.
        again: how many positions that were read are read once more.
        kept: [N, S], like `values`, N more than `R1 * ring`.
        seen: int32 [R1], written: the first position that is read next, `again` before the window; of a prompt's chunk
            `again` before its last position, which is always read in the first round.
    """
    ends = base + cu_tokens[1:] - cu_tokens[:-1]
    wanted = (rows >= 0) & (positions >= ends.index_select(0, rows.clamp_min(0)) - ring)
    moves = slot_of_row < seen.shape[0] - 1
    if running is not None:
        wanted, moves = wanted & running, moves & running
    # Tokens that are not wanted write back the last row, which is nobody's.
    places = torch.where(wanted, slots * ring + positions % ring, kept.shape[0] - 1)
    kept.index_copy_(0, places.long(), torch.where(wanted[:, None], values, kept.index_select(0, places)))
    first = ((ends - 1 if running is None else base) - again).clamp_min(0)
    owners = slot_of_row.long()
    seen.index_copy_(0, owners, torch.where(moves, first, seen.index_select(0, owners)))


_SIZES = ("columns", "ring", "again", "num_rows", "reserved_slot")


@jit(unspecialized=_SIZES)
def _keep_ring_kernel(  # type: ignore[no-untyped-def]
    values,
    positions,
    slots,
    rows,
    base,
    cu_tokens,
    slot_of_row,
    running,
    kept,
    seen,
    columns,
    ring,
    again,
    num_rows,
    reserved_slot,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + token)
    # Padding takes the ends of row 0, which is there, and writes nothing.
    owner = tl.maximum(row, 0)
    end = tl.load(base + owner) + tl.load(cu_tokens + owner + 1) - tl.load(cu_tokens + owner)
    position = tl.load(positions + token)
    wanted = (row >= 0) & (position >= end - ring)
    if running is not None:
        wanted = wanted & (tl.load(running).to(tl.int32) != 0)
    place = tl.load(slots + token).to(tl.int64) * ring + position % ring
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (column < columns) & wanted
    moved = tl.load(values + token * columns + column, mask=inside)
    tl.store(kept + place * columns + column, moved, mask=inside)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        every_row = tl.arange(0, ROWS)
        slot = tl.load(slot_of_row + every_row, mask=every_row < num_rows, other=0)
        moves = (every_row < num_rows) & (slot < reserved_slot)
        if running is not None:
            moves = moves & (tl.load(running).to(tl.int32) != 0)
        first = tl.load(base + every_row, mask=moves, other=0)
        if running is None:
            first += tl.load(cu_tokens + every_row + 1, mask=moves, other=0)
            first -= tl.load(cu_tokens + every_row, mask=moves, other=0) + 1
        tl.store(seen + slot, tl.maximum(first - again, 0), mask=moves)


def keep_ring_triton(
    values: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    base: torch.Tensor,
    cu_tokens: torch.Tensor,
    slot_of_row: torch.Tensor,
    running: torch.Tensor | None,
    ring: int,
    again: int,
    kept: torch.Tensor,
    seen: torch.Tensor,
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
    for name, of_token in (("positions", positions), ("slots", slots), ("rows", rows)):
        check_tensor(name, of_token, dtypes=int32, shape=(width,), device=device)
    check_tensor("slot_of_row", slot_of_row, dtypes=int32, shape=(None,), device=device)
    num_rows = slot_of_row.shape[0]
    check_some("slot_of_row", "row", num_rows)
    check_tensor("base", base, dtypes=int32, shape=(num_rows,), device=device)
    check_tensor("cu_tokens", cu_tokens, dtypes=int32, shape=(num_rows + 1,), device=device)
    if running is not None:
        check_tensor("running", running, dtypes=(torch.bool,), shape=(1,), device=device)
    check_tensor("kept", kept, dtypes=(values.dtype,), shape=(None, columns), device=device)
    check_tensor("seen", seen, dtypes=int32, shape=(None,), device=device)
    check_some("seen", "slot", seen.shape[0])
    if ring < 1:
        raise ValueError(f"ring is {ring}; accepted: 1 or more")
    if again < 0:
        raise ValueError(f"again is {again}; accepted: 0 or more")
    if kept.shape[0] <= seen.shape[0] * ring:
        raise ValueError(f"kept has {kept.shape[0]} rows; accepted: more than {seen.shape[0] * ring}")
    block = column_block(columns)
    _keep_ring_kernel[(width, -(-columns // block))](
        values,
        positions,
        slots,
        rows,
        base,
        cu_tokens,
        slot_of_row,
        running,
        kept,
        seen,
        columns,
        ring,
        again,
        num_rows,
        seen.shape[0] - 1,
        ROWS=row_range(num_rows),
        BLOCK=block,
        num_warps=4,
    )


def kernel_specs() -> list[KernelSpec]:
    """One row and several of a round, and a prompt's chunk."""
    pointers = ["positions", "slots", "rows", "base", "cu_tokens", "slot_of_row", "seen"]
    return [
        KernelSpec(
            op="keep_ring",
            variant=variant,
            kernel=_keep_ring_kernel,
            arguments={
                "values": f"*{kind}",
                "kept": f"*{kind}",
                **dict.fromkeys(pointers, "*i32"),
                **dict.fromkeys(_SIZES, "i32"),
                **({} if prompt else {"running": "*i1"}),
            },
            constants={
                "ROWS": row_range(num_rows),
                "BLOCK": column_block(4096),
                **({"running": None} if prompt else {}),
            },
            num_stages=3,
            shape=f"{width} tokens of {num_rows} row{'s' if num_rows > 1 else ''}, hidden 4096",
            bytes_moved=width * (12 + 2 * 4096 * (4 if kind == "fp32" else 2)) + 16 * num_rows,
            max_registers=64,
        )
        for variant, kind, num_rows, width, prompt in (
            ("bf16, 1 row", "bf16", 1, 8, False),
            ("bf16, 16 rows", "bf16", 16, 128, False),
            ("bf16, a chunk", "bf16", 1, 8, True),
            ("fp32, 1 row", "fp32", 1, 8, False),
        )
    ]


def _keep_ring_fake(*args: object) -> None:
    return None


keep_ring = define_op(
    "keep_ring(Tensor values, Tensor positions, Tensor slots, Tensor rows, Tensor base, Tensor cu_tokens, "
    "Tensor slot_of_row, Tensor? running, int ring, int again, Tensor(a!) kept, Tensor(b!) seen) -> ()",
    cpu=keep_ring_reference,
    fake=_keep_ring_fake,
    cuda=keep_ring_triton,
)
"""`draftgraph::keep_ring`; see `keep_ring_reference`."""
