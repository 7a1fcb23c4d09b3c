"""Decides how many drafts every row verifies, and from that the packed windows and the verify width."""

from __future__ import annotations

import torch

from .registration import define_op
from .triton_support import KernelSpec, check_some, check_tensor, constants_of, jit, next_power_of_2, row_range, tl


def plan_window_reference(
    finished: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    draft_count: torch.Tensor,
    draft_limit: torch.Tensor,
    slot_of_row: torch.Tensor,
    widths: torch.Tensor,
    cu_tokens: torch.Tensor,
    base: torch.Tensor,
    width_index: torch.Tensor,
) -> None:
    """The specification of `plan_window`; reads nothing on the host.

    A live row (one that is not finished) verifies at least 0 and at most
    `min(draft_count, draft_limit[live rows], limit - length - 1)` drafts: one beyond its limit could not be
    emitted, since a round emits one token more than it accepts. Its window is its anchor and these drafts.
    A finished row has an empty window.

    Args:
        finished: bool [R1].
        length: int32 [R1], committed tokens, at least 1.
        limit: int32 [R1].
        draft_count: int32 [R1], the drafts that the speculator made; overwritten with those that are verified
            (0 for finished rows).
        draft_limit: int32 [at least B + 1], the most drafts per row by the number of live rows.
        slot_of_row: int32 [B].
        widths: int32 [n], ascending verify widths; the last must hold all the windows.
        cu_tokens: int32 [B + 1], written.
        base: int32 [B], written: `length - 1`.
        width_index: int32 [1], written: the first of `widths` that holds all the windows.
    """
    slots = slot_of_row.long()
    live = ~finished[slots]
    length_of_row = length[slots]
    most = draft_limit.index_select(0, live.sum().reshape(1))
    drafts = torch.minimum(torch.minimum(draft_count[slots], most), limit[slots] - length_of_row - 1)
    drafts = drafts.clamp_min(0) * live
    draft_count[slots] = drafts
    base.copy_(length_of_row - 1)
    cu_tokens[:1] = 0
    cu_tokens[1:] = torch.cumsum(drafts + live, 0, dtype=torch.int32)
    width_index.copy_((widths < cu_tokens[-1:]).sum(0, keepdim=True))


def _plan_window_cpu(
    finished: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    draft_count: torch.Tensor,
    draft_limit: torch.Tensor,
    slot_of_row: torch.Tensor,
    widths: torch.Tensor,
    cu_tokens: torch.Tensor,
    base: torch.Tensor,
    width_index: torch.Tensor,
) -> None:
    """At most 16 rows: a plain loop over host values beats a dozen tensor operations of a few elements."""
    slots = slot_of_row.tolist()
    finished_of_slot, length_of_slot = finished.numpy(), length.numpy()
    limit_of_slot, count_of_slot = limit.numpy(), draft_count.numpy()
    live = [not finished_of_slot[slot] for slot in slots]
    most = int(draft_limit[sum(live)])
    ends, bases = [0], []
    for slot, is_live in zip(slots, live, strict=True):
        row_length = int(length_of_slot[slot])
        drafts = 0
        if is_live:
            drafts = max(0, min(int(count_of_slot[slot]), most, int(limit_of_slot[slot]) - row_length - 1))
        count_of_slot[slot] = drafts
        bases.append(row_length - 1)
        ends.append(ends[-1] + drafts + is_live)
    cu_tokens.numpy()[:] = ends
    base.numpy()[:] = bases
    width_index.numpy()[0] = sum(width < ends[-1] for width in widths.tolist())


@jit
def row_candidates(finished, length, limit, draft_count, draft_limit, slot_of_row, row, num_rows):  # type: ignore[no-untyped-def]
    """Per row of the bucket: its slot, whether it is live, its length, and the most drafts that it may verify."""
    inside = row < num_rows
    slot = tl.load(slot_of_row + row, mask=inside, other=0).to(tl.int64)
    is_finished = tl.load(finished + slot, mask=inside, other=1).to(tl.int32)
    live = inside & (is_finished == 0)
    most = tl.load(draft_limit + tl.sum(live.to(tl.int32), 0))
    row_length = tl.load(length + slot, mask=inside, other=1)
    room = tl.load(limit + slot, mask=inside, other=0) - row_length - 1
    drafts = tl.minimum(tl.minimum(tl.load(draft_count + slot, mask=inside, other=0), most), room)
    return slot, live, row_length, tl.where(live, tl.maximum(drafts, 0), 0)


@jit
def write_windows(  # type: ignore[no-untyped-def]
    slot,
    live,
    row_length,
    drafts,
    draft_count,
    widths,
    cu_tokens,
    base,
    width_index,
    row,
    num_rows,
    num_widths,
    BLOCK_WIDTHS: tl.constexpr,
):
    """Writes the rows' drafts and windows and the first of the widths that holds them."""
    inside = row < num_rows
    # Rows that share a slot, the padding ones, are finished and all write 0.
    tl.store(draft_count + slot, drafts, mask=inside)
    tl.store(base + row, row_length - 1, mask=inside)
    size = drafts + live.to(tl.int32)
    tl.store(cu_tokens, 0)
    tl.store(cu_tokens + 1 + row, tl.cumsum(size, 0), mask=inside)
    at = tl.arange(0, BLOCK_WIDTHS)
    width = tl.load(widths + at, mask=at < num_widths, other=2147483647)
    tl.store(width_index, tl.sum((width < tl.sum(size, 0)).to(tl.int32), 0))


@jit(unspecialized=["num_rows", "num_widths"])
def _plan_window_kernel(  # type: ignore[no-untyped-def]
    finished,
    length,
    limit,
    draft_count,
    draft_limit,
    slot_of_row,
    widths,
    cu_tokens,
    base,
    width_index,
    num_rows,
    num_widths,
    ROWS: tl.constexpr,
    BLOCK_WIDTHS: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    slot, live, row_length, drafts = row_candidates(
        finished, length, limit, draft_count, draft_limit, slot_of_row, row, num_rows
    )
    write_windows(
        slot, live, row_length, drafts, draft_count, widths, cu_tokens, base, width_index, row, num_rows, num_widths,
        BLOCK_WIDTHS,
    )  # fmt: skip


def check_plan(
    finished: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    draft_count: torch.Tensor,
    draft_limit: torch.Tensor,
    slot_of_row: torch.Tensor,
    widths: torch.Tensor,
    cu_tokens: torch.Tensor,
    base: torch.Tensor,
    width_index: torch.Tensor,
) -> dict[str, int]:
    """Checks what the launches of `plan_window` and `budget_topk` take in common.

    Returns:
        The sizes of their kernels.

    Raises:
        ValueError: an argument that the kernel could not take.
    """
    device, int32 = finished.device, (torch.int32,)
    check_tensor("finished", finished, dtypes=(torch.bool,), shape=(None,), device=device)
    slots = finished.shape[0]
    check_some("finished", "slot", slots)
    for name, of_slot in (("length", length), ("limit", limit), ("draft_count", draft_count)):
        check_tensor(name, of_slot, dtypes=int32, shape=(slots,), device=device)
    check_tensor("slot_of_row", slot_of_row, dtypes=int32, shape=(None,), device=device)
    rows = slot_of_row.shape[0]
    check_tensor("draft_limit", draft_limit, dtypes=int32, shape=(None,), device=device)
    if draft_limit.shape[0] <= rows:
        raise ValueError(f"draft_limit has {draft_limit.shape[0]} entries; accepted: at least {rows + 1}, rows and one")
    check_tensor("widths", widths, dtypes=int32, shape=(None,), device=device)
    check_some("widths", "width", widths.shape[0])
    check_tensor("cu_tokens", cu_tokens, dtypes=int32, shape=(rows + 1,), device=device)
    check_tensor("base", base, dtypes=int32, shape=(rows,), device=device)
    check_tensor("width_index", width_index, dtypes=int32, shape=(1,), device=device)
    return plan_sizes(rows, widths.shape[0])


def plan_sizes(rows: int, num_widths: int) -> dict[str, int]:
    """The sizes of the kernels of `plan_window` and `budget_topk`."""
    return {
        "num_rows": rows,
        "num_widths": num_widths,
        "ROWS": row_range(rows),
        "BLOCK_WIDTHS": max(8, next_power_of_2(num_widths)),
    }


def plan_window_triton(
    finished: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    draft_count: torch.Tensor,
    draft_limit: torch.Tensor,
    slot_of_row: torch.Tensor,
    widths: torch.Tensor,
    cu_tokens: torch.Tensor,
    base: torch.Tensor,
    width_index: torch.Tensor,
) -> None:
    """The launch for CUDA tensors, or for CPU tensors under the interpreter.

    Raises:
        ValueError: an argument that the kernel could not take.
    """
    tensors = (
        finished, length, limit, draft_count, draft_limit, slot_of_row, widths, cu_tokens, base, width_index
    )  # fmt: skip
    _plan_window_kernel[(1,)](*tensors, **check_plan(*tensors), num_warps=1)


def plan_arguments() -> dict[str, str]:
    """The types of what the kernels of `plan_window` and `budget_topk` take in common."""
    names = ["length", "limit", "draft_count", "draft_limit", "slot_of_row", "widths", "cu_tokens", "base"]
    sizes = {"num_rows": "i32", "num_widths": "i32"}
    return {"finished": "*u1"} | dict.fromkeys([*names, "width_index"], "*i32") | sizes


def kernel_specs() -> list[KernelSpec]:
    """The smallest bucket and the largest."""
    return [
        KernelSpec(
            op="plan_window",
            variant=f"{rows} row{'s' if rows > 1 else ''}",
            kernel=_plan_window_kernel,
            arguments=plan_arguments(),
            constants=constants_of(plan_sizes(rows, 6)),
            num_warps=1,
            num_stages=3,
            shape=f"{rows} row{'s' if rows > 1 else ''}, 6 widths",
            bytes_moved=rows * 29 + 36,
            max_registers=64,
        )
        for rows in (1, 16)
    ]


def _plan_window_fake(*args: torch.Tensor) -> None:
    return None


plan_window = define_op(
    "plan_window(Tensor finished, Tensor length, Tensor limit, Tensor(a!) draft_count, Tensor draft_limit, "
    "Tensor slot_of_row, Tensor widths, Tensor(b!) cu_tokens, Tensor(c!) base, Tensor(d!) width_index) -> ()",
    cpu=_plan_window_cpu,
    fake=_plan_window_fake,
    cuda=plan_window_triton,
)
"""`draftgraph::plan_window`; see `plan_window_reference`."""
