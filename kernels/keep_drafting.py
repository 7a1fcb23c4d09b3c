"""Decides whether another draft of every row is worth making."""

from __future__ import annotations

import numpy as np
import torch

from .choose_budget import PROBE_EVERY
from .plan_window import plan_sizes
from .registration import define_op
from .triton_support import UNFUSED, KernelSpec, check_tensor, jit, row_range, tl

_MASS = 2.0**40


def keep_drafting_reference(
    finished: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    draft_limit: torch.Tensor,
    slot_of_row: torch.Tensor,
    acceptance: torch.Tensor | None,
    rate: torch.Tensor | None,
    step_cost: torch.Tensor | None,
    token_cost: torch.Tensor | None,
    rounds: torch.Tensor | None,
    step: int,
    stop: torch.Tensor,
) -> None:
    """The specification of `keep_drafting`; reads nothing on the host.

    A live row can use draft `step` if that is within `draft_limit[live rows]` and its room, `limit - length - 1`. With
    no such row drafting stops. Without `acceptance` it goes on otherwise. With it, it goes on where what is gained is
    worth its time, at `rate` tokens per millisecond: the sum over those rows of the draft's survival, less the price
    of verifying it, `max(0, S(row, step) - rate * token_cost)`, must reach `rate * step_cost[step]`. Every 128th round
    goes on whatever is expected, so that the estimates of later drafts stay known to be true.

    Args:
        finished: bool [R1].
        length: int32 [R1].
        limit: int32 [R1].
        draft_limit: int32 [at least B + 1], the most drafts per row by the number of live rows.
        slot_of_row: int32 [B].
        acceptance: float32 [R1, K], the estimate that draft k is accepted given that those before it are, for `step` a
            forecast; None, as the next four are: depth alone decides.
        rate: float32 [1], tokens per millisecond.
        step_cost: float32 [K], milliseconds of making each draft.
        token_cost: float32 [1], milliseconds of verifying one token more.
        rounds: int32 [1], rounds before this one.
        step: which draft, 0 to K - 1.
        stop: int32 [1], written: 0 to make the draft, 1 not to. The index of a `Switch` whose one branch makes it.
    """
    slots = slot_of_row.long()
    live = ~finished[slots]
    most = draft_limit.index_select(0, live.sum().reshape(1))
    room = torch.minimum(most, limit[slots] - length[slots] - 1)
    usable = live & (room > step)
    goes = usable.any()
    if acceptance is not None:
        assert rate is not None
        assert step_cost is not None
        assert token_cost is not None
        assert rounds is not None
        factor = acceptance[slots]
        factor = torch.where(factor > 0, factor, 0.0).clamp_max(1.0)
        product = torch.ones_like(factor[:, 0])
        for k in range(step + 1):
            product = product * factor[:, k]
        gain = torch.where(usable, (product - rate * token_cost).clamp_min(0.0), 0.0)
        gained = (gain * _MASS).long().sum(0, keepdim=True).float()
        price = rate * step_cost[step : step + 1] * _MASS
        goes = goes & ((gained >= price) | (rounds % PROBE_EVERY == PROBE_EVERY - 1))
    stop.copy_((~goes).reshape(1).int())


def _keep_drafting_cpu(
    finished: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    draft_limit: torch.Tensor,
    slot_of_row: torch.Tensor,
    acceptance: torch.Tensor | None,
    rate: torch.Tensor | None,
    step_cost: torch.Tensor | None,
    token_cost: torch.Tensor | None,
    rounds: torch.Tensor | None,
    step: int,
    stop: torch.Tensor,
) -> None:
    finished_of, length_of, limit_of = finished.numpy(), length.numpy(), limit.numpy()
    live = [slot for slot in slot_of_row.tolist() if not finished_of[slot]]
    most = int(draft_limit[len(live)])
    usable = [slot for slot in live if min(most, int(limit_of[slot]) - int(length_of[slot]) - 1) > step]
    goes = bool(usable)
    if goes and acceptance is not None:
        assert rate is not None
        assert step_cost is not None
        assert token_cost is not None
        assert rounds is not None
        factor = acceptance.numpy()[usable, : step + 1]
        factor = np.minimum(np.where(factor > 0, factor, np.float32(0.0)), np.float32(1.0))
        product = np.multiply.accumulate(factor, axis=1)[:, -1]
        speed = rate.numpy()[0]
        gain = np.maximum(product - speed * token_cost.numpy()[0], np.float32(0.0))
        gained = (gain * np.float32(_MASS)).astype(np.int64).sum().reshape(1).astype(np.float32)[0]
        price = speed * step_cost.numpy()[step] * np.float32(_MASS)
        goes = bool(gained >= price) or int(rounds[0]) % PROBE_EVERY == PROBE_EVERY - 1
    stop[0] = int(not goes)


@jit(unspecialized=["num_rows", "num_drafts", "step"])
def _keep_drafting_kernel(  # type: ignore[no-untyped-def]
    finished,
    length,
    limit,
    draft_limit,
    slot_of_row,
    acceptance,
    rate,
    step_cost,
    token_cost,
    rounds,
    stop,
    num_rows,
    num_drafts,
    step,
    ROWS: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    inside = row < num_rows
    slot = tl.load(slot_of_row + row, mask=inside, other=0).to(tl.int64)
    live = inside & (tl.load(finished + slot, mask=inside, other=1).to(tl.int32) == 0)
    most = tl.load(draft_limit + tl.sum(live.to(tl.int32), 0))
    left = tl.load(limit + slot, mask=inside, other=0) - tl.load(length + slot, mask=inside, other=0) - 1
    usable = live & (tl.minimum(left, most) > step)
    goes = tl.max(usable.to(tl.int32), 0) != 0
    if acceptance is not None:
        product = tl.full([ROWS], 1.0, tl.float32)
        for k in range(step + 1):
            factor = tl.load(acceptance + slot * num_drafts + k, mask=usable, other=0.0)
            product *= tl.minimum(tl.where(factor > 0, factor, 0.0), 1.0)
        speed = tl.load(rate)
        gain = tl.where(usable, tl.maximum(product - speed * tl.load(token_cost), 0.0), 0.0)
        gained = tl.sum((gain * 1099511627776.0).to(tl.int64), 0).to(tl.float32)
        price = speed * tl.load(step_cost + step) * 1099511627776.0
        probes = tl.load(rounds) % 128 == 127
        goes = goes & ((gained >= price) | probes)
    tl.store(stop, 1 - goes.to(tl.int32))


def keep_drafting_triton(
    finished: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    draft_limit: torch.Tensor,
    slot_of_row: torch.Tensor,
    acceptance: torch.Tensor | None,
    rate: torch.Tensor | None,
    step_cost: torch.Tensor | None,
    token_cost: torch.Tensor | None,
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
    check_tensor("length", length, dtypes=int32, shape=(slots,), device=device)
    check_tensor("limit", limit, dtypes=int32, shape=(slots,), device=device)
    check_tensor("slot_of_row", slot_of_row, dtypes=int32, shape=(None,), device=device)
    rows = slot_of_row.shape[0]
    check_tensor("draft_limit", draft_limit, dtypes=int32, shape=(None,), device=device)
    if draft_limit.shape[0] <= rows:
        raise ValueError(f"draft_limit has {draft_limit.shape[0]} entries; accepted: at least {rows + 1}, rows and one")
    check_tensor("stop", stop, dtypes=int32, shape=(1,), device=device)
    given = [part is not None for part in (acceptance, rate, step_cost, token_cost, rounds)]
    if any(given) and not all(given):
        raise ValueError("acceptance, rate, step_cost, token_cost and rounds go together; some of them are None")
    drafts = 0
    if acceptance is not None:
        check_tensor("acceptance", acceptance, dtypes=single, shape=(slots, None), device=device)
        drafts = acceptance.shape[1]
        for name, part, size in (("rate", rate, 1), ("step_cost", step_cost, drafts), ("token_cost", token_cost, 1)):
            assert part is not None
            check_tensor(name, part, dtypes=single, shape=(size,), device=device)
        assert rounds is not None
        check_tensor("rounds", rounds, dtypes=int32, shape=(1,), device=device)
        if not 0 <= step < drafts:
            raise ValueError(f"step is {step}; accepted: 0 to {drafts - 1}")
    _keep_drafting_kernel[(1,)](
        finished,
        length,
        limit,
        draft_limit,
        slot_of_row,
        acceptance,
        rate,
        step_cost,
        token_cost,
        rounds,
        stop,
        rows,
        drafts,
        step,
        ROWS=row_range(rows),
        num_warps=1,
        **UNFUSED,
    )


def kernel_specs() -> list[KernelSpec]:
    """The smallest bucket and the largest, and where depth alone decides."""
    specs = []
    for rows, adaptive in ((1, True), (16, True), (16, False)):
        parts = ["acceptance", "rate", "step_cost", "token_cost"]
        given = {**dict.fromkeys(parts, "*fp32"), "rounds": "*i32"} if adaptive else {}
        specs.append(
            KernelSpec(
                op="keep_drafting",
                variant=f"{rows} row{'s' if rows > 1 else ''}{'' if adaptive else ', by depth'}",
                kernel=_keep_drafting_kernel,
                arguments={
                    "finished": "*i1",
                    **dict.fromkeys(["length", "limit", "draft_limit", "slot_of_row", "stop"], "*i32"),
                    **given,
                    **dict.fromkeys(["num_rows", "num_drafts", "step"], "i32"),
                },
                constants={
                    "ROWS": plan_sizes(rows, 1)["ROWS"],
                    **({} if adaptive else dict.fromkeys([*parts, "rounds"])),
                },
                num_warps=1,
                enable_fp_fusion=False,
                shape=f"{rows} rows, draft 4",
                bytes_moved=rows * (13 + (16 if adaptive else 0)) + 24,
                max_registers=64,
            )
        )
    return specs


def _keep_drafting_fake(*args: object) -> None:
    return None


keep_drafting = define_op(
    "keep_drafting(Tensor finished, Tensor length, Tensor limit, Tensor draft_limit, Tensor slot_of_row, "
    "Tensor? acceptance, Tensor? rate, Tensor? step_cost, Tensor? token_cost, Tensor? rounds, int step, "
    "Tensor(a!) stop) -> ()",
    cpu=_keep_drafting_cpu,
    fake=_keep_drafting_fake,
    cuda=keep_drafting_triton,
)
"""`draftgraph::keep_drafting`; see `keep_drafting_reference`."""
