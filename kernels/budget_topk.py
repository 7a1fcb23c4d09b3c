"""Shares a budget of drafts among the rows by how likely each draft is to survive verification."""

from __future__ import annotations

import numpy as np
import torch

from .plan_window import check_plan, plan_arguments, plan_sizes, row_candidates, write_windows
from .registration import define_op
from .triton_support import KernelSpec, check_tensor, constants_of, jit, next_power_of_2, tl

# The most entries of the kernel's tile of rows and drafts.
_TILE = 4096


def budget_topk_reference(
    finished: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    draft_count: torch.Tensor,
    draft_limit: torch.Tensor,
    slot_of_row: torch.Tensor,
    widths: torch.Tensor,
    confidence: torch.Tensor,
    budget: torch.Tensor,
    cu_tokens: torch.Tensor,
    base: torch.Tensor,
    width_index: torch.Tensor,
) -> None:
    """The specification of `budget_topk`; reads nothing on the host.

    Draft k of a row survives with probability `S(row, k) = confidence[0] * ... * confidence[k]`, multiplied in float32
    from the left, each factor held to [0, 1] (NaN counts as 0). The `budget` drafts with the largest S are verified,
    out of those that `plan_window` would admit: of a live row the first
    `min(draft_count, draft_limit[live rows], limit - length - 1, K)`. Between equals the earlier position goes first,
    then the earlier row. S does not rise along a row, so the drafts chosen of a row are always its first ones.

    Args:
        finished: bool [R1].
        length: int32 [R1], committed tokens, at least 1.
        limit: int32 [R1].
        draft_count: int32 [R1], the drafts that the speculator made; overwritten with those that are verified
            (0 for finished rows).
        draft_limit: int32 [at least B + 1], the most drafts per row by the number of live rows.
        slot_of_row: int32 [B].
        widths: int32 [n], ascending verify widths; the last must hold all the windows.
        confidence: float32 [R1, K], the estimate that draft k is accepted given that those before it are.
        budget: int32 [1], the drafts of all rows together; below 0 counts as 0.
        cu_tokens: int32 [B + 1], written.
        base: int32 [B], written: `length - 1`.
        width_index: int32 [1], written: the first of `widths` that holds all the windows.
    """
    slots = slot_of_row.long()
    live = ~finished[slots]
    length_of_row = length[slots]
    rows, num_drafts = slots.shape[0], confidence.shape[1]
    most = draft_limit.index_select(0, live.sum().reshape(1))
    candidates = torch.minimum(torch.minimum(draft_count[slots], most), limit[slots] - length_of_row - 1)
    candidates = candidates.clamp(0, num_drafts) * live

    factor = confidence[slots]
    factor = torch.where(factor > 0, factor, 0.0).clamp_max(1.0)
    survival = torch.empty_like(factor)
    product = torch.ones_like(factor[:, :1])
    # One after the other: `torch.cumprod` would round differently.
    for k in range(num_drafts):
        product = product * factor[:, k : k + 1]
        survival[:, k : k + 1] = product
    position = torch.arange(num_drafts, device=survival.device)
    survival = torch.where(position < candidates[:, None], survival, -1.0)
    order = survival.t().reshape(-1).sort(descending=True, stable=True)
    chosen = (torch.arange(rows * num_drafts, device=survival.device) < budget) & (order.values >= 0)
    drafts = torch.zeros_like(candidates)
    drafts.scatter_add_(0, order.indices % max(rows, 1), chosen.to(drafts.dtype))

    draft_count[slots] = drafts
    base.copy_(length_of_row - 1)
    cu_tokens[:1] = 0
    cu_tokens[1:] = torch.cumsum(drafts + live, 0, dtype=torch.int32)
    width_index.copy_((widths < cu_tokens[-1:]).sum(0, keepdim=True))


def _budget_topk_cpu(
    finished: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    draft_count: torch.Tensor,
    draft_limit: torch.Tensor,
    slot_of_row: torch.Tensor,
    widths: torch.Tensor,
    confidence: torch.Tensor,
    budget: torch.Tensor,
    cu_tokens: torch.Tensor,
    base: torch.Tensor,
    width_index: torch.Tensor,
) -> None:
    slots = slot_of_row.tolist()
    finished_of_slot, length_of_slot = finished.numpy(), length.numpy()
    limit_of_slot, count_of_slot, confidence_of_slot = limit.numpy(), draft_count.numpy(), confidence.numpy()
    live = [not finished_of_slot[slot] for slot in slots]
    most = min(int(draft_limit[sum(live)]), confidence.shape[1])
    ranked: list[tuple[np.float32, int, int]] = []
    for row, slot in enumerate(slots):
        room = int(limit_of_slot[slot]) - int(length_of_slot[slot]) - 1
        candidates = max(0, min(int(count_of_slot[slot]), most, room)) if live[row] else 0
        survival = np.float32(1.0)
        for k, factor in enumerate(confidence_of_slot[slot, :candidates]):
            survival = survival * (min(factor, np.float32(1.0)) if factor > 0 else np.float32(0.0))
            ranked.append((-survival, k, row))
    ranked.sort()
    drafts = [0] * len(slots)
    for _, _, row in ranked[: max(0, int(budget[0]))]:
        drafts[row] += 1
    ends = [0]
    for row, slot in enumerate(slots):
        count_of_slot[slot] = drafts[row]
        ends.append(ends[-1] + drafts[row] + live[row])
    cu_tokens.numpy()[:] = ends
    base.numpy()[:] = [int(length_of_slot[slot]) - 1 for slot in slots]
    width_index.numpy()[0] = sum(width < ends[-1] for width in widths.tolist())


@jit(unspecialized=["num_rows", "num_widths"])
def _budget_topk_kernel(  # type: ignore[no-untyped-def]
    finished,
    length,
    limit,
    draft_count,
    draft_limit,
    slot_of_row,
    widths,
    confidence,
    budget,
    cu_tokens,
    base,
    width_index,
    num_rows,
    num_widths,
    NUM_DRAFTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_WIDTHS: tl.constexpr,
    BLOCK_DRAFTS: tl.constexpr,
    ORDER_BITS: tl.constexpr,
):
    # One program: the rows compete.
    row = tl.arange(0, ROWS)
    slot, live, row_length, candidates = row_candidates(
        finished, length, limit, draft_count, draft_limit, slot_of_row, row, num_rows
    )
    position = tl.arange(0, BLOCK_DRAFTS)[None, :]
    product = tl.full([ROWS], 1.0, tl.float32)
    survival = tl.zeros([ROWS, BLOCK_DRAFTS], dtype=tl.float32)
    for k in range(NUM_DRAFTS):
        factor = tl.load(confidence + slot * NUM_DRAFTS + k, mask=k < candidates, other=0.0)
        product *= tl.minimum(tl.where(factor > 0, factor, 0.0), 1.0)
        survival = tl.where(position == k, product[:, None], survival)
    # The bits of numbers in [0, 1] order as the numbers do, and have 30 digits.
    competes = (position < candidates[:, None]) & (position < NUM_DRAFTS)
    key = tl.where(competes, survival.to(tl.int32, bitcast=True), -1)
    wanted = tl.minimum(tl.maximum(tl.load(budget), 0), tl.sum(tl.sum(competes.to(tl.int32), 1), 0))
    # The largest key that at least `wanted` reach, digit by digit.
    least = 0
    for digit in range(30):
        trial = least | (1 << (29 - digit))
        reach = tl.sum(tl.sum((key >= trial).to(tl.int32), 1), 0)
        least = tl.where(reach >= wanted, trial, least)
    above = key > least
    # Of those that have just this key, the first in order as far as the budget goes: the longest range that holds
    # no more of them.
    order = position * ROWS + row[:, None]
    missing = wanted - tl.sum(tl.sum(above.to(tl.int32), 1), 0)
    end = 0
    for digit in range(ORDER_BITS):
        trial = end | (1 << (ORDER_BITS - 1 - digit))
        held = tl.sum(tl.sum(((key == least) & (order < trial)).to(tl.int32), 1), 0)
        end = tl.where(held <= missing, trial, end)
    chosen = above | ((key == least) & (order < end))
    drafts = tl.sum(chosen.to(tl.int32), 1)
    write_windows(
        slot, live, row_length, drafts, draft_count, widths, cu_tokens, base, width_index, row, num_rows, num_widths,
        BLOCK_WIDTHS,
    )  # fmt: skip


def _sizes(plan: dict[str, int], num_drafts: int) -> dict[str, int]:
    """The constants of the kernel, given those that it has in common with `plan_window`'s."""
    rows, columns = next_power_of_2(plan["num_rows"]), next_power_of_2(num_drafts)
    entries = rows * columns
    return {**plan, "ROWS": rows, "NUM_DRAFTS": num_drafts, "BLOCK_DRAFTS": columns, "ORDER_BITS": entries.bit_length()}


def _num_warps(sizes: dict[str, int]) -> int:
    # Reductions within one warp need no shared memory.
    entries = sizes["ROWS"] * sizes["BLOCK_DRAFTS"]
    return 1 if entries <= 256 else 4 if entries <= 2048 else 8


def budget_topk_triton(
    finished: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    draft_count: torch.Tensor,
    draft_limit: torch.Tensor,
    slot_of_row: torch.Tensor,
    widths: torch.Tensor,
    confidence: torch.Tensor,
    budget: torch.Tensor,
    cu_tokens: torch.Tensor,
    base: torch.Tensor,
    width_index: torch.Tensor,
) -> None:
    """The launch for CUDA tensors, or for CPU tensors under the interpreter.

    Raises:
        ValueError: an argument that the kernel could not take.
    """
    plan = check_plan(
        finished, length, limit, draft_count, draft_limit, slot_of_row, widths, cu_tokens, base, width_index
    )
    device, slots = finished.device, finished.shape[0]
    check_tensor("confidence", confidence, dtypes=(torch.float32,), shape=(slots, None), device=device)
    check_tensor("budget", budget, dtypes=(torch.int32,), shape=(1,), device=device)
    sizes = _sizes(plan, confidence.shape[1])
    if sizes["ROWS"] * sizes["BLOCK_DRAFTS"] > _TILE:
        raise ValueError(
            f"{plan['num_rows']} rows of {confidence.shape[1]} drafts; accepted: at most {_TILE} drafts, both numbers "
            "rounded up to powers of two"
        )
    _budget_topk_kernel[(1,)](
        finished,
        length,
        limit,
        draft_count,
        draft_limit,
        slot_of_row,
        widths,
        confidence,
        budget,
        cu_tokens,
        base,
        width_index,
        **sizes,
        num_warps=_num_warps(sizes),
    )


def kernel_specs() -> list[KernelSpec]:
    """The smallest bucket, the largest, and the largest with as many drafts as a tree has nodes."""

    def spec(rows: int, num_drafts: int) -> KernelSpec:
        sizes = _sizes(plan_sizes(rows, 6), num_drafts)
        named = f"{rows} row{'s' if rows > 1 else ''}, {num_drafts} drafts"
        return KernelSpec(
            op="budget_topk",
            variant=named,
            kernel=_budget_topk_kernel,
            arguments=plan_arguments() | {"confidence": "*fp32", "budget": "*i32"},
            constants=constants_of(sizes),
            num_warps=_num_warps(sizes),
            num_stages=3,
            shape=f"{named}, 6 widths",
            bytes_moved=rows * (29 + 4 * num_drafts) + 40,
            max_registers=128,
        )

    return [spec(1, 7), spec(16, 7), spec(16, 64)]


def _budget_topk_fake(*args: torch.Tensor) -> None:
    return None


budget_topk = define_op(
    "budget_topk(Tensor finished, Tensor length, Tensor limit, Tensor(a!) draft_count, Tensor draft_limit, "
    "Tensor slot_of_row, Tensor widths, Tensor confidence, Tensor budget, Tensor(b!) cu_tokens, Tensor(c!) base, "
    "Tensor(d!) width_index) -> ()",
    cpu=_budget_topk_cpu,
    fake=_budget_topk_fake,
    cuda=budget_topk_triton,
)
"""`draftgraph::budget_topk`; see `budget_topk_reference`."""
