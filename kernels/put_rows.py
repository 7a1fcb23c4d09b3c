"""Puts what a step made of every row where the row's slot keeps it."""

from __future__ import annotations

import torch

from .gather_rows import column_block
from .registration import define_op
from .triton_support import KernelSpec, check_some, check_tensor, jit, tl

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def put_rows_reference(source: torch.Tensor, slot_of_row: torch.Tensor, place: int, out: torch.Tensor) -> None:
    """The specification of `put_rows`: `out[slot_of_row[b], place] = source[b]`, but for rows of the reserved slot.

    Padding rows share the last slot, the reserved one, of which nobody reads anything: it is left as it is.

    Args:
        source: float32, float16 or bfloat16 [M, H], M at least B.
        slot_of_row: int32 [B].
        place: from 0 to P - 1.
        out: [R1, P, H], like `source`, written.
    """
    rows = source[: slot_of_row.shape[0]]
    kept = out[:, place]
    owned = (slot_of_row < out.shape[0] - 1)[:, None]
    kept.index_copy_(0, slot_of_row.long(), torch.where(owned, rows, kept.index_select(0, slot_of_row)))


@jit(unspecialized=["columns", "places", "place", "reserved_slot"])
def _put_rows_kernel(  # type: ignore[no-untyped-def]
    source,
    slot_of_row,
    out,
    columns,
    places,
    place,
    reserved_slot,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_of_row + row).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (column < columns) & (slot < reserved_slot)
    moved = tl.load(source + row * columns + column, mask=inside)
    tl.store(out + (slot * places + place) * columns + column, moved, mask=inside)


def put_rows_triton(source: torch.Tensor, slot_of_row: torch.Tensor, place: int, out: torch.Tensor) -> None:
    """The launch for CUDA tensors, or for CPU tensors under the interpreter.

    Raises:
        ValueError: an argument that the kernel could not take.
    """
    device = source.device
    check_tensor("source", source, dtypes=_FLOATS, shape=(None, None), device=device)
    check_tensor("slot_of_row", slot_of_row, dtypes=(torch.int32,), shape=(None,), device=device)
    rows, columns = slot_of_row.shape[0], source.shape[1]
    check_tensor("out", out, dtypes=(source.dtype,), shape=(None, None, columns), device=device)
    slots, places, _ = out.shape
    check_some("out", "slot", slots)
    check_some("out", "place", places)
    if source.shape[0] < rows:
        raise ValueError(f"source has {source.shape[0]} rows; accepted: at least {rows}, one per slot of slot_of_row")
    if not 0 <= place < places:
        raise ValueError(f"place is {place}; accepted: 0 to {places - 1}")
    if rows and columns:
        block = column_block(columns)
        _put_rows_kernel[(rows, -(-columns // block))](
            source, slot_of_row, out, columns, places, place, slots - 1, BLOCK=block, num_warps=4
        )


def kernel_specs() -> list[KernelSpec]:
    """Hidden states, and the confidences of a row's drafts."""
    return [
        KernelSpec(
            op="put_rows",
            variant=f"{kind}, {columns} columns",
            kernel=_put_rows_kernel,
            arguments={
                "source": f"*{kind}",
                "out": f"*{kind}",
                "slot_of_row": "*i32",
                **dict.fromkeys(["columns", "places", "place", "reserved_slot"], "i32"),
            },
            constants={"BLOCK": column_block(columns)},
            num_stages=3,
            shape=f"8 rows of {columns}",
            bytes_moved=8 * (4 + 2 * columns * (4 if kind == "fp32" else 2)),
            max_registers=48,
        )
        for kind, columns in (("bf16", 4096), ("fp32", 4096), ("fp32", 8))
    ]


def _put_rows_fake(*args: object) -> None:
    return None


put_rows = define_op(
    "put_rows(Tensor source, Tensor slot_of_row, int place, Tensor(a!) out) -> ()",
    cpu=put_rows_reference,
    fake=_put_rows_fake,
    cuda=put_rows_triton,
)
"""`draftgraph::put_rows`; see `put_rows_reference`."""
