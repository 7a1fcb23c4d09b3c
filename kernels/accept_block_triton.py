"""The Triton kernels of `accept_block`: the excess over a full draft distribution, the decision, and the residual."""

from __future__ import annotations

import torch

from .philox import ACCEPT
from .philox_triton import first_uniform
from .residual_triton import (
    acceptance_spec,
    check_acceptance,
    draft_probabilities,
    probability,
    sample_residual,
    write_accepted,
)
from .triton_support import UNFUSED, KernelSpec, draft_range, jit, tl
from .vocabulary_parts import MOST_PARTS, SPEC_SIZES, num_parts, part_size, part_warps
from .workspace import workspace


@jit
def _weights(p, q, num_drafts, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    # w_0 to w_K in [COLUMNS].
    column = tl.arange(0, COLUMNS)
    weights = tl.full((COLUMNS,), 1.0, tl.float32)
    weight = tl.full((), 1.0, tl.float32)
    for j in range(num_drafts):
        p_j = tl.sum(tl.where(column == j, p, 0.0), 0)
        q_j = tl.sum(tl.where(column == j, q, 0.0), 0)
        ratio = tl.div_rn(weight * p_j, tl.maximum(q_j, 1.1754943508222875e-38))
        weight = tl.where(p_j > 0.0, tl.minimum(ratio, 1.0), 0.0)
        weights = tl.where(column == j + 1, weight, weights)
    return weights


@jit
def _block_size(proposal, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    # How many drafts come before the first that is none.
    return tl.min(tl.where(proposal >= 0, COLUMNS, tl.arange(0, COLUMNS)), 0)


@jit(unspecialized=["parts", "num_drafts"])
def excess_kernel(  # type: ignore[no-untyped-def]
    logits,
    sampled,
    log_normalizer,
    threshold,
    draft_tokens,
    draft_probs,
    temperature,
    cu_tokens,
    slot_of_row,
    excess,
    vocab,
    logits_stride,
    num_drafts,
    COLUMNS: tl.constexpr,
    parts,
    PART: tl.constexpr,
):
    """Of each row, draft but the block's last, and part of the vocabulary: max(w P - Q, 0) in units of 2**-40."""
    row = tl.program_id(0)
    index = tl.program_id(1) + 1
    part = tl.program_id(2)
    slot = tl.load(slot_of_row + row)
    begin = tl.load(cu_tokens + row)
    drafts = tl.load(cu_tokens + row + 1) - begin - 1
    heat = tl.load(temperature + slot)
    if (index >= drafts) | (heat <= 0.0):
        return
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
    if index >= _block_size(proposal, COLUMNS):
        return
    weights = _weights(p, q, num_drafts, COLUMNS)
    weight = tl.sum(tl.where(tl.arange(0, COLUMNS) == index, weights, 0.0), 0)
    token = part * PART + tl.arange(0, PART)
    inside = token < vocab
    at = (begin + index).to(tl.int64)
    x = tl.load(logits + at * logits_stride + token, mask=inside, other=0.0).to(tl.float32)
    everywhere = probability(tl.div_rn(x, heat), tl.load(log_normalizer + at), tl.load(threshold + at))
    draft = (slot.to(tl.int64) * num_drafts + index) * vocab
    above = weight * everywhere - tl.load(draft_probs + draft + token, mask=inside, other=0.0)
    units = (tl.where(inside, tl.maximum(above, 0.0), 0.0) * 1099511627776.0).to(tl.int64)
    tl.store(excess + (row * num_drafts + index) * parts + part, tl.sum(units, 0))


@jit(unspecialized=["vocab", "logits_stride", "parts", "num_drafts"])
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
    scale,
    excess,
    vocab,
    logits_stride,
    STREAM: tl.constexpr,
    num_drafts,
    COLUMNS: tl.constexpr,
    parts,
    PARTS_2: tl.constexpr,
):
    """One program per row: all outputs, with `sampled` in the rejected draft's place, which one that is, and its w."""
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
    # At temperature 0 the draft distribution says nothing.
    weights = _weights(p, tl.where(heat > 0.0, q, 1.0), num_drafts, COLUMNS)
    block = _block_size(proposal, COLUMNS)
    column = tl.arange(0, COLUMNS)
    if draft_probs is None:
        above = weights * (1.0 - p)
    else:
        part = tl.arange(0, PARTS_2)
        place = (row * num_drafts + column)[:, None] * parts + part[None, :]
        known = ((column >= 1) & (column < block))[:, None] & (part < parts)[None, :]
        above = tl.sum(tl.load(excess + place, mask=known, other=0), 1).to(tl.float32) * 9.094947017729282e-13
    total = above + (1.0 - weights)
    partial = tl.where(total > 0.0, tl.div_rn(above, tl.where(total > 0.0, total, 1.0)), 1.0)
    partial = tl.where(heat > 0.0, partial, weights)
    chance = tl.where(column < block, partial, weights)
    tried = (column >= 1) & (column <= block)
    position = tl.load(positions + begin + column - 1, mask=tried, other=0) + 1
    u = first_uniform(tl.load(seed + slot), position, STREAM)
    count = tl.max(tl.where(tried & (u <= chance), column, 0), 0)
    write_accepted(
        proposal, count, sampled, token_failed, accepted, emitted, row_failed, slot, begin, num_drafts, COLUMNS
    )
    tl.store(rejected + row, tl.where((count < block) & (heat > 0.0), count, -1))
    tl.store(scale + row, tl.sum(tl.where(column == count, weights, 0.0), 0))


def accept_block_triton(
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
    (rows,), vocab, num_drafts = slot_of_row.shape, logits.shape[1], draft_tokens.shape[1]
    if rows == 0:
        return
    device = logits.device
    part, parts = part_size(vocab), num_parts(vocab)
    columns = draft_range(num_drafts)
    rejected = workspace("accept_block.rejected", rows, torch.int32, device)
    scale = workspace("accept_block.scale", rows, torch.float32, device)
    excess = workspace("accept_block.excess", rows * num_drafts * parts, torch.int64, device)
    if draft_probs is not None and num_drafts > 1:
        excess_kernel[(rows, num_drafts - 1, parts)](
            logits,
            sampled,
            log_normalizer,
            threshold,
            draft_tokens,
            draft_probs,
            temperature,
            cu_tokens,
            slot_of_row,
            excess,
            vocab,
            logits.stride(0),
            num_drafts=num_drafts,
            COLUMNS=columns,
            parts=parts,
            PART=part,
            num_warps=part_warps(part),
            **UNFUSED,
        )
    decide_kernel[(rows,)](
        *distributions,
        temperature,
        seed,
        cu_tokens,
        slot_of_row,
        *outputs,
        rejected,
        scale,
        excess,
        vocab,
        logits.stride(0),
        STREAM=ACCEPT,
        num_drafts=num_drafts,
        COLUMNS=columns,
        parts=parts,
        PARTS_2=MOST_PARTS,
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
            None if draft_probs is None else scale,
            emitted,
        )


def kernel_specs() -> list[KernelSpec]:
    """The excess and the decision for each type of logits; `residual_triton` has the rest."""
    specs = []
    for kind, vocab in SPEC_SIZES:
        moved = 4 * vocab * (8 if kind == "fp32" else 6)
        specs.append(acceptance_spec("accept_block", "excess", excess_kernel, kind, vocab, moved))
        for changes in ({"draft_probs": None}, {}):
            moved = 5 * 64 + (0 if changes else 5 * 8 * num_parts(vocab))
            spec = acceptance_spec(
                "accept_block", "decide", decide_kernel, kind, vocab, moved, STREAM=ACCEPT, **changes
            )
            specs.append(spec)
    return specs
