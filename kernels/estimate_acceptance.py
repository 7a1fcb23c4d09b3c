"""Estimates how likely each draft is to be accepted, from how sure the drafter was of it."""

from __future__ import annotations

import numpy as np
import torch

from .acceptance_model import cleaned, cleaned_array, feature, feature_array, sigmoid, sigmoid_array
from .elementary_triton import exp, log
from .registration import define_op
from .triton_support import UNFUSED, KernelSpec, check_some, check_tensor, jit, next_power_of_2, tl


def estimate_acceptance_reference(
    confidence: torch.Tensor,
    draft_count: torch.Tensor,
    slot_of_row: torch.Tensor,
    weights: torch.Tensor | None,
    forecast: torch.Tensor,
    seen: torch.Tensor,
    expected: torch.Tensor,
    acceptance: torch.Tensor,
) -> None:
    """The specification of `estimate_acceptance`; reads nothing on the host.

    The chance that draft k of a row is accepted given that those before it are is
    `sigmoid(weights[0] * f + weights[1 + k])` with the feature f of its confidence (`acceptance_model.py`), or without
    weights that confidence itself. The confidence is held to [0, 1]; of positions that have no draft, or none yet, it
    is the row's forecast, and where that is unknown, above 1, the estimate is 1.

    Args:
        confidence: float32 [R1, K], K at least 1.
        draft_count: int32 [R1].
        slot_of_row: int32 [B].
        weights: float32 [K + 1], omega and then beta of each position; None: the confidences are estimates.
        forecast: float32 [R1, K], of confidences.
        seen: float32 [R1, K], written: the confidence that each estimate is of, or the unknown forecast.
        expected: float32 [R1, K], written: the estimates of the forecast alone.
        acceptance: float32 [R1, K], written: the estimates.
    """
    slots = slot_of_row.long()
    position = torch.arange(confidence.shape[1], device=confidence.device)
    ahead = forecast[slots]
    sure = torch.where(position < draft_count[slots][:, None], cleaned(confidence[slots]), ahead)
    seen[slots] = sure
    for given, output in ((ahead, expected), (sure, acceptance)):
        estimate = given
        if weights is not None:
            estimate = sigmoid(weights[:1] * feature(given.clamp_max(1.0)) + weights[1:])
        output[slots] = torch.where(given > 1.0, 1.0, estimate)


def _estimate_acceptance_cpu(
    confidence: torch.Tensor,
    draft_count: torch.Tensor,
    slot_of_row: torch.Tensor,
    weights: torch.Tensor | None,
    forecast: torch.Tensor,
    seen: torch.Tensor,
    expected: torch.Tensor,
    acceptance: torch.Tensor,
) -> None:
    slots = slot_of_row.tolist()
    made = np.arange(confidence.shape[1]) < draft_count.numpy()[slots][:, None]
    ahead = forecast.numpy()[slots]
    sure = np.where(made, cleaned_array(confidence.numpy()[slots]), ahead)
    seen.numpy()[slots] = sure
    for given, output in ((ahead, expected), (sure, acceptance)):
        estimate = given
        if weights is not None:
            known = weights.numpy()
            bounded = np.minimum(given, np.float32(1.0))
            estimate = sigmoid_array(known[0] * feature_array(bounded) + known[1:])
        output.numpy()[slots] = np.where(given > 1.0, np.float32(1.0), estimate)


@jit
def clean(confidence):  # type: ignore[no-untyped-def]
    """`acceptance_model.cleaned`."""
    return tl.minimum(tl.where(confidence > 0, confidence, 0.0), 1.0)


@jit
def feature_of(confidence):  # type: ignore[no-untyped-def]
    """`acceptance_model.feature`."""
    sure = tl.maximum(confidence, 1e-30)
    rest = 1.0 - sure
    value = log(sure) - log(tl.where(rest > 0, rest, 1.0))
    return tl.minimum(tl.maximum(tl.where(rest > 0, value, 40.0), -40.0), 40.0)


@jit
def sigmoid_of(x):  # type: ignore[no-untyped-def]
    """`acceptance_model.sigmoid`."""
    bound = tl.minimum(tl.maximum(x, -40.0), 40.0)
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + exp(-bound))


@jit(unspecialized=["num_drafts"])
def _estimate_acceptance_kernel(  # type: ignore[no-untyped-def]
    confidence,
    draft_count,
    slot_of_row,
    weights,
    forecast,
    seen,
    expected,
    acceptance,
    num_drafts,
    BLOCK: tl.constexpr,
):
    """One program per row."""
    slot = tl.load(slot_of_row + tl.program_id(0)).to(tl.int64)
    count = tl.load(draft_count + slot)
    position = tl.arange(0, BLOCK)
    inside = position < num_drafts
    place = slot * num_drafts + position
    ahead = tl.load(forecast + place, mask=inside, other=0.0)
    sure = tl.where(position < count, clean(tl.load(confidence + place, mask=inside, other=0.0)), ahead)
    tl.store(seen + place, sure, mask=inside)
    before, now = ahead, sure
    if weights is not None:
        omega = tl.load(weights)
        beta = tl.load(weights + 1 + position, mask=inside, other=0.0)
        before = sigmoid_of(omega * feature_of(tl.minimum(ahead, 1.0)) + beta)
        now = sigmoid_of(omega * feature_of(tl.minimum(sure, 1.0)) + beta)
    tl.store(expected + place, tl.where(ahead > 1.0, 1.0, before), mask=inside)
    tl.store(acceptance + place, tl.where(sure > 1.0, 1.0, now), mask=inside)


def estimate_acceptance_triton(
    confidence: torch.Tensor,
    draft_count: torch.Tensor,
    slot_of_row: torch.Tensor,
    weights: torch.Tensor | None,
    forecast: torch.Tensor,
    seen: torch.Tensor,
    expected: torch.Tensor,
    acceptance: torch.Tensor,
) -> None:
    """The launch for CUDA tensors, or for CPU tensors under the interpreter.

    Raises:
        ValueError: an argument that the kernel could not take.
    """
    single = (torch.float32,)
    check_tensor("confidence", confidence, dtypes=single, shape=(None, None))
    (slots, drafts), device = confidence.shape, confidence.device
    check_some("confidence", "slot", slots)
    check_some("confidence", "draft", drafts)
    check_tensor("draft_count", draft_count, dtypes=(torch.int32,), shape=(slots,), device=device)
    check_tensor("slot_of_row", slot_of_row, dtypes=(torch.int32,), shape=(None,), device=device)
    check_some("slot_of_row", "row", slot_of_row.shape[0])
    if weights is not None:
        check_tensor("weights", weights, dtypes=single, shape=(drafts + 1,), device=device)
    check_tensor("forecast", forecast, dtypes=single, shape=(slots, drafts), device=device)
    check_tensor("seen", seen, dtypes=single, shape=(slots, drafts), device=device)
    check_tensor("expected", expected, dtypes=single, shape=(slots, drafts), device=device)
    check_tensor("acceptance", acceptance, dtypes=single, shape=(slots, drafts), device=device)
    _estimate_acceptance_kernel[(slot_of_row.shape[0],)](
        confidence,
        draft_count,
        slot_of_row,
        weights,
        forecast,
        seen,
        expected,
        acceptance,
        drafts,
        BLOCK=next_power_of_2(drafts),
        num_warps=1,
        **UNFUSED,
    )


def kernel_specs() -> list[KernelSpec]:
    """With weights and without."""
    return [
        KernelSpec(
            op="estimate_acceptance",
            variant=f"{block} drafts, {'learned' if learned else 'given'}",
            kernel=_estimate_acceptance_kernel,
            arguments={
                **dict.fromkeys(
                    ["confidence", "forecast", "seen", "expected", "acceptance", *(["weights"] if learned else [])],
                    "*fp32",
                ),
                **dict.fromkeys(["draft_count", "slot_of_row"], "*i32"),
                "num_drafts": "i32",
            },
            constants={"BLOCK": block, **({} if learned else {"weights": None})},
            num_warps=1,
            enable_fp_fusion=False,
            shape=f"16 rows, {block} drafts",
            bytes_moved=16 * (8 + 20 * block),
            max_registers=64,
        )
        for block, learned in ((8, True), (8, False), (64, True))
    ]


def _estimate_acceptance_fake(*args: object) -> None:
    return None


estimate_acceptance = define_op(
    "estimate_acceptance(Tensor confidence, Tensor draft_count, Tensor slot_of_row, Tensor? weights, "
    "Tensor forecast, Tensor(a!) seen, Tensor(b!) expected, Tensor(c!) acceptance) -> ()",
    cpu=_estimate_acceptance_cpu,
    fake=_estimate_acceptance_fake,
    cuda=estimate_acceptance_triton,
)
"""`draftgraph::estimate_acceptance`; see `estimate_acceptance_reference`."""
