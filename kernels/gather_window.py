"""Gathers what was kept of a row's anchor and drafts in the order of the packed windows."""

from __future__ import annotations

import torch

from .gather_rows import column_block
from .registration import define_op
from .triton_support import KernelSpec, check_some, check_tensor, jit, tl

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def gather_window_reference(
    kept: torch.Tensor, length: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, out: torch.Tensor
) -> None:
    """The specification of `gather_window`; reads nothing on the host.

    A slot's place 0 belongs to its anchor, at position `length - 1`, and place k to its draft k - 1. A token that
    stands before or after these, as padding may, gets the first or the last of them.

    Args:
        kept: float32, float16 or bfloat16 [R1, P, H].
        length: int32 [R1].
        slots: int32 [W].
        positions: int32 [W].
        out: [W, H], like `kept`, written.
    """
    place = (positions - length.index_select(0, slots) + 1).clamp(0, kept.shape[1] - 1)
    out.copy_(kept.flatten(0, 1).index_select(0, slots * kept.shape[1] + place))


@jit(unspecialized=["columns", "places"])
def _gather_window_kernel(  # type: ignore[no-untyped-def]
    kept,
    length,
    slots,
    positions,
    out,
    columns,
    places,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    place = tl.load(positions + token) - tl.load(length + slot) + 1
    place = tl.minimum(tl.maximum(place, 0), places - 1)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    moved = tl.load(kept + (slot * places + place) * columns + column, mask=inside)
    tl.store(out + token * columns + column, moved, mask=inside)


def gather_window_triton(
    kept: torch.Tensor, length: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, out: torch.Tensor
) -> None:
    """The launch for CUDA tensors, or for CPU tensors under the interpreter.

    Raises:
        ValueError: an argument that the kernel could not take.
    """
    device, int32 = kept.device, (torch.int32,)
    check_tensor("kept", kept, dtypes=_FLOATS, shape=(None, None, None), device=device)
    num_slots, places, columns = kept.shape
    check_some("kept", "slot", num_slots)
    check_some("kept", "place", places)
    check_tensor("length", length, dtypes=int32, shape=(num_slots,), device=device)
    check_tensor("slots", slots, dtypes=int32, shape=(None,), device=device)
    width = slots.shape[0]
    check_tensor("positions", positions, dtypes=int32, shape=(width,), device=device)
    check_tensor("out", out, dtypes=(kept.dtype,), shape=(width, columns), device=device)
    if out.numel():
        block = column_block(columns)
        _gather_window_kernel[(width, -(-columns // block))](
            kept, length, slots, positions, out, columns, places, BLOCK=block, num_warps=4
        )


def kernel_specs() -> list[KernelSpec]:
    """In two types that models have."""
    return [
        KernelSpec(
            op="gather_window",
            variant=kind,
            kernel=_gather_window_kernel,
            arguments={
                "kept": f"*{kind}",
                "out": f"*{kind}",
                **dict.fromkeys(["length", "slots", "positions"], "*i32"),
                **dict.fromkeys(["columns", "places"], "i32"),
            },
            constants={"BLOCK": column_block(4096)},
            num_stages=3,
            shape="8 tokens, hidden 4096",
            bytes_moved=8 * (12 + 2 * 4096 * (4 if kind == "fp32" else 2)),
            max_registers=48,
        )
        for kind in ("bf16", "fp32")
    ]


def _gather_window_fake(*args: object) -> None:
    return None


gather_window = define_op(
    "gather_window(Tensor kept, Tensor length, Tensor slots, Tensor positions, Tensor(a!) out) -> ()",
    cpu=gather_window_reference,
    fake=_gather_window_fake,
    cuda=gather_window_triton,
)
"""`draftgraph::gather_window`; see `gather_window_reference`."""
