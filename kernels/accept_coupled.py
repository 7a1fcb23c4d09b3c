"""Accepts the drafts that equal the target's own tokens: greedy and coupled verification."""

from __future__ import annotations

import torch

from .registration import define_op
from .triton_support import KernelSpec, check_some, check_tensor, draft_range, jit, tl


def accept_coupled_reference(
    sampled: torch.Tensor,
    token_failed: torch.Tensor,
    draft_tokens: torch.Tensor,
    cu_tokens: torch.Tensor,
    slot_of_row: torch.Tensor,
    accepted: torch.Tensor,
    emitted: torch.Tensor,
    row_failed: torch.Tensor,
) -> None:
    """The specification of `accept_coupled`; reads nothing on the host.

    Draft j of a row's window is accepted iff it and those before it equal the target's tokens,
    `sampled[begin + j]`; the row emits the accepted drafts and the target's token after them. This one rule
    is greedy verification where `sampled` is the argmax, and coupled verification where it is the target's
    Gumbel-max sample (the same with speculation on or off): greedy is the zero-temperature case, row by row,
    so there is no second op for it.

    A draft of -1 is not a proposal and ends the accepted prefix. Rows with an empty window get 0 accepted and
    are not touched otherwise, nor are entries of `emitted` after `accepted`.

    Args:
        sampled: int32 [W], the target's token after each window token.
        token_failed: bool [W], the logits there were not finite.
        draft_tokens: int32 [R1, K].
        cu_tokens: int32 [B + 1].
        slot_of_row: int32 [B].
        accepted: int32 [R1], written.
        emitted: int32 [R1, K + 1], written up to `accepted`.
        row_failed: bool [R1], written: a token that the row emits comes from logits that were not finite.
    """
    num_drafts = draft_tokens.shape[1]
    slots = slot_of_row.long()
    begin, drafts = cu_tokens[:-1], cu_tokens[1:] - cu_tokens[:-1] - 1
    live = drafts >= 0
    column = torch.arange(num_drafts + 1, dtype=torch.int32, device=sampled.device)
    at = (begin[:, None] + column).clamp_max(sampled.shape[0] - 1)
    target = sampled[at]
    proposal = draft_tokens[slots]
    agrees = (column[:-1] < drafts[:, None]) & (proposal >= 0) & (proposal == target[:, :-1])
    count = agrees.int().cumprod(1).sum(1)
    accepted[slots] = count.int()
    # An accepted draft is the target's token, so everything emitted is.
    emits = (column <= count[:, None]) & live[:, None]
    emitted[slots] = torch.where(emits, target, emitted[slots])
    row_failed[slots] = torch.where(live, (token_failed[at] & emits).any(1), row_failed[slots])


@jit(unspecialized=["num_drafts"])
def accept_coupled_kernel(  # type: ignore[no-untyped-def]
    sampled,
    token_failed,
    draft_tokens,
    cu_tokens,
    slot_of_row,
    accepted,
    emitted,
    row_failed,
    num_drafts,
    COLUMNS: tl.constexpr,
):
    """One program per row."""
    row = tl.program_id(0)
    slot = tl.load(slot_of_row + row).to(tl.int64)
    begin = tl.load(cu_tokens + row)
    drafts = tl.load(cu_tokens + row + 1) - begin - 1
    if drafts < 0:
        tl.store(accepted + slot, 0)
        return
    column = tl.arange(0, COLUMNS)
    in_window = (column < num_drafts) & (column < drafts)
    proposal = tl.load(draft_tokens + slot * num_drafts + column, mask=in_window, other=-1)
    target = tl.load(sampled + begin + column, mask=column <= drafts, other=-1)
    agrees = (proposal >= 0) & (proposal == target)
    count = tl.min(tl.where(agrees, COLUMNS, column), 0)
    emits = column <= count
    bad = tl.load(token_failed + begin + column, mask=emits, other=0).to(tl.int32)
    tl.store(accepted + slot, count)
    tl.store(emitted + slot * (num_drafts + 1) + column, target, mask=emits)
    tl.store(row_failed + slot, tl.max(bad, 0) != 0)


def accept_coupled_triton(
    sampled: torch.Tensor,
    token_failed: torch.Tensor,
    draft_tokens: torch.Tensor,
    cu_tokens: torch.Tensor,
    slot_of_row: torch.Tensor,
    accepted: torch.Tensor,
    emitted: torch.Tensor,
    row_failed: torch.Tensor,
) -> None:
    """The launch for CUDA tensors, or for CPU tensors under the interpreter.

    Raises:
        ValueError: an argument that the kernel could not take.
    """
    device, int32, flag = sampled.device, (torch.int32,), (torch.bool,)
    check_tensor("sampled", sampled, dtypes=int32, shape=(None,))
    check_some("sampled", "token", sampled.shape[0])
    check_tensor("token_failed", token_failed, dtypes=flag, shape=sampled.shape, device=device)
    check_tensor("draft_tokens", draft_tokens, dtypes=int32, shape=(None, None), device=device)
    slots, num_drafts = draft_tokens.shape
    check_some("draft_tokens", "slot", slots)
    check_tensor("slot_of_row", slot_of_row, dtypes=int32, shape=(None,), device=device)
    rows = slot_of_row.shape[0]
    check_tensor("cu_tokens", cu_tokens, dtypes=int32, shape=(rows + 1,), device=device)
    check_tensor("accepted", accepted, dtypes=int32, shape=(slots,), device=device)
    check_tensor("emitted", emitted, dtypes=int32, shape=(slots, num_drafts + 1), device=device)
    check_tensor("row_failed", row_failed, dtypes=flag, shape=(slots,), device=device)
    if rows == 0:
        return
    accept_coupled_kernel[(rows,)](
        sampled,
        token_failed,
        draft_tokens,
        cu_tokens,
        slot_of_row,
        accepted,
        emitted,
        row_failed,
        num_drafts=num_drafts,
        COLUMNS=draft_range(num_drafts),
        num_warps=1,
    )


def kernel_specs() -> list[KernelSpec]:
    """Few drafts, and the most that a tree's path can have."""
    arguments = dict.fromkeys(["sampled", "draft_tokens", "cu_tokens", "slot_of_row", "accepted", "emitted"], "*i32")
    arguments |= {"token_failed": "*u1", "row_failed": "*u1", "num_drafts": "i32"}
    return [
        KernelSpec(
            op="accept_coupled",
            variant=f"{drafts} drafts",
            kernel=accept_coupled_kernel,
            arguments=arguments,
            constants={"COLUMNS": draft_range(drafts)},
            num_warps=1,
            shape=f"1 row, {drafts} drafts",
            bytes_moved=13 * drafts + 30,
        )
        for drafts in (5, 63)
    ]


def _accept_coupled_cpu(
    sampled: torch.Tensor,
    token_failed: torch.Tensor,
    draft_tokens: torch.Tensor,
    cu_tokens: torch.Tensor,
    slot_of_row: torch.Tensor,
    accepted: torch.Tensor,
    emitted: torch.Tensor,
    row_failed: torch.Tensor,
) -> None:
    ends = cu_tokens.tolist()
    sampled_of, token_failed_of, drafts_of = sampled.numpy(), token_failed.numpy(), draft_tokens.numpy()
    accepted_of, emitted_of, row_failed_of = accepted.numpy(), emitted.numpy(), row_failed.numpy()
    for row, slot in enumerate(slot_of_row.tolist()):
        begin, end = ends[row], ends[row + 1]
        if begin == end:
            accepted_of[slot] = 0
            continue
        target = sampled_of[begin:end].tolist()
        count = 0
        for draft in drafts_of[slot, : end - begin - 1].tolist():
            if draft < 0 or draft != target[count]:
                break
            count += 1
        accepted_of[slot] = count
        emitted_of[slot, : count + 1] = target[: count + 1]
        row_failed_of[slot] = token_failed_of[begin : begin + count + 1].any()


def _accept_coupled_fake(*args: torch.Tensor) -> None:
    return None


accept_coupled = define_op(
    "accept_coupled(Tensor sampled, Tensor token_failed, Tensor draft_tokens, Tensor cu_tokens, "
    "Tensor slot_of_row, Tensor(a!) accepted, Tensor(b!) emitted, Tensor(c!) row_failed) -> ()",
    cpu=_accept_coupled_cpu,
    cuda=accept_coupled_triton,
    fake=_accept_coupled_fake,
)
"""`draftgraph::accept_coupled`; see `accept_coupled_reference`."""
