"""Decides whether another draft of every row is worth making."""

from __future__ import annotations

import numpy as np
import torch

from .choose_budget import FIRST_ROUNDS, MOST_DRAFTS, PROBE_EVERY, PROBE_FIRST
from .plan_window import plan_sizes
from .registration import define_op
from .triton_support import (
    UNFUSED,
    KernelSpec,
    check_some,
    check_tensor,
    constants_of,
    jit,
    next_power_of_2,
    row_range,
    tl,
)

_MASS = 2.0**19
# Survivals are integers of this unit: all of a round's fit into 31 bits, and their sums do not depend on the order.


def keep_drafting_reference(
    finished: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    draft_limit: torch.Tensor,
    slot_of_row: torch.Tensor,
    acceptance: torch.Tensor | None,
    widths: torch.Tensor | None,
    verify_cost: torch.Tensor | None,
    draft_cost: torch.Tensor | None,
    rounds: torch.Tensor | None,
    step: int,
    stop: torch.Tensor,
) -> None:
    """The specification of `keep_drafting`; reads nothing on the host.

    A live row can use draft `step` if that is within `draft_limit[live rows]` and its room, `limit - length - 1`. With
    no such row drafting stops. Without `acceptance` it goes on otherwise. With it, it goes on where some number of
    drafts above `step` is expected to be better than `step` of them: to yield more tokens for its time, with the best
    budget for it, as `choose_budget` would choose it (survivals are rounded down to multiples of 2**-19 here). In the
    rounds in which `choose_budget` looks one width further it goes on whatever is expected, to 1 draft, then in the
    next of these rounds to 2, and so on up to K and again from 1.

    Args:
        finished: bool [R1].
        length: int32 [R1].
        limit: int32 [R1].
        draft_limit: int32 [at least B + 1], the most drafts per row by the number of live rows.
        slot_of_row: int32 [B].
        acceptance: float32 [R1, K], the estimate that draft k is accepted given that those before it are, a forecast
            from `step` on; None, as the next four are: depth alone decides.
        widths: int32 [n], ascending verify widths; the last must hold all the windows.
        verify_cost: float32 [n], milliseconds of a verify of each width, positive.
        draft_cost: float32 [K + 1], milliseconds of drafting that makes so many drafts.
        rounds: int32 [1], rounds before this one.
        step: which draft, 0 to K - 1.
        stop: int32 [1], written: 0 to make the draft, 1 not to. The index of a `Switch` whose one branch makes it.
    """
    slots = slot_of_row.long()
    live = ~finished[slots]
    rows = live.sum()
    most = draft_limit.index_select(0, rows.reshape(1))
    room = torch.minimum(most, limit[slots] - length[slots] - 1) * live
    goes = (room > step).any()
    if acceptance is not None:
        assert widths is not None
        assert verify_cost is not None
        assert draft_cost is not None
        assert rounds is not None
        num_drafts = acceptance.shape[1]
        factor = acceptance[slots]
        factor = torch.where(factor > 0, factor, 0.0).clamp_max(1.0)
        survival = torch.empty_like(factor)
        product = torch.ones_like(factor[:, :1])
        for k in range(num_drafts):
            product = product * factor[:, k : k + 1]
            survival[:, k : k + 1] = product
        position = torch.arange(num_drafts, device=survival.device)
        mass = torch.where(position < room[:, None], (survival * _MASS).long(), -1).reshape(-1)
        mass, order = mass.sort(descending=True, stable=True)
        depth = torch.arange(num_drafts + 1, device=survival.device)[:, None]
        counts = (order % num_drafts < depth) & (mass >= 0)
        number = counts.cumsum(1)
        capacity = widths.long() - rows
        taken = counts[:, None, :] & (number[:, None, :] <= capacity[:, None])
        tokens = (rows * int(_MASS) + (taken * mass).sum(2)).float()
        value = tokens / (draft_cost[:, None] + verify_cost)
        value = torch.where(capacity >= 0, value, -1.0).amax(1)
        better = (value[step + 1 :] > value[step]).any()
        often = torch.where(rounds < FIRST_ROUNDS, PROBE_FIRST, PROBE_EVERY)
        probes = (rounds % often == often - 1) & (rounds // often % num_drafts >= step)
        goes = goes & (better | probes)
    stop.copy_((~goes).reshape(1).int())


def _keep_drafting_cpu(
    finished: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    draft_limit: torch.Tensor,
    slot_of_row: torch.Tensor,
    acceptance: torch.Tensor | None,
    widths: torch.Tensor | None,
    verify_cost: torch.Tensor | None,
    draft_cost: torch.Tensor | None,
    rounds: torch.Tensor | None,
    step: int,
    stop: torch.Tensor,
) -> None:
    finished_of, length_of, limit_of = finished.numpy(), length.numpy(), limit.numpy()
    live = [slot for slot in slot_of_row.tolist() if not finished_of[slot]]
    room = np.minimum(int(draft_limit[len(live)]), limit_of[live] - length_of[live] - 1)
    goes = bool((room > step).any())
    if goes and acceptance is not None:
        assert widths is not None
        assert verify_cost is not None
        assert draft_cost is not None
        assert rounds is not None
        num_drafts = acceptance.shape[1]
        factor = acceptance.numpy()[live]
        factor = np.minimum(np.where(factor > 0, factor, np.float32(0.0)), np.float32(1.0))
        position = np.arange(num_drafts)
        competes = position < room[:, None]
        # NumPy multiplies along a row one after the other, unlike torch.
        mass = (np.multiply.accumulate(factor, axis=1) * np.float32(_MASS)).astype(np.int64)[competes]
        order = np.argsort(-mass, kind="stable")
        mass, place = mass[order], np.broadcast_to(position, competes.shape)[competes][order]
        counts = place < np.arange(step, num_drafts + 1)[:, None]
        number, sums = counts.cumsum(1), (counts * mass).cumsum(1)
        capacity = widths.numpy() - len(live)
        taken = (number[:, None, :] <= capacity[:, None]).sum(2)
        best = np.where(taken > 0, np.take_along_axis(sums, np.maximum(taken - 1, 0), 1), 0)
        tokens = (len(live) * int(_MASS) + best).astype(np.float32)
        value = tokens / (draft_cost.numpy()[step:, None] + verify_cost.numpy())
        value = np.where(capacity >= 0, value, np.float32(-1.0)).max(1)
        often = PROBE_FIRST if int(rounds[0]) < FIRST_ROUNDS else PROBE_EVERY
        turn, rest = divmod(int(rounds[0]), often)
        probes = rest == often - 1 and turn % num_drafts >= step
        goes = probes or bool((value[1:] > value[0]).any())
    stop[0] = int(not goes)


@jit(unspecialized=["num_rows", "num_widths", "step"])
def _keep_drafting_kernel(  # type: ignore[no-untyped-def]
    finished,
    length,
    limit,
    draft_limit,
    slot_of_row,
    acceptance,
    widths,
    verify_cost,
    draft_cost,
    rounds,
    stop,
    num_rows,
    num_widths,
    step,
    NUM_DRAFTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_WIDTHS: tl.constexpr,
    BLOCK_DRAFTS: tl.constexpr,
):
    # One program: the rows compete.
    row = tl.arange(0, ROWS)
    inside = row < num_rows
    slot = tl.load(slot_of_row + row, mask=inside, other=0).to(tl.int64)
    live = inside & (tl.load(finished + slot, mask=inside, other=1).to(tl.int32) == 0)
    rows = tl.sum(live.to(tl.int32), 0)
    most = tl.load(draft_limit + rows)
    left = tl.load(limit + slot, mask=inside, other=0) - tl.load(length + slot, mask=inside, other=0) - 1
    room = tl.where(live, tl.minimum(left, most), 0)
    goes = tl.max(room, 0) > step
    if acceptance is not None:
        position = tl.arange(0, BLOCK_DRAFTS)[None, :]
        product = tl.full([ROWS], 1.0, tl.float32)
        survival = tl.zeros([ROWS, BLOCK_DRAFTS], dtype=tl.float32)
        for k in range(NUM_DRAFTS):
            factor = tl.load(acceptance + slot * NUM_DRAFTS + k, mask=k < room, other=0.0)
            product *= tl.minimum(tl.where(factor > 0, factor, 0.0), 1.0)
            survival = tl.where(position == k, product[:, None], survival)
        competes = (position < room[:, None]) & (position < NUM_DRAFTS)
        mass = tl.reshape(tl.where(competes, (survival * 524288.0).to(tl.int32), -1), [ROWS * BLOCK_DRAFTS])
        place = tl.reshape(tl.broadcast_to(position, [ROWS, BLOCK_DRAFTS]), [ROWS * BLOCK_DRAFTS])
        at = tl.arange(0, BLOCK_WIDTHS)
        known = at < num_widths
        capacity = tl.load(widths + at, mask=known, other=0) - rows
        verify = tl.load(verify_cost + at, mask=known, other=1.0)
        now = -1.0
        later = -1.0
        for depth in range(step, NUM_DRAFTS + 1):
            of_depth = tl.where(place < depth, mass, -1)
            total = tl.sum((of_depth >= 0).to(tl.int32), 0)
            drafts = tl.minimum(tl.maximum(capacity, 0), total)
            # The largest mass that at least `drafts` reach, digit by digit, for all widths at once.
            least = tl.zeros([BLOCK_WIDTHS], dtype=tl.int32)
            for digit in range(20):
                trial = least | (1 << (19 - digit))
                reach = tl.sum((of_depth[:, None] >= trial[None, :]).to(tl.int32), 0)
                least = tl.where(reach >= drafts, trial, least)
            above = of_depth[:, None] > least[None, :]
            number = tl.sum(above.to(tl.int32), 0)
            sums = tl.sum(tl.where(above, of_depth[:, None], 0), 0) + (drafts - number) * least
            tokens = (rows * 524288 + tl.where(drafts > 0, sums, 0)).to(tl.float32)
            value = tl.div_rn(tokens, tl.load(draft_cost + depth) + verify)
            best = tl.max(tl.where(known & (capacity >= 0), value, -1.0), 0)
            now = tl.where(depth == step, best, now)
            later = tl.where(depth == step, later, tl.maximum(later, best))
        number_of_round = tl.load(rounds)
        often = tl.where(number_of_round < 256, 8, 256)
        probes = (number_of_round % often == often - 1) & (number_of_round // often % NUM_DRAFTS >= step)
        goes = goes & ((later > now) | probes)
    tl.store(stop, 1 - goes.to(tl.int32))


def _sizes(rows: int, num_widths: int, num_drafts: int) -> dict[str, int]:
    """The sizes of the kernel; `num_drafts` 0 where depth alone decides."""
    across = next_power_of_2(rows) if num_drafts else row_range(rows)
    plan = plan_sizes(rows, max(1, num_widths))
    # As in `choose_budget`: smaller tiles would take more registers.
    block = max(next_power_of_2(num_drafts), 256 // across) if num_drafts else 1
    return {**plan, "ROWS": across, "NUM_DRAFTS": num_drafts, "BLOCK_DRAFTS": block}


def _num_warps(sizes: dict[str, int]) -> int:
    return 1 if not sizes["NUM_DRAFTS"] else 4 if sizes["ROWS"] * sizes["BLOCK_DRAFTS"] <= 256 else 8


def keep_drafting_triton(
    finished: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    draft_limit: torch.Tensor,
    slot_of_row: torch.Tensor,
    acceptance: torch.Tensor | None,
    widths: torch.Tensor | None,
    verify_cost: torch.Tensor | None,
    draft_cost: torch.Tensor | None,
    rounds: torch.Tensor | None,
    step: int,
    stop: torch.Tensor,
) -> None:
    """The launch for CUDA tensors, or for CPU tensors under the interpreter.

    Raises:
        ValueError: an argument that the kernel could not take.
    """
    int32, single = (torch.int32,), (torch.float32,)
    check_tensor("finished", finished, dtypes=(torch.bool,), shape=(None,))
    slots, device = finished.shape[0], finished.device
    check_some("finished", "slot", slots)
    check_tensor("length", length, dtypes=int32, shape=(slots,), device=device)
    check_tensor("limit", limit, dtypes=int32, shape=(slots,), device=device)
    check_tensor("slot_of_row", slot_of_row, dtypes=int32, shape=(None,), device=device)
    rows = slot_of_row.shape[0]
    check_some("slot_of_row", "row", rows)
    check_tensor("draft_limit", draft_limit, dtypes=int32, shape=(None,), device=device)
    if draft_limit.shape[0] <= rows:
        raise ValueError(f"draft_limit has {draft_limit.shape[0]} entries; accepted: at least {rows + 1}, rows and one")
    check_tensor("stop", stop, dtypes=int32, shape=(1,), device=device)
    given = [part is not None for part in (acceptance, widths, verify_cost, draft_cost, rounds)]
    if any(given) and not all(given):
        raise ValueError("acceptance, widths, verify_cost, draft_cost and rounds go together; some of them are None")
    drafts, num_widths = 0, 0
    if acceptance is not None:
        assert widths is not None
        assert verify_cost is not None
        assert draft_cost is not None
        assert rounds is not None
        check_tensor("acceptance", acceptance, dtypes=single, shape=(slots, None), device=device)
        drafts = acceptance.shape[1]
        check_tensor("widths", widths, dtypes=int32, shape=(None,), device=device)
        num_widths = widths.shape[0]
        check_some("widths", "width", num_widths)
        check_tensor("verify_cost", verify_cost, dtypes=single, shape=(num_widths,), device=device)
        check_tensor("draft_cost", draft_cost, dtypes=single, shape=(drafts + 1,), device=device)
        check_tensor("rounds", rounds, dtypes=int32, shape=(1,), device=device)
        if not 0 <= step < drafts:
            raise ValueError(f"step is {step}; accepted: 0 to {drafts - 1}")
    sizes = _sizes(rows, num_widths, drafts)
    if sizes["ROWS"] * sizes["BLOCK_DRAFTS"] > MOST_DRAFTS:
        raise ValueError(
            f"{rows} rows of {drafts} drafts; accepted: at most {MOST_DRAFTS} drafts, both numbers rounded up to "
            "powers of two"
        )
    _keep_drafting_kernel[(1,)](
        finished,
        length,
        limit,
        draft_limit,
        slot_of_row,
        acceptance,
        widths,
        verify_cost,
        draft_cost,
        rounds,
        stop,
        **{**sizes, "num_widths": num_widths},
        step=step,
        num_warps=_num_warps(sizes),
        **UNFUSED,
    )


def kernel_specs() -> list[KernelSpec]:
    """The smallest bucket and the largest, and where depth alone decides."""
    specs = []
    for rows, drafts in ((1, 7), (16, 7), (16, 15), (16, 0)):
        parts = {**dict.fromkeys(["acceptance", "verify_cost", "draft_cost"], "*fp32"), "widths": "*i32"}
        parts["rounds"] = "*i32"
        sizes = _sizes(rows, 8, drafts)
        named = f"{rows} row{'s' if rows > 1 else ''}"
        specs.append(
            KernelSpec(
                op="keep_drafting",
                variant=f"{named}, {f'{drafts} drafts' if drafts else 'by depth'}",
                kernel=_keep_drafting_kernel,
                arguments={
                    "finished": "*i1",
                    **dict.fromkeys(["length", "limit", "draft_limit", "slot_of_row", "stop"], "*i32"),
                    **(parts if drafts else {}),
                    **dict.fromkeys(["num_rows", "num_widths", "step"], "i32"),
                },
                constants={**constants_of(sizes), **({} if drafts else dict.fromkeys(parts))},
                num_warps=_num_warps(sizes),
                num_stages=3,
                enable_fp_fusion=False,
                shape=f"{named}, {drafts} drafts, 8 widths",
                bytes_moved=rows * (13 + 4 * drafts) + (4 * drafts + 72 if drafts else 4),
                max_registers=128,
            )
        )
    return specs


def _keep_drafting_fake(*args: object) -> None:
    return None


keep_drafting = define_op(
    "keep_drafting(Tensor finished, Tensor length, Tensor limit, Tensor draft_limit, Tensor slot_of_row, "
    "Tensor? acceptance, Tensor? widths, Tensor? verify_cost, Tensor? draft_cost, Tensor? rounds, int step, "
    "Tensor(a!) stop) -> ()",
    cpu=_keep_drafting_cpu,
    fake=_keep_drafting_fake,
    cuda=keep_drafting_triton,
)
"""`draftgraph::keep_drafting`; see `keep_drafting_reference`."""
