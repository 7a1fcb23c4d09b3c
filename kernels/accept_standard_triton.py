"""The Triton kernels of `accept_standard`: one launch that decides, two that sample the residual."""

from __future__ import annotations

import torch

from .philox import ACCEPT
from .philox_triton import first_uniform
from .residual_triton import (
    acceptance_spec,
    check_acceptance,
    draft_probabilities,
    sample_residual,
    write_accepted,
)
from .triton_support import UNFUSED, KernelSpec, draft_range, jit, tl
from .workspace import workspace


@jit(unspecialized=["vocab", "logits_stride", "num_drafts"])
def decide_kernel(  # type: ignore[no-untyped-def]
    logits,
    sampled,
    log_normalizer,
    threshold,
    token_failed,
    positions,
    draft_tokens,
    draft_probs,
    temperature,
    seed,
    cu_tokens,
    slot_of_row,
    accepted,
    emitted,
    row_failed,
    rejected,
    vocab,
    logits_stride,
    STREAM: tl.constexpr,
    num_drafts,
    COLUMNS: tl.constexpr,
):
    """One program per row: all outputs, with `sampled` in the rejected draft's place, and which one is rejected."""
    row = tl.program_id(0)
    slot = tl.load(slot_of_row + row)
    begin = tl.load(cu_tokens + row)
    drafts = tl.load(cu_tokens + row + 1) - begin - 1
    if drafts < 0:
        tl.store(accepted + slot, 0)
        tl.store(rejected + row, -1)
        return
    heat = tl.load(temperature + slot)
    proposal, p, q = draft_probabilities(
        logits,
        sampled,
        log_normalizer,
        threshold,
        draft_tokens,
        draft_probs,
        slot,
        heat,
        begin,
        drafts,
        vocab,
        logits_stride,
        num_drafts,
        COLUMNS,
    )
    column = tl.arange(0, COLUMNS)
    position = tl.load(positions + begin + column, mask=column <= drafts, other=0) + 1
    # A negative u accepts whatever is possible: at temperature 0, the target's token.
    u = tl.where(heat > 0.0, first_uniform(tl.load(seed + slot), position, STREAM), -1.0)
    accepts = (p > 0.0) & ((p >= q) | (u * q < p))
    count = tl.min(tl.where(accepts, COLUMNS, column), 0)
    write_accepted(
        proposal, count, sampled, token_failed, accepted, emitted, row_failed, slot, begin, num_drafts, COLUMNS
    )
    proposed = tl.max(tl.where(column == count, proposal, -1), 0) >= 0
    tl.store(rejected + row, tl.where(proposed & (heat > 0.0), count, -1))


def accept_standard_triton(
    logits: torch.Tensor,
    sampled: torch.Tensor,
    log_normalizer: torch.Tensor,
    threshold: torch.Tensor,
    token_failed: torch.Tensor,
    positions: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    cu_tokens: torch.Tensor,
    slot_of_row: torch.Tensor,
    accepted: torch.Tensor,
    emitted: torch.Tensor,
    row_failed: torch.Tensor,
) -> None:
    """The launches for CUDA tensors, or for CPU tensors under the interpreter.

    Raises:
        ValueError: an argument that the kernels could not take.
    """
    distributions = (logits, sampled, log_normalizer, threshold, token_failed, positions, draft_tokens, draft_probs)
    outputs = (accepted, emitted, row_failed)
    check_acceptance(*distributions, temperature, seed, cu_tokens, slot_of_row, *outputs)
    rows, num_drafts = slot_of_row.shape[0], draft_tokens.shape[1]
    if rows == 0:
        return
    rejected = workspace("accept_standard.rejected", rows, torch.int32, logits.device)
    decide_kernel[(rows,)](
        *distributions,
        temperature,
        seed,
        cu_tokens,
        slot_of_row,
        *outputs,
        rejected,
        logits.shape[1],
        logits.stride(0),
        STREAM=ACCEPT,
        num_drafts=num_drafts,
        COLUMNS=draft_range(num_drafts),
        num_warps=1,
        **UNFUSED,
    )
    if num_drafts > 0:
        sample_residual(
            logits,
            log_normalizer,
            threshold,
            positions,
            draft_tokens,
            draft_probs,
            temperature,
            seed,
            cu_tokens,
            slot_of_row,
            rejected,
            None,
            emitted,
        )


def kernel_specs() -> list[KernelSpec]:
    """The decision for each type of logits; `residual_triton` has the rest."""
    specs = []
    for kind in ("bf16", "fp16", "fp32"):
        for changes in ({"draft_probs": None}, {}):
            spec = acceptance_spec(
                "accept_standard", "decide", decide_kernel, kind, 128_256, 5 * 64, STREAM=ACCEPT, **changes
            )
            specs.append(spec)
    spec = acceptance_spec(
        "accept_standard",
        "decide, 63 drafts",
        decide_kernel,
        "bf16",
        128_256,
        63 * 64,
        STREAM=ACCEPT,
        COLUMNS=64,
    )
    return [*specs, spec]
