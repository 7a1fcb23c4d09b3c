"""Drops drafts that are no tokens of the target's, which would look them up."""

from __future__ import annotations

import torch

from .registration import define_op
from .triton_support import KernelSpec, check_some, check_tensor, jit, short_range, tl


def drop_unknown_drafts_reference(draft_tokens: torch.Tensor, slot_of_row: torch.Tensor, vocab_size: int) -> None:
    """The specification of `drop_unknown_drafts`: drafts of `vocab_size` or more become -1, no proposal.

    Negative ones stay what they are: each of them is no proposal, not -1 alone.

    Args:
        draft_tokens: int32 [R1, K], written for the slots of `slot_of_row`.
        slot_of_row: int32 [B].
        vocab_size: of the target.
    """
    drafts = draft_tokens.index_select(0, slot_of_row)
    draft_tokens.index_copy_(0, slot_of_row.long(), torch.where(drafts < vocab_size, drafts, -1))


@jit(unspecialized=["num_drafts", "vocab_size"])
def _drop_unknown_drafts_kernel(  # type: ignore[no-untyped-def]
    draft_tokens,
    slot_of_row,
    num_drafts,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """One program per row; padding rows share a slot and all write the same."""
    slot = tl.load(slot_of_row + tl.program_id(0)).to(tl.int64)
    draft = tl.arange(0, BLOCK)
    inside = draft < num_drafts
    token = tl.load(draft_tokens + slot * num_drafts + draft, mask=inside, other=-1)
    tl.store(draft_tokens + slot * num_drafts + draft, tl.where(token < vocab_size, token, -1), mask=inside)


def drop_unknown_drafts_triton(draft_tokens: torch.Tensor, slot_of_row: torch.Tensor, vocab_size: int) -> None:
    """The launch for CUDA tensors, or for CPU tensors under the interpreter.

    Raises:
        ValueError: an argument that the kernel could not take.
    """
    device, int32 = draft_tokens.device, (torch.int32,)
    check_tensor("draft_tokens", draft_tokens, dtypes=int32, shape=(None, None), device=device)
    check_tensor("slot_of_row", slot_of_row, dtypes=int32, shape=(None,), device=device)
    most = torch.iinfo(torch.int32).max
    if not 1 <= vocab_size <= most:
        raise ValueError(f"vocab_size is {vocab_size}; accepted: 1 to {most}")
    rows, drafts = slot_of_row.shape[0], draft_tokens.shape[1]
    if rows:
        check_some("draft_tokens", "slot", draft_tokens.shape[0])
    if rows and drafts:
        _drop_unknown_drafts_kernel[(rows,)](
            draft_tokens, slot_of_row, drafts, vocab_size, BLOCK=short_range(drafts), num_warps=1
        )


def kernel_specs() -> list[KernelSpec]:
    """One kernel for all small numbers of drafts."""
    return [
        KernelSpec(
            op="drop_unknown_drafts",
            variant="any",
            kernel=_drop_unknown_drafts_kernel,
            arguments={
                **dict.fromkeys(["draft_tokens", "slot_of_row"], "*i32"),
                **dict.fromkeys(["num_drafts", "vocab_size"], "i32"),
            },
            constants={"BLOCK": short_range(7)},
            num_warps=1,
            num_stages=3,
            shape="1 row, 7 drafts",
            bytes_moved=4 + 2 * 28,
            max_registers=32,
        )
    ]


def _drop_unknown_drafts_fake(*args: object) -> None:
    return None


drop_unknown_drafts = define_op(
    "drop_unknown_drafts(Tensor(a!) draft_tokens, Tensor slot_of_row, int vocab_size) -> ()",
    cpu=drop_unknown_drafts_reference,
    fake=_drop_unknown_drafts_fake,
    cuda=drop_unknown_drafts_triton,
)
"""`draftgraph::drop_unknown_drafts`; see `drop_unknown_drafts_reference`."""
