"""Accepts drafts at given rates, whatever the logits: an aid for benchmarks, which keeps no distribution."""

from __future__ import annotations

import torch

from .philox import ACCEPT, uniform, uniform_at
from .philox_triton import first_uniform
from .registration import define_op
from .triton_support import UNFUSED, KernelSpec, check_some, check_tensor, draft_range, jit, tl


def accept_synthetic_reference(
    sampled: torch.Tensor,
    token_failed: torch.Tensor,
    positions: torch.Tensor,
    draft_tokens: torch.Tensor,
    rates: torch.Tensor,
    seed: torch.Tensor,
    cu_tokens: torch.Tensor,
    slot_of_row: torch.Tensor,
    accepted: torch.Tensor,
    emitted: torch.Tensor,
    row_failed: torch.Tensor,
) -> None:
    """The specification of `accept_synthetic`; reads nothing on the host.

    Draft j is accepted iff those before it are and u < rates[j], u the uniform number of stream ACCEPT at the draft's
    absolute position. The row emits the accepted drafts and the target's token `sampled` after them.

    A draft of -1 is not a proposal and ends the accepted prefix. Rows with an empty window get 0 accepted and
    are not touched otherwise, nor are entries of `emitted` after `accepted`.

    Args:
        sampled: int32 [W], the target's token after each window token.
        token_failed: bool [W], the logits there were not finite.
        positions: int32 [W], absolute position of each window token.
        draft_tokens: int32 [R1, K].
        rates: float32 [K], the chance of each draft given that those before it are accepted.
        seed: int64 [R1].
        cu_tokens: int32 [B + 1].
        slot_of_row: int32 [B].
        accepted: int32 [R1], written.
        emitted: int32 [R1, K + 1], written up to `accepted`.
        row_failed: bool [R1], written: a position up to the accepted drafts had logits that were not finite.
    """
    num_drafts = draft_tokens.shape[1]
    slots = slot_of_row.long()
    begin, drafts = cu_tokens[:-1], cu_tokens[1:] - cu_tokens[:-1] - 1
    live = drafts >= 0
    column = torch.arange(num_drafts + 1, dtype=torch.int32, device=sampled.device)
    at = (begin[:, None] + column).clamp_max(sampled.shape[0] - 1)
    proposal = draft_tokens[slots]
    u = uniform(seed[slots][:, None], positions[at[:, :-1]] + 1, ACCEPT, torch.zeros_like(at[:, :-1]))
    stands = (column[:-1] < drafts[:, None]) & (proposal >= 0) & (u < rates)
    count = stands.int().cumprod(1).sum(1)
    accepted[slots] = count.int()
    emits = (column <= count[:, None]) & live[:, None]
    final = sampled[at.gather(1, count[:, None].long())[:, 0]]
    padded = torch.cat([proposal, proposal.new_zeros(proposal.shape[0], 1)], 1)
    content = torch.where(column < count[:, None], padded, final[:, None])
    emitted[slots] = torch.where(emits, content, emitted[slots])
    row_failed[slots] = torch.where(live, (token_failed[at] & emits).any(1), row_failed[slots])


@jit(unspecialized=["num_drafts"])
def accept_synthetic_kernel(  # type: ignore[no-untyped-def]
    sampled,
    token_failed,
    positions,
    draft_tokens,
    rates,
    seed,
    cu_tokens,
    slot_of_row,
    accepted,
    emitted,
    row_failed,
    STREAM: tl.constexpr,
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
    rate = tl.load(rates + column, mask=in_window, other=0.0)
    position = tl.load(positions + begin + column, mask=column <= drafts, other=0)
    u = first_uniform(tl.load(seed + slot), position + 1, STREAM)
    count = tl.min(tl.where((proposal >= 0) & (u < rate), COLUMNS, column), 0)
    final = tl.load(sampled + begin + count)
    emits = column <= count
    bad = tl.load(token_failed + begin + column, mask=emits, other=0).to(tl.int32)
    tl.store(accepted + slot, count)
    content = tl.where(column < count, proposal, final)
    tl.store(emitted + slot * (num_drafts + 1) + column, content, mask=emits)
    tl.store(row_failed + slot, tl.max(bad, 0) != 0)


def accept_synthetic_triton(
    sampled: torch.Tensor,
    token_failed: torch.Tensor,
    positions: torch.Tensor,
    draft_tokens: torch.Tensor,
    rates: torch.Tensor,
    seed: torch.Tensor,
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
    check_tensor("positions", positions, dtypes=int32, shape=sampled.shape, device=device)
    check_tensor("draft_tokens", draft_tokens, dtypes=int32, shape=(None, None), device=device)
    slots, num_drafts = draft_tokens.shape
    check_some("draft_tokens", "slot", slots)
    check_tensor("rates", rates, dtypes=(torch.float32,), shape=(num_drafts,), device=device)
    check_tensor("seed", seed, dtypes=(torch.int64,), shape=(slots,), device=device)
    check_tensor("slot_of_row", slot_of_row, dtypes=int32, shape=(None,), device=device)
    rows = slot_of_row.shape[0]
    check_tensor("cu_tokens", cu_tokens, dtypes=int32, shape=(rows + 1,), device=device)
    check_tensor("accepted", accepted, dtypes=int32, shape=(slots,), device=device)
    check_tensor("emitted", emitted, dtypes=int32, shape=(slots, num_drafts + 1), device=device)
    check_tensor("row_failed", row_failed, dtypes=flag, shape=(slots,), device=device)
    if rows == 0:
        return
    accept_synthetic_kernel[(rows,)](
        sampled,
        token_failed,
        positions,
        draft_tokens,
        rates,
        seed,
        cu_tokens,
        slot_of_row,
        accepted,
        emitted,
        row_failed,
        STREAM=ACCEPT,
        num_drafts=num_drafts,
        COLUMNS=draft_range(num_drafts),
        num_warps=1,
        **UNFUSED,
    )


def kernel_specs() -> list[KernelSpec]:
    """Few drafts, and many."""
    arguments = dict.fromkeys(["sampled", "draft_tokens", "cu_tokens", "slot_of_row", "accepted", "emitted"], "*i32")
    arguments |= {"positions": "*i32", "rates": "*fp32", "seed": "*i64", "token_failed": "*u1", "row_failed": "*u1"}
    arguments["num_drafts"] = "i32"
    return [
        KernelSpec(
            op="accept_synthetic",
            variant=f"{drafts} drafts",
            kernel=accept_synthetic_kernel,
            arguments=arguments,
            constants={"STREAM": ACCEPT, "COLUMNS": draft_range(drafts)},
            num_warps=1,
            enable_fp_fusion=False,
            shape=f"1 row, {drafts} drafts",
            bytes_moved=21 * drafts + 42,
        )
        for drafts in (5, 63)
    ]


def _accept_synthetic_cpu(
    sampled: torch.Tensor,
    token_failed: torch.Tensor,
    positions: torch.Tensor,
    draft_tokens: torch.Tensor,
    rates: torch.Tensor,
    seed: torch.Tensor,
    cu_tokens: torch.Tensor,
    slot_of_row: torch.Tensor,
    accepted: torch.Tensor,
    emitted: torch.Tensor,
    row_failed: torch.Tensor,
) -> None:
    """At most 16 rows: a plain loop over host values."""
    ends, chances = cu_tokens.tolist(), rates.tolist()
    for row, slot in enumerate(slot_of_row.tolist()):
        begin, end = ends[row], ends[row + 1]
        if begin == end:
            accepted[slot] = 0
            continue
        key, drafts = int(seed[slot]), draft_tokens[slot, : end - begin - 1].tolist()
        count = 0
        for draft, place in zip(drafts, positions[begin : end - 1].tolist(), strict=True):
            if draft < 0 or uniform_at(key, place + 1, ACCEPT) >= chances[count]:
                break
            count += 1
        accepted[slot] = count
        emitted[slot, :count] = draft_tokens[slot, :count]
        emitted[slot, count] = sampled[begin + count]
        row_failed[slot] = token_failed[begin : begin + count + 1].any()


def _accept_synthetic_fake(*args: torch.Tensor) -> None:
    return None


accept_synthetic = define_op(
    "accept_synthetic(Tensor sampled, Tensor token_failed, Tensor positions, Tensor draft_tokens, Tensor rates, "
    "Tensor seed, Tensor cu_tokens, Tensor slot_of_row, Tensor(a!) accepted, Tensor(b!) emitted, "
    "Tensor(c!) row_failed) -> ()",
    cpu=_accept_synthetic_cpu,
    cuda=accept_synthetic_triton,
    fake=_accept_synthetic_fake,
)
"""`draftgraph::accept_synthetic`; see `accept_synthetic_reference`."""
