"""The positions by which the noise of sampled drafts is keyed."""

from __future__ import annotations

import torch

from .registration import define_op
from .triton_support import KernelSpec, check_some, check_tensor, jit, tl

_BLOCK = 128


def draft_positions_reference(length: torch.Tensor, slot_of_row: torch.Tensor, out: torch.Tensor) -> None:
    """The specification of `draft_positions`: the position before each row's draft k, `length - 1 + k`.

    Args:
        length: int32 [R1].
        slot_of_row: int32 [B].
        out: int32 [K, B], written.
    """
    draft = torch.arange(out.shape[0], dtype=torch.int32, device=length.device)[:, None]
    out.copy_(length.index_select(0, slot_of_row) - 1 + draft)


@jit(unspecialized=["num_rows", "num_places"])
def _draft_positions_kernel(length, slot_of_row, out, num_rows, num_places, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_places
    slot = tl.load(slot_of_row + at % num_rows, mask=inside, other=0)
    tl.store(out + at, tl.load(length + slot, mask=inside, other=0) - 1 + at // num_rows, mask=inside)


def draft_positions_triton(length: torch.Tensor, slot_of_row: torch.Tensor, out: torch.Tensor) -> None:
    """The launch for CUDA tensors, or for CPU tensors under the interpreter.

    Raises:
        ValueError: an argument that the kernel could not take.
    """
    device, int32 = length.device, (torch.int32,)
    check_tensor("length", length, dtypes=int32, shape=(None,), device=device)
    check_tensor("slot_of_row", slot_of_row, dtypes=int32, shape=(None,), device=device)
    check_tensor("out", out, dtypes=int32, shape=(None, slot_of_row.shape[0]), device=device)
    if out.numel():
        check_some("length", "slot", length.shape[0])
        _draft_positions_kernel[(-(-out.numel() // _BLOCK),)](
            length, slot_of_row, out, out.shape[1], out.numel(), BLOCK=_BLOCK, num_warps=1
        )


def kernel_specs() -> list[KernelSpec]:
    """One kernel for all buckets."""
    return [
        KernelSpec(
            op="draft_positions",
            variant="any",
            kernel=_draft_positions_kernel,
            arguments={
                **dict.fromkeys(["length", "slot_of_row", "out"], "*i32"),
                **dict.fromkeys(["num_rows", "num_places"], "i32"),
            },
            constants={"BLOCK": _BLOCK},
            num_warps=1,
            num_stages=3,
            shape="1 row, 7 drafts",
            bytes_moved=8 + 28,
            max_registers=48,
        )
    ]


def _draft_positions_fake(*args: object) -> None:
    return None


draft_positions = define_op(
    "draft_positions(Tensor length, Tensor slot_of_row, Tensor(a!) out) -> ()",
    cpu=draft_positions_reference,
    fake=_draft_positions_fake,
    cuda=draft_positions_triton,
)
"""`draftgraph::draft_positions`; see `draft_positions_reference`."""
