"""Estimates how likely each draft is to be accepted, from how sure the drafter was of it."""

from __future__ import annotations

import numpy as np
import torch

from .acceptance_model import cleaned, cleaned_array, feature, feature_array, sigmoid, sigmoid_array
from .elementary_triton import exp, log
from .registration import define_op
from .triton_support import UNFUSED, KernelSpec, check_tensor, jit, next_power_of_2, tl


def estimate_acceptance_reference(
    confidence: torch.Tensor,
    draft_count: torch.Tensor,
    slot_of_row: torch.Tensor,
    weights: torch.Tensor | None,
    acceptance: torch.Tensor,
) -> None:
    """The specification of `estimate_acceptance`; reads nothing on the host.

    For each row with a draft, of every position k: the chance that draft k is accepted given that those before it are,
    `sigmoid(weights[0] * f + weights[1 + k])` with the feature f of draft k's confidence (`acceptance_model.py`), or
    without weights that confidence itself, held to [0, 1]. Of positions that have no draft yet it is a forecast: from
    the confidence of the row's last draft. Rows without a draft keep what they have.

    Args:
        confidence: float32 [R1, K], K at least 1.
        draft_count: int32 [R1].
        slot_of_row: int32 [B].
        weights: float32 [K + 1], omega and then beta of each position; None: the confidences are estimates.
        acceptance: float32 [R1, K], written.
    """
    slots = slot_of_row.long()
    count = draft_count[slots][:, None]
    position = torch.arange(confidence.shape[1], device=confidence.device)
    at = torch.minimum(position, (count - 1).clamp_min(0)).long()
    sure = cleaned(confidence[slots].gather(1, at))
    if weights is not None:
        sure = sigmoid(weights[:1] * feature(sure) + weights[1:])
    acceptance[slots] = torch.where(count > 0, sure, acceptance[slots])


def _estimate_acceptance_cpu(
    confidence: torch.Tensor,
    draft_count: torch.Tensor,
    slot_of_row: torch.Tensor,
    weights: torch.Tensor | None,
    acceptance: torch.Tensor,
) -> None:
    confidence_of, count_of, acceptance_of = confidence.numpy(), draft_count.numpy(), acceptance.numpy()
    slots = [slot for slot in slot_of_row.tolist() if count_of[slot] > 0]
    if not slots:
        return
    position = np.arange(confidence.shape[1])
    at = np.minimum(position, count_of[slots][:, None] - 1)
    sure = cleaned_array(np.take_along_axis(confidence_of[slots], at, 1))
    if weights is not None:
        known = weights.numpy()
        sure = sigmoid_array(known[0] * feature_array(sure) + known[1:])
    acceptance_of[slots] = sure


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
    acceptance,
    num_drafts,
    BLOCK: tl.constexpr,
):
    """One program per row."""
    slot = tl.load(slot_of_row + tl.program_id(0)).to(tl.int64)
    count = tl.load(draft_count + slot)
    position = tl.arange(0, BLOCK)
    inside = (position < num_drafts) & (count > 0)
    at = tl.minimum(position, tl.maximum(count - 1, 0))
    sure = clean(tl.load(confidence + slot * num_drafts + at, mask=inside, other=0.0))
    if weights is not None:
        beta = tl.load(weights + 1 + position, mask=position < num_drafts, other=0.0)
        sure = sigmoid_of(tl.load(weights) * feature_of(sure) + beta)
    tl.store(acceptance + slot * num_drafts + position, sure, mask=inside)


def estimate_acceptance_triton(
    confidence: torch.Tensor,
    draft_count: torch.Tensor,
    slot_of_row: torch.Tensor,
    weights: torch.Tensor | None,
    acceptance: torch.Tensor,
) -> None:
    """The launch for CUDA tensors, or for CPU tensors under the interpreter.

    Raises:
        ValueError: an argument that the kernel could not take.
    """
    single = (torch.float32,)
    check_tensor("confidence", confidence, dtypes=single, shape=(None, None))
    (slots, drafts), device = confidence.shape, confidence.device
    check_tensor("draft_count", draft_count, dtypes=(torch.int32,), shape=(slots,), device=device)
    check_tensor("slot_of_row", slot_of_row, dtypes=(torch.int32,), shape=(None,), device=device)
    if weights is not None:
        check_tensor("weights", weights, dtypes=single, shape=(drafts + 1,), device=device)
    check_tensor("acceptance", acceptance, dtypes=single, shape=(slots, drafts), device=device)
    if drafts < 1:
        raise ValueError("confidence has no draft; accepted: K of at least 1")
    _estimate_acceptance_kernel[(slot_of_row.shape[0],)](
        confidence,
        draft_count,
        slot_of_row,
        weights,
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
                **dict.fromkeys(["confidence", "acceptance", *(["weights"] if learned else [])], "*fp32"),
                **dict.fromkeys(["draft_count", "slot_of_row"], "*i32"),
                "num_drafts": "i32",
            },
            constants={"BLOCK": block, **({} if learned else {"weights": None})},
            num_warps=1,
            enable_fp_fusion=False,
            shape=f"16 rows, {block} drafts",
            bytes_moved=16 * (8 + 8 * block),
            max_registers=64,
        )
        for block, learned in ((8, True), (8, False), (64, True))
    ]


def _estimate_acceptance_fake(*args: object) -> None:
    return None


estimate_acceptance = define_op(
    "estimate_acceptance(Tensor confidence, Tensor draft_count, Tensor slot_of_row, Tensor? weights, "
    "Tensor(a!) acceptance) -> ()",
    cpu=_estimate_acceptance_cpu,
    fake=_estimate_acceptance_fake,
    cuda=estimate_acceptance_triton,
)
"""`draftgraph::estimate_acceptance`; see `estimate_acceptance_reference`."""
