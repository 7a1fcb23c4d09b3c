"""Ends a round for the budgeter: keeps what the next round's budget may know, and learns from what was accepted."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from .acceptance_model import cleaned, cleaned_array, feature, feature_array, sigmoid, sigmoid_array
from .choose_budget import MOST_DRAFTS
from .estimate_acceptance import clean, feature_of, sigmoid_of
from .registration import define_op
from .triton_support import UNFUSED, KernelSpec, check_some, check_tensor, jit, next_power_of_2, row_range, tl

ROUNDS_PER_STEP = 100
"""Rounds between two Newton steps."""
FIRST_OMEGA, FIRST_BETA = 0.5, -0.2
"""What the weights are before anything was learned, and what the penalty pulls them to."""
PENALTY = 1e-3
"""Of half the squared distance from there (L2)."""
DAMPING = 50.0
"""A step from n labels goes n / (n + this) of the way."""
MOST_STEP = 2.0
"""The most that a weight changes in one step: far from its optimum the Newton step of a logistic loss overshoots."""
MOST_BETA = 40.0

UNKNOWN = 2.0
"""Stands in `forecast` for a confidence that no round has shown yet; what follows is taken for sure."""
RECENT = 0.25
"""The share of the last round in a row's forecast."""

LEAST_LABELS = 100
"""A position that never had so many follows the last one before it that had: what was never drafted is not known to be
worse."""

NUM_SUMS = 7
"""By position: labels; gradient; curvature; gradient, mixed curvature and curvature of omega; labels in all.
A step takes the gradients out and leaves half of the others but the last, so that a hundred rounds change less the more
was seen before."""
LABEL = 2**24
"""One label in the sums, which are integers so that they do not depend on the order."""
_SCALE = float(LABEL)
_FINE = 2.0**20
# The unit of the sums over positions in a Newton step.


def learn_acceptance_reference(
    confidence: torch.Tensor,
    seen: torch.Tensor,
    accepted: torch.Tensor,
    failed: torch.Tensor,
    finished: torch.Tensor,
    cu_tokens: torch.Tensor,
    slot_of_row: torch.Tensor,
    running: torch.Tensor,
    forecast: torch.Tensor,
    rounds: torch.Tensor,
    sums: torch.Tensor | None,
    weights: torch.Tensor | None,
) -> None:
    """The specification of `learn_acceptance`; reads nothing on the host.

    Runs between accept and commit, and does nothing while `running` is false or where no row has a window. What a later
    round may expect without looking at its own drafts goes into `forecast`.

    A row gives one label per verified draft up to the first rejected one, 1 if it was accepted and 0 if not; what comes
    after that was never judged. So does not a draft without a confidence above 0, which is no proposal, nor a row that
    failed. After every 100 rounds a Newton step of the labels since the last one, on the penalised logistic loss of
    `acceptance_model.py`, changes `weights`: the beta of a position with n labels by n / (n + 50) of the way, omega
    likewise by all labels; no weight by more than 2; omega stays at least 0. Labels and curvature count on by half
    at each further step, gradients do not. A position that had fewer than 100 labels so far gets the beta of
    the last one before it that had more.

    Args:
        confidence: float32 [R1, K].
        seen: float32 [R1, K], as `estimate_acceptance` wrote it.
        accepted: int32 [R1].
        failed: bool [R1].
        finished: bool [R1].
        cu_tokens: int32 [B + 1].
        slot_of_row: int32 [B].
        running: bool [1].
        forecast: float32 [R1, K], written for live rows: a quarter of `seen` and three of what it was; all of it where
            that was unknown, above 1.
        rounds: int32 [1], counts up.
        sums: int64 [7, K], of the labels, in units of 2**-24 (see `NUM_SUMS`); None with `weights`: learn nothing.
        weights: float32 [K + 1], omega and then beta of each position.
    """
    slots = slot_of_row.long()
    verified = cu_tokens[1:] - cu_tokens[:-1] - 1
    live = ((verified >= 0) & ~finished[slots] & running)[:, None]
    counts = live.any().reshape(1)
    before, now = forecast[slots], seen[slots]
    now = torch.where(before > 1.0, now, before + RECENT * (now - before))
    forecast[slots] = torch.where(live, now, before)
    rounds.add_(counts.int())
    if sums is None or weights is None:
        return
    position = torch.arange(confidence.shape[1], device=confidence.device)
    sure = cleaned(confidence[slots])
    judged = torch.minimum(verified, accepted[slots] + 1)[:, None]
    used = live & ~failed[slots][:, None] & (position < judged) & (sure > 0)
    label = (position < accepted[slots][:, None]).float()
    f = feature(sure)
    p = sigmoid(weights[:1] * f + weights[1:])
    error, spread = label - p, p * (1.0 - p)
    slope = spread * f
    terms = torch.stack([torch.ones_like(p), error, spread, error * f, slope, slope * f, torch.ones_like(p)])
    sums.add_((torch.where(used, terms, 0.0) * _SCALE).long().sum(1))

    due = counts & (rounds % ROUNDS_PER_STEP == 0)
    weights.copy_(torch.where(due, _newton(sums, weights), weights))
    sums.copy_(torch.where(due, _faded(sums), sums))


def _faded(sums: torch.Tensor) -> torch.Tensor:
    """What a step leaves of the sums."""
    fades = sums - (sums >> 1)
    none = torch.zeros_like(sums[0])
    return torch.stack([fades[0], none, fades[2], none, fades[4], fades[5], sums[6]])


def _newton(sums: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weights after a step. The matrix is diagonal but for omega's row, so it is solved in closed form."""
    count, gradient, curvature, by_omega, mixed, of_omega, ever = (sums.double() / _SCALE).unbind(0)
    omega, beta = weights[:1].double(), weights[1:].double()
    diagonal = curvature + PENALTY
    gradient = gradient - PENALTY * (beta - FIRST_BETA)

    def total(x: torch.Tensor) -> torch.Tensor:
        return (x * _FINE).long().sum(0, keepdim=True).double() / _FINE

    ratio = mixed / diagonal
    bottom = (total(of_omega - mixed * ratio) + PENALTY).clamp_min(PENALTY)
    top = total(by_omega - ratio * gradient) - PENALTY * (omega - FIRST_OMEGA)
    labels = total(count)
    step = (top / bottom * (labels / (labels + DAMPING))).clamp(-MOST_STEP, MOST_STEP)
    new_omega = (omega + step).clamp_min(0.0)
    step = (gradient - mixed * (new_omega - omega)) / diagonal * (count / (count + DAMPING))
    new_beta = (beta + step.clamp(-MOST_STEP, MOST_STEP)).clamp(-MOST_BETA, MOST_BETA)
    known = torch.where(ever >= LEAST_LABELS, torch.arange(beta.shape[0], device=beta.device), -1)
    at = known.cummax(0).values
    new_beta = torch.where(at < 0, new_beta, new_beta.index_select(0, at.clamp_min(0)))
    return torch.cat([new_omega, new_beta]).float()


def _learn_acceptance_cpu(
    confidence: torch.Tensor,
    seen: torch.Tensor,
    accepted: torch.Tensor,
    failed: torch.Tensor,
    finished: torch.Tensor,
    cu_tokens: torch.Tensor,
    slot_of_row: torch.Tensor,
    running: torch.Tensor,
    forecast: torch.Tensor,
    rounds: torch.Tensor,
    sums: torch.Tensor | None,
    weights: torch.Tensor | None,
) -> None:
    if not running[0]:
        return
    ends, finished_of = cu_tokens.tolist(), finished.numpy()
    rows = [
        (slot, ends[row + 1] - ends[row] - 1)
        for row, slot in enumerate(slot_of_row.tolist())
        if ends[row + 1] > ends[row] and not finished_of[slot]
    ]
    if not rows:
        return
    slots = [slot for slot, _ in rows]
    forecast_of = forecast.numpy()
    before, now = forecast_of[slots], seen.numpy()[slots]
    forecast_of[slots] = np.where(before > 1.0, now, before + np.float32(RECENT) * (now - before))
    counter = rounds.numpy()
    counter[0] += 1
    if sums is None or weights is None:
        return
    confidence_of, accepted_of, failed_of, total = confidence.numpy(), accepted.numpy(), failed.numpy(), sums.numpy()
    known = weights.numpy()
    for slot, verified in rows:
        kept = int(accepted_of[slot])
        judged = 0 if failed_of[slot] else min(verified, kept + 1)
        if judged <= 0:
            continue
        sure = cleaned_array(confidence_of[slot, :judged])
        used = sure > 0
        f = feature_array(sure)
        p = sigmoid_array(known[0] * f + known[1 : judged + 1])
        error: npt.NDArray[np.float32] = (np.arange(judged) < kept).astype(np.float32) - p
        spread = p * (np.float32(1.0) - p)
        slope = spread * f
        for index, term in enumerate((np.ones_like(p), error, spread, error * f, slope, slope * f, np.ones_like(p))):
            total[index, :judged] += (np.where(used, term, np.float32(0.0)) * np.float32(_SCALE)).astype(np.int64)
    if counter[0] % ROUNDS_PER_STEP == 0:
        weights.copy_(_newton(sums, weights))
        sums.copy_(_faded(sums))


@jit(unspecialized=["num_rows", "num_drafts"])
def _learn_acceptance_kernel(  # type: ignore[no-untyped-def]
    confidence,
    seen,
    accepted,
    failed,
    finished,
    cu_tokens,
    slot_of_row,
    running,
    forecast,
    rounds,
    sums,
    weights,
    num_rows,
    num_drafts,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program: what the rows give is added up.
    row = tl.arange(0, ROWS)
    inside = row < num_rows
    slot = tl.load(slot_of_row + row, mask=inside, other=0).to(tl.int64)
    begin = tl.load(cu_tokens + row, mask=inside, other=0)
    verified = tl.load(cu_tokens + row + 1, mask=inside, other=0) - begin - 1
    is_finished = tl.load(finished + slot, mask=inside, other=1).to(tl.int32)
    goes_on = tl.load(running).to(tl.int32) != 0
    live = inside & (is_finished == 0) & (verified >= 0) & goes_on
    counts = tl.max(live.to(tl.int32), 0)
    number = tl.load(rounds) + counts
    tl.store(rounds, number)

    position = tl.arange(0, BLOCK)
    column = position[None, :]
    place = slot[:, None] * num_drafts + column
    written = live[:, None] & (column < num_drafts)
    before = tl.load(forecast + place, mask=written, other=0.0)
    now = tl.load(seen + place, mask=written, other=0.0)
    tl.store(forecast + place, tl.where(before > 1.0, now, before + 0.25 * (now - before)), mask=written)
    if weights is not None:
        kept = tl.load(accepted + slot, mask=inside, other=0)
        bad = tl.load(failed + slot, mask=inside, other=1).to(tl.int32) != 0
        judged = tl.where(bad, 0, tl.minimum(verified, kept + 1))
        sure = clean(tl.load(confidence + place, mask=written, other=0.0))
        used = written & (column < judged[:, None]) & (sure > 0)
        known = position < num_drafts
        omega = tl.load(weights)
        beta = tl.load(weights + 1 + position, mask=known, other=0.0)
        f = feature_of(sure)
        p = sigmoid_of(omega * f + beta[None, :])
        error = (column < kept[:, None]).to(tl.float32) - p
        spread = p * (1.0 - p)
        slope = spread * f
        at = sums + position
        labels = tl.sum(used.to(tl.int64), 0) * 16777216
        count = tl.load(at, mask=known, other=0) + labels
        ever = tl.load(at + 6 * num_drafts, mask=known, other=0) + labels
        gradient = tl.load(at + num_drafts, mask=known, other=0) + _added(error, used)
        curvature = tl.load(at + 2 * num_drafts, mask=known, other=0) + _added(spread, used)
        by_omega = tl.load(at + 3 * num_drafts, mask=known, other=0) + _added(error * f, used)
        mixed = tl.load(at + 4 * num_drafts, mask=known, other=0) + _added(slope, used)
        of_omega = tl.load(at + 5 * num_drafts, mask=known, other=0) + _added(slope * f, used)

        due = (counts > 0) & (number % 100 == 0)
        tl.store(at, tl.where(due, count - (count >> 1), count), mask=known)
        tl.store(at + num_drafts, tl.where(due, 0, gradient), mask=known)
        tl.store(at + 2 * num_drafts, tl.where(due, curvature - (curvature >> 1), curvature), mask=known)
        tl.store(at + 3 * num_drafts, tl.where(due, 0, by_omega), mask=known)
        tl.store(at + 4 * num_drafts, tl.where(due, mixed - (mixed >> 1), mixed), mask=known)
        tl.store(at + 5 * num_drafts, tl.where(due, of_omega - (of_omega >> 1), of_omega), mask=known)
        tl.store(at + 6 * num_drafts, ever, mask=known)

        # The Newton step, in float64 as in `_newton`.
        old_omega, old_beta = omega.to(tl.float64), beta.to(tl.float64)
        n, g, h = _number(count), _number(gradient), _number(curvature)
        m, g_omega, h_omega = _number(mixed), _number(by_omega), _number(of_omega)
        penalty = _double(0.001)
        diagonal = h + penalty
        g = g - penalty * (old_beta - _double(-0.2))
        ratio = m / diagonal
        least = tl.where(known, h_omega - m * ratio, 0.0)
        bottom = tl.maximum(_total(least) + penalty, penalty)
        top = _total(tl.where(known, g_omega - ratio * g, 0.0)) - penalty * (old_omega - 0.5)
        all_labels = _total(n)
        step = tl.minimum(tl.maximum(top / bottom * (all_labels / (all_labels + 50.0)), -2.0), 2.0)
        new_omega = tl.maximum(old_omega + step, 0.0)
        steps = (g - m * (new_omega - old_omega)) / diagonal * (n / (n + 50.0))
        new_beta = old_beta + tl.minimum(tl.maximum(steps, -2.0), 2.0)
        new_beta = tl.minimum(tl.maximum(new_beta, -40.0), 40.0)
        # Of each position the last one, itself included, that is known.
        known_at = tl.where(known & (ever >= 100 * 16777216), position, -1)
        earlier = position[:, None] <= position[None, :]
        last = tl.max(tl.where(earlier, tl.broadcast_to(known_at[:, None], [BLOCK, BLOCK]), -1), 0)
        theirs = tl.broadcast_to(new_beta[:, None], [BLOCK, BLOCK])
        followed = tl.sum(tl.where(position[:, None] == last[None, :], theirs, 0.0), 0)
        new_beta = tl.where(last < 0, new_beta, followed)
        tl.store(weights, tl.where(due, new_omega.to(tl.float32), omega))
        tl.store(weights + 1 + position, tl.where(due, new_beta.to(tl.float32), beta), mask=known)


@jit
def _added(term, used):  # type: ignore[no-untyped-def]
    return tl.sum((tl.where(used, term, 0.0) * 16777216.0).to(tl.int64), 0)


@jit
def _double(value):  # type: ignore[no-untyped-def]
    # A literal is float32 in a kernel, and these have no exact one.
    return tl.full([], value, tl.float64)


@jit
def _number(total):  # type: ignore[no-untyped-def]
    return total.to(tl.float64) / 16777216.0


@jit
def _total(x):  # type: ignore[no-untyped-def]
    return tl.sum((x * 1048576.0).to(tl.int64), 0).to(tl.float64) / 1048576.0


def _sizes(rows: int, num_drafts: int) -> dict[str, int]:
    return {
        "num_rows": rows,
        "num_drafts": num_drafts,
        "ROWS": row_range(rows),
        "BLOCK": max(8, next_power_of_2(num_drafts)),
    }


def _num_warps(sizes: dict[str, int]) -> int:
    # Besides rows by positions the kernel compares positions with each other.
    entries = sizes["BLOCK"] * max(sizes["ROWS"], sizes["BLOCK"] // 4)
    return 1 if entries <= 128 else 4 if entries <= 1024 else 8


def learn_acceptance_triton(
    confidence: torch.Tensor,
    seen: torch.Tensor,
    accepted: torch.Tensor,
    failed: torch.Tensor,
    finished: torch.Tensor,
    cu_tokens: torch.Tensor,
    slot_of_row: torch.Tensor,
    running: torch.Tensor,
    forecast: torch.Tensor,
    rounds: torch.Tensor,
    sums: torch.Tensor | None,
    weights: torch.Tensor | None,
) -> None:
    """The launch for CUDA tensors, or for CPU tensors under the interpreter.

    Raises:
        ValueError: an argument that the kernel could not take.
    """
    int32, single, boolean = (torch.int32,), (torch.float32,), (torch.bool,)
    check_tensor("confidence", confidence, dtypes=single, shape=(None, None))
    (slots, drafts), device = confidence.shape, confidence.device
    check_some("confidence", "slot", slots)
    check_some("confidence", "draft", drafts)
    check_tensor("seen", seen, dtypes=single, shape=(slots, drafts), device=device)
    check_tensor("accepted", accepted, dtypes=int32, shape=(slots,), device=device)
    check_tensor("failed", failed, dtypes=boolean, shape=(slots,), device=device)
    check_tensor("finished", finished, dtypes=boolean, shape=(slots,), device=device)
    check_tensor("slot_of_row", slot_of_row, dtypes=int32, shape=(None,), device=device)
    rows = slot_of_row.shape[0]
    check_tensor("cu_tokens", cu_tokens, dtypes=int32, shape=(rows + 1,), device=device)
    check_tensor("running", running, dtypes=boolean, shape=(1,), device=device)
    check_tensor("forecast", forecast, dtypes=single, shape=(slots, drafts), device=device)
    check_tensor("rounds", rounds, dtypes=int32, shape=(1,), device=device)
    if (sums is None) != (weights is None):
        raise ValueError("sums and weights go together; one of them is None")
    if sums is not None and weights is not None:
        check_tensor("sums", sums, dtypes=(torch.int64,), shape=(NUM_SUMS, drafts), device=device)
        check_tensor("weights", weights, dtypes=single, shape=(drafts + 1,), device=device)
    sizes = _sizes(rows, drafts)
    if sizes["ROWS"] * sizes["BLOCK"] > MOST_DRAFTS:
        raise ValueError(
            f"{rows} rows of {drafts} drafts; accepted: at most {MOST_DRAFTS} drafts, both numbers rounded up to "
            "powers of two"
        )
    _learn_acceptance_kernel[(1,)](
        confidence,
        seen,
        accepted,
        failed,
        finished,
        cu_tokens,
        slot_of_row,
        running,
        forecast,
        rounds,
        sums,
        weights,
        **sizes,
        num_warps=_num_warps(sizes),
        **UNFUSED,
    )


def kernel_specs() -> list[KernelSpec]:
    """The smallest bucket, the largest, the largest with as many drafts as a tree has nodes, and without learning."""

    def spec(rows: int, drafts: int, learns: bool) -> KernelSpec:
        sizes = _sizes(rows, drafts)
        learned = {"sums": "*i64", "weights": "*fp32"} if learns else {}
        named = f"{rows} row{'s' if rows > 1 else ''}, {drafts} drafts{'' if learns else ', given'}"
        return KernelSpec(
            op="learn_acceptance",
            variant=named,
            kernel=_learn_acceptance_kernel,
            arguments={
                **dict.fromkeys(["confidence", "seen", "forecast"], "*fp32"),
                **dict.fromkeys(["accepted", "cu_tokens", "slot_of_row", "rounds"], "*i32"),
                **dict.fromkeys(["failed", "finished", "running"], "*i1"),
                **learned,
                **dict.fromkeys(["num_rows", "num_drafts"], "i32"),
            },
            constants={
                "ROWS": sizes["ROWS"],
                "BLOCK": sizes["BLOCK"],
                **({} if learns else {"sums": None, "weights": None}),
            },
            num_warps=_num_warps(sizes),
            enable_fp_fusion=False,
            shape=named,
            bytes_moved=rows * (14 + 12 * drafts) + 112 * drafts + 40,
            max_registers=168,
        )

    return [spec(1, 7, True), spec(16, 7, True), spec(16, 64, True), spec(16, 7, False)]


def _learn_acceptance_fake(*args: object) -> None:
    return None


learn_acceptance = define_op(
    "learn_acceptance(Tensor confidence, Tensor seen, Tensor accepted, Tensor failed, Tensor finished, "
    "Tensor cu_tokens, Tensor slot_of_row, Tensor running, Tensor(a!) forecast, "
    "Tensor(b!) rounds, Tensor(c!)? sums, Tensor(d!)? weights) -> ()",
    cpu=_learn_acceptance_cpu,
    fake=_learn_acceptance_fake,
    cuda=learn_acceptance_triton,
)
"""`draftgraph::learn_acceptance`; see `learn_acceptance_reference`."""
