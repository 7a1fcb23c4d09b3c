"""Chooses how many drafts the rows of a round verify together: what yields most tokens for its time."""

from __future__ import annotations

import numpy as np
import torch

from .plan_window import plan_sizes, row_candidates
from .registration import define_op
from .triton_support import UNFUSED, KernelSpec, check_some, check_tensor, constants_of, jit, next_power_of_2, tl

PROBE_EVERY = 256
"""Every so many rounds the budget is one width wider than the best, so that what it expects stays known to be true."""
FIRST_ROUNDS, PROBE_FIRST = 256, 8
"""Of so many rounds at first, when little is known, every so many are."""

_MASS = 2.0**40
# Survivals are added as integers of this unit, so that sums do not depend on the order.
MOST_DRAFTS = 2048
"""The most entries of the kernel's tile: rows by drafts, both rounded up to powers of two."""


def choose_budget_reference(
    finished: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    draft_count: torch.Tensor,
    draft_limit: torch.Tensor,
    slot_of_row: torch.Tensor,
    widths: torch.Tensor,
    acceptance: torch.Tensor,
    verify_cost: torch.Tensor,
    draft_cost: torch.Tensor,
    rounds: torch.Tensor,
    budget: torch.Tensor,
    rate: torch.Tensor,
) -> None:
    """The specification of `choose_budget`; reads nothing on the host.

    Draft k of a row survives with probability `S(row, k) = acceptance[0] * ... * acceptance[k]`, as in `budget_topk`,
    of the drafts that `plan_window` would admit. The budget B maximises the tokens that a round is expected to yield
    over what it costs, `(rows + the sum of the B largest S) / (draft_cost + verify_cost)`, where rows counts the live
    ones, and the verify is the narrowest that holds B drafts and the rows' anchors. Since the sum grows with B, of each
    width only the fullest budget is a candidate; between equals the narrowest width wins. Every 256th round, of
    the first 256 every 8th, the next wider width is taken, if there is one.

    Args:
        finished: bool [R1].
        length: int32 [R1], committed tokens, at least 1.
        limit: int32 [R1].
        draft_count: int32 [R1], the drafts that the speculator made.
        draft_limit: int32 [at least B + 1], the most drafts per row by the number of live rows.
        slot_of_row: int32 [B].
        widths: int32 [n], ascending verify widths; the last must hold all the windows.
        acceptance: float32 [R1, K], the estimate that draft k is accepted given that those before it are; NaN counts
            as 0.
        verify_cost: float32 [n], milliseconds of a verify of each width, positive.
        draft_cost: float32 [K + 1], milliseconds of drafting that made so many drafts; what the longest row has counts.
        rounds: int32 [1], rounds before this one.
        budget: int32 [1], written: B; 0 where no row is live.
        rate: float32 [1], written: tokens per millisecond expected of the best budget; 0 where no row is live.
    """
    slots = slot_of_row.long()
    num_rows, num_drafts = slots.shape[0], acceptance.shape[1]
    live = ~finished[slots]
    rows = live.sum()
    made = draft_count[slots]
    most = draft_limit.index_select(0, rows.reshape(1))
    candidates = torch.minimum(torch.minimum(made, most), limit[slots] - length[slots] - 1)
    candidates = candidates.clamp(0, num_drafts) * live
    steps = torch.where(live, made, 0).amax().clamp(0, num_drafts) if num_rows else rows

    factor = acceptance[slots]
    factor = torch.where(factor > 0, factor, 0.0).clamp_max(1.0)
    survival = torch.empty_like(factor)
    product = torch.ones_like(factor[:, :1])
    for k in range(num_drafts):
        product = product * factor[:, k : k + 1]
        survival[:, k : k + 1] = product
    position = torch.arange(num_drafts, device=survival.device)
    mass = torch.where(position < candidates[:, None], (survival * _MASS).long(), 0)
    best = mass.reshape(-1).sort(descending=True).values
    sums = torch.cat([best.new_zeros(1), best.cumsum(0)])

    room = widths.long() - rows
    drafts = torch.minimum(room.clamp_min(0), candidates.sum())
    tokens = (rows * int(_MASS) + sums.index_select(0, drafts)).float()
    cost = draft_cost.index_select(0, steps.reshape(1)) + verify_cost
    value = torch.where((room >= 0) & (rows > 0), tokens / cost, -1.0)
    top = value.amax()
    index = torch.arange(value.shape[0], device=value.device)
    chosen = torch.where(value == top, index, value.shape[0]).amin()
    often = torch.where(rounds < FIRST_ROUNDS, PROBE_FIRST, PROBE_EVERY)
    probing = (rounds % often == often - 1).long()
    wider = (chosen + probing).clamp_max(value.shape[0] - 1).reshape(1)
    budget.copy_(torch.where(rows > 0, drafts.index_select(0, wider), 0))
    rate.copy_(torch.where(rows > 0, top * (1.0 / _MASS), 0.0))


def _choose_budget_cpu(
    finished: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    draft_count: torch.Tensor,
    draft_limit: torch.Tensor,
    slot_of_row: torch.Tensor,
    widths: torch.Tensor,
    acceptance: torch.Tensor,
    verify_cost: torch.Tensor,
    draft_cost: torch.Tensor,
    rounds: torch.Tensor,
    budget: torch.Tensor,
    rate: torch.Tensor,
) -> None:
    finished_of, length_of, limit_of = finished.numpy(), length.numpy(), limit.numpy()
    count_of, num_drafts = draft_count.numpy(), acceptance.shape[1]
    slots = [slot for slot in slot_of_row.tolist() if not finished_of[slot]]
    rows = len(slots)
    if rows == 0:
        budget[0], rate[0] = 0, 0.0
        return
    most = min(int(draft_limit[rows]), num_drafts)
    room_of_row = limit_of[slots] - length_of[slots] - 1
    candidates = np.clip(np.minimum(np.minimum(count_of[slots], most), room_of_row), 0, None)
    steps = min(max(0, int(count_of[slots].max())), num_drafts)
    factor = acceptance.numpy()[slots]
    factor = np.minimum(np.where(factor > 0, factor, np.float32(0.0)), np.float32(1.0))
    # NumPy multiplies along a row one after the other, unlike torch.
    mass = (np.multiply.accumulate(factor, axis=1) * np.float32(_MASS)).astype(np.int64)
    mass[np.arange(num_drafts) >= candidates[:, None]] = 0
    best = np.sort(mass, axis=None)[::-1]
    sums = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(best)])
    room = widths.numpy() - rows
    drafts = np.minimum(np.maximum(room, 0), int(candidates.sum()))
    tokens = (rows * int(_MASS) + sums[drafts]).astype(np.float32)
    cost = draft_cost.numpy()[steps] + verify_cost.numpy()
    value = np.where(room >= 0, tokens / cost, np.float32(-1.0))
    chosen = int(value.argmax())
    number = int(rounds[0])
    often = PROBE_FIRST if number < FIRST_ROUNDS else PROBE_EVERY
    probing = number % often == often - 1
    budget[0] = int(drafts[min(chosen + probing, len(drafts) - 1)])
    rate[0] = float(value[chosen] * np.float32(1.0 / _MASS))


@jit(unspecialized=["num_rows", "num_widths"])
def _choose_budget_kernel(  # type: ignore[no-untyped-def]
    finished,
    length,
    limit,
    draft_count,
    draft_limit,
    slot_of_row,
    widths,
    acceptance,
    verify_cost,
    draft_cost,
    rounds,
    budget,
    rate,
    num_rows,
    num_widths,
    NUM_DRAFTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_WIDTHS: tl.constexpr,
    BLOCK_DRAFTS: tl.constexpr,
):
    # One program: the rows compete.
    row = tl.arange(0, ROWS)
    slot, live, _, candidates = row_candidates(
        finished, length, limit, draft_count, draft_limit, slot_of_row, row, num_rows
    )
    candidates = tl.minimum(candidates, NUM_DRAFTS)
    rows = tl.sum(live.to(tl.int32), 0)
    made = tl.load(draft_count + slot, mask=live, other=0)
    steps = tl.minimum(tl.maximum(tl.max(made, 0), 0), NUM_DRAFTS)
    position = tl.arange(0, BLOCK_DRAFTS)[None, :]
    product = tl.full([ROWS], 1.0, tl.float32)
    survival = tl.zeros([ROWS, BLOCK_DRAFTS], dtype=tl.float32)
    for k in range(NUM_DRAFTS):
        factor = tl.load(acceptance + slot * NUM_DRAFTS + k, mask=k < candidates, other=0.0)
        product *= tl.minimum(tl.where(factor > 0, factor, 0.0), 1.0)
        survival = tl.where(position == k, product[:, None], survival)
    competes = (position < candidates[:, None]) & (position < NUM_DRAFTS)
    total = tl.sum(tl.sum(competes.to(tl.int32), 1), 0)
    mass = tl.reshape(tl.where(competes, (survival * 1099511627776.0).to(tl.int64), -1), [ROWS * BLOCK_DRAFTS])

    at = tl.arange(0, BLOCK_WIDTHS)
    known = at < num_widths
    room = tl.load(widths + at, mask=known, other=0) - rows
    drafts = tl.minimum(tl.maximum(room, 0), total)
    # The largest mass that at least `drafts` reach, digit by digit, for all widths at once. Masses have 41 digits.
    least = tl.zeros([BLOCK_WIDTHS], dtype=tl.int64)
    one = tl.full([], 1, tl.int64)
    for digit in range(41):
        trial = least | (one << (40 - digit))
        reach = tl.sum((mass[:, None] >= trial[None, :]).to(tl.int32), 0)
        least = tl.where(reach >= drafts, trial, least)
    above = mass[:, None] > least[None, :]
    number = tl.sum(above.to(tl.int32), 0)
    sums = tl.sum(tl.where(above, mass[:, None], 0), 0) + (drafts - number).to(tl.int64) * least
    sums = tl.where(drafts > 0, sums, 0)

    tokens = (rows.to(tl.int64) * 1099511627776 + sums).to(tl.float32)
    cost = tl.load(draft_cost + steps) + tl.load(verify_cost + at, mask=known, other=1.0)
    value = tl.where(known & (room >= 0) & (rows > 0), tl.div_rn(tokens, cost), -1.0)
    top = tl.max(value, 0)
    chosen = tl.min(tl.where(known & (value == top), at, BLOCK_WIDTHS), 0)
    round_number = tl.load(rounds)
    often = tl.where(round_number < 256, 8, 256)
    probing = (round_number % often == often - 1).to(tl.int32)
    wider = tl.minimum(chosen + probing, num_widths - 1)
    taken = tl.sum(tl.where(at == wider, drafts, 0), 0)
    tl.store(budget, tl.where(rows > 0, taken, 0))
    tl.store(rate, tl.where(rows > 0, top * 9.094947017729282e-13, 0.0))


def _sizes(rows: int, num_widths: int, num_drafts: int) -> dict[str, int]:
    across = next_power_of_2(rows)
    # Of a smaller tile Triton gives every thread all entries, which takes more registers than a larger one does.
    return {
        **plan_sizes(rows, num_widths),
        "ROWS": across,
        "NUM_DRAFTS": num_drafts,
        "BLOCK_DRAFTS": max(next_power_of_2(num_drafts), 256 // across),
    }


def _num_warps(sizes: dict[str, int]) -> int:
    entries = sizes["ROWS"] * sizes["BLOCK_DRAFTS"]
    return 4 if entries <= 256 else 8


def choose_budget_triton(
    finished: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    draft_count: torch.Tensor,
    draft_limit: torch.Tensor,
    slot_of_row: torch.Tensor,
    widths: torch.Tensor,
    acceptance: torch.Tensor,
    verify_cost: torch.Tensor,
    draft_cost: torch.Tensor,
    rounds: torch.Tensor,
    budget: torch.Tensor,
    rate: torch.Tensor,
) -> None:
    """The launch for CUDA tensors, or for CPU tensors under the interpreter.

    Raises:
        ValueError: an argument that the kernel could not take.
    """
    int32, single = (torch.int32,), (torch.float32,)
    check_tensor("finished", finished, dtypes=(torch.bool,), shape=(None,))
    slots, device = finished.shape[0], finished.device
    check_some("finished", "slot", slots)
    for name, of_slot in (("length", length), ("limit", limit), ("draft_count", draft_count)):
        check_tensor(name, of_slot, dtypes=int32, shape=(slots,), device=device)
    check_tensor("slot_of_row", slot_of_row, dtypes=int32, shape=(None,), device=device)
    rows = slot_of_row.shape[0]
    check_some("slot_of_row", "row", rows)
    check_tensor("draft_limit", draft_limit, dtypes=int32, shape=(None,), device=device)
    if draft_limit.shape[0] <= rows:
        raise ValueError(f"draft_limit has {draft_limit.shape[0]} entries; accepted: at least {rows + 1}, rows and one")
    check_tensor("widths", widths, dtypes=int32, shape=(None,), device=device)
    check_some("widths", "width", widths.shape[0])
    check_tensor("acceptance", acceptance, dtypes=single, shape=(slots, None), device=device)
    drafts = acceptance.shape[1]
    check_tensor("verify_cost", verify_cost, dtypes=single, shape=(widths.shape[0],), device=device)
    check_tensor("draft_cost", draft_cost, dtypes=single, shape=(drafts + 1,), device=device)
    check_tensor("rounds", rounds, dtypes=int32, shape=(1,), device=device)
    check_tensor("budget", budget, dtypes=int32, shape=(1,), device=device)
    check_tensor("rate", rate, dtypes=single, shape=(1,), device=device)
    sizes = _sizes(rows, widths.shape[0], drafts)
    if sizes["ROWS"] * sizes["BLOCK_DRAFTS"] > MOST_DRAFTS:
        raise ValueError(
            f"{rows} rows of {drafts} drafts; accepted: at most {MOST_DRAFTS} drafts, both numbers rounded up to "
            "powers of two"
        )
    _choose_budget_kernel[(1,)](
        finished,
        length,
        limit,
        draft_count,
        draft_limit,
        slot_of_row,
        widths,
        acceptance,
        verify_cost,
        draft_cost,
        rounds,
        budget,
        rate,
        **sizes,
        num_warps=_num_warps(sizes),
        **UNFUSED,
    )


def kernel_specs() -> list[KernelSpec]:
    """The smallest bucket, the largest, and the largest with as many drafts as a tree has nodes."""

    def spec(rows: int, num_drafts: int) -> KernelSpec:
        sizes = _sizes(rows, 8, num_drafts)
        named = f"{rows} row{'s' if rows > 1 else ''}, {num_drafts} drafts"
        integers = ["length", "limit", "draft_count", "draft_limit", "slot_of_row", "widths", "rounds", "budget"]
        return KernelSpec(
            op="choose_budget",
            variant=named,
            kernel=_choose_budget_kernel,
            arguments={
                "finished": "*i1",
                **dict.fromkeys(integers, "*i32"),
                **dict.fromkeys(["acceptance", "verify_cost", "draft_cost", "rate"], "*fp32"),
                **dict.fromkeys(["num_rows", "num_widths"], "i32"),
            },
            constants=constants_of(sizes),
            num_warps=_num_warps(sizes),
            num_stages=3,
            enable_fp_fusion=False,
            shape=f"{named}, 8 widths",
            bytes_moved=rows * (17 + 4 * num_drafts) + 4 * num_drafts + 80,
            max_registers=160,
        )

    return [spec(1, 7), spec(16, 7), spec(16, 15), spec(16, 64)]


def _choose_budget_fake(*args: object) -> None:
    return None


choose_budget = define_op(
    "choose_budget(Tensor finished, Tensor length, Tensor limit, Tensor draft_count, Tensor draft_limit, "
    "Tensor slot_of_row, Tensor widths, Tensor acceptance, Tensor verify_cost, Tensor draft_cost, Tensor rounds, "
    "Tensor(a!) budget, Tensor(b!) rate) -> ()",
    cpu=_choose_budget_cpu,
    fake=_choose_budget_fake,
    cuda=choose_budget_triton,
)
"""`draftgraph::choose_budget`; see `choose_budget_reference`."""
