"""What the Triton kernels of the acceptance rules share: probabilities of the target, and the residual's sample.

A rule's first launches decide, per row, how many drafts stand. The residual of the rejected one is then sampled over
the vocabulary, split as in `vocabulary_parts.py`: `residual_kernel` finds each part's Gumbel-max winner and
`residual_finish_kernel` the row's.
"""

from __future__ import annotations

from typing import Any

import torch

from .elementary_triton import exp, index_of_rank, is_ranked, log, ranked
from .philox import RESIDUAL
from .philox_triton import gumbel_range
from .triton_support import UNFUSED, KernelSpec, check_some, check_tensor, jit, tl
from .vocabulary_parts import FLOATS, MOST_PARTS, SPEC_SIZES, num_parts, part_size, part_warps
from .workspace import workspace


@jit
def probability(z, log_normalizer, threshold):  # type: ignore[no-untyped-def]
    """`accept_standard._probability`: float32 p of tokens from their z."""
    below = z - log_normalizer
    below = tl.minimum(tl.where(below == below, below, 0.0), 0.0)
    return tl.where(z >= threshold, exp(below), 0.0)


@jit
def draft_probabilities(  # type: ignore[no-untyped-def]
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
    COLUMNS: tl.constexpr,
):
    """Of a row's drafts the tokens, -1 where there is none, and their p and q, all [COLUMNS]; q is 1 without one."""
    column = tl.arange(0, COLUMNS)
    at = (begin + column).to(tl.int64)
    place = slot.to(tl.int64) * num_drafts + column
    proposal = tl.load(draft_tokens + place, mask=(column < num_drafts) & (column < drafts), other=-1)
    proposed = proposal >= 0
    x = tl.load(logits + at * logits_stride + proposal, mask=proposed, other=0.0).to(tl.float32)
    z = tl.div_rn(x, tl.where(heat > 0.0, heat, 1.0))
    normalizer = tl.load(log_normalizer + at, mask=proposed, other=0.0)
    least = tl.load(threshold + at, mask=proposed, other=0.0)
    target = tl.load(sampled + at, mask=proposed, other=-1)
    p = tl.where(heat > 0.0, probability(z, normalizer, least), (target == proposal).to(tl.float32))
    if draft_probs is None:
        q = tl.full((COLUMNS,), 1.0, tl.float32)
    else:
        q = tl.load(draft_probs + place * vocab + proposal, mask=proposed, other=1.0)
    return proposal, tl.where(proposed, p, 0.0), q


@jit
def write_accepted(  # type: ignore[no-untyped-def]
    proposal,
    count,
    sampled,
    token_failed,
    accepted,
    emitted,
    row_failed,
    slot,
    begin,
    num_drafts,
    COLUMNS: tl.constexpr,
):
    """Writes a row's count, its accepted drafts with the target's token after them, and whether their logits failed."""
    column = tl.arange(0, COLUMNS)
    emits = column <= count
    target = tl.load(sampled + begin + column, mask=emits, other=0)
    content = tl.where(column < count, proposal, target)
    bad = tl.load(token_failed + begin + column, mask=emits, other=0).to(tl.int32)
    tl.store(accepted + slot, count)
    tl.store(emitted + slot.to(tl.int64) * (num_drafts + 1) + column, content, mask=emits)
    tl.store(row_failed + slot, tl.max(bad, 0) != 0)


@jit(unspecialized=["num_drafts", "parts"])
def residual_kernel(  # type: ignore[no-untyped-def]
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
    scale,
    best,
    vocab,
    logits_stride,
    num_drafts,
    STREAM: tl.constexpr,
    parts,
    PART: tl.constexpr,
):
    """Of each part of the vocabulary the `ranked` winner of max(scale * p - q, 0) at the rejected draft.

    `rejected` holds -1 for rows that rejected none; `scale` is None for 1.
    """
    row = tl.program_id(0)
    part = tl.program_id(1)
    index = tl.load(rejected + row)
    if index < 0:
        return
    slot = tl.load(slot_of_row + row).to(tl.int64)
    at = (tl.load(cu_tokens + row) + index).to(tl.int64)
    draft = slot * num_drafts + index
    first = part * PART
    token = first + tl.arange(0, PART)
    inside = token < vocab
    x = tl.load(logits + at * logits_stride + token, mask=inside, other=0.0).to(tl.float32)
    z = tl.div_rn(x, tl.load(temperature + slot))
    weight = probability(z, tl.load(log_normalizer + at), tl.load(threshold + at))
    if draft_probs is None:
        valid = inside & (token != tl.load(draft_tokens + draft)) & (weight > 0.0)
        score = z
    else:
        if scale is not None:
            weight = weight * tl.load(scale + row)
        weight = weight - tl.load(draft_probs + draft * vocab + token, mask=inside, other=0.0)
        valid = inside & (weight > 0.0)
        score = log(tl.maximum(weight, 1.1754943508222875e-38))
    noise = gumbel_range(tl.load(seed + slot), tl.load(positions + at) + 1, STREAM, first, PART)
    tl.store(best + row * parts + part, tl.max(ranked(score + noise, token, valid), 0))


@jit(unspecialized=["num_drafts", "parts"])
def residual_finish_kernel(  # type: ignore[no-untyped-def]
    slot_of_row,
    rejected,
    best,
    emitted,
    num_drafts,
    parts,
    PARTS_2: tl.constexpr,
):
    """Puts the winner in the place of the rejected draft, unless the residual has no mass."""
    row = tl.program_id(0)
    index = tl.load(rejected + row)
    if index < 0:
        return
    part = tl.arange(0, PARTS_2)
    winner = tl.max(tl.load(best + row * parts + part, mask=part < parts, other=-0x8000000000000000), 0)
    if is_ranked(winner):
        slot = tl.load(slot_of_row + row).to(tl.int64)
        tl.store(emitted + slot * (num_drafts + 1) + index, index_of_rank(winner))


def check_acceptance(
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
    """Refuses arguments that `accept_standard` and `accept_block` could not take, which are the same.

    Raises:
        ValueError: names the argument, what it is and what is accepted.
    """
    device = logits.device
    int32, float32, flag = (torch.int32,), (torch.float32,), (torch.bool,)
    check_tensor("logits", logits, dtypes=FLOATS, shape=(None, None), contiguous=False)
    width, vocab = logits.shape
    check_some("logits", "row", width)
    check_some("logits", "token", vocab)
    check_tensor("draft_tokens", draft_tokens, dtypes=int32, shape=(None, None), device=device)
    slots, num_drafts = draft_tokens.shape
    check_some("draft_tokens", "slot", slots)
    if draft_probs is not None:
        shape = (slots, num_drafts, vocab)
        check_tensor("draft_probs", draft_probs, dtypes=float32, shape=shape, device=device)
    check_tensor("log_normalizer", log_normalizer, dtypes=float32, shape=(width,), device=device)
    check_tensor("threshold", threshold, dtypes=float32, shape=(width,), device=device)
    check_tensor("positions", positions, dtypes=int32, shape=(width,), device=device)
    check_tensor("temperature", temperature, dtypes=float32, shape=(slots,), device=device)
    check_tensor("seed", seed, dtypes=(torch.int64,), shape=(slots,), device=device)
    check_tensor("sampled", sampled, dtypes=int32, shape=(width,), device=device)
    check_tensor("token_failed", token_failed, dtypes=flag, shape=(width,), device=device)
    check_rows(cu_tokens, slot_of_row, device)
    check_tensor("accepted", accepted, dtypes=int32, shape=(slots,), device=device)
    check_tensor("emitted", emitted, dtypes=int32, shape=(slots, num_drafts + 1), device=device)
    check_tensor("row_failed", row_failed, dtypes=flag, shape=(slots,), device=device)


def check_rows(cu_tokens: torch.Tensor, slot_of_row: torch.Tensor, device: torch.device) -> None:
    """Refuses a bucket's rows that do not fit each other.

    Raises:
        ValueError: names the argument, what it is and what is accepted.
    """
    check_tensor("slot_of_row", slot_of_row, dtypes=(torch.int32,), shape=(None,), device=device)
    rows = slot_of_row.shape[0]
    check_tensor("cu_tokens", cu_tokens, dtypes=(torch.int32,), shape=(rows + 1,), device=device)


def sample_residual(
    logits: torch.Tensor,
    log_normalizer: torch.Tensor,
    threshold: torch.Tensor,
    positions: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    cu_tokens: torch.Tensor,
    slot_of_row: torch.Tensor,
    rejected: torch.Tensor,
    scale: torch.Tensor | None,
    emitted: torch.Tensor,
) -> None:
    """The two launches that replace each row's rejected draft in `emitted`; arguments as in `residual_kernel`."""
    rows, vocab = slot_of_row.shape[0], logits.shape[1]
    part, parts = part_size(vocab), num_parts(vocab)
    best = workspace("residual.best", rows * parts, torch.int64, logits.device)
    num_drafts = draft_tokens.shape[1]
    residual_kernel[(rows, parts)](
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
        scale,
        best,
        vocab,
        logits.stride(0),
        num_drafts=num_drafts,
        STREAM=RESIDUAL,
        parts=parts,
        PART=part,
        num_warps=part_warps(part),
        **UNFUSED,
    )
    residual_finish_kernel[(rows,)](
        slot_of_row,
        rejected,
        best,
        emitted,
        num_drafts=num_drafts,
        parts=parts,
        PARTS_2=MOST_PARTS,
        num_warps=1,
    )


POINTERS = {
    **dict.fromkeys(["sampled", "positions", "draft_tokens", "cu_tokens", "slot_of_row"], "*i32"),
    **dict.fromkeys(["accepted", "emitted", "rejected"], "*i32"),
    **dict.fromkeys(["log_normalizer", "threshold", "draft_probs", "temperature", "scale"], "*fp32"),
    **dict.fromkeys(["seed", "best", "excess"], "*i64"),
    **dict.fromkeys(["token_failed", "row_failed"], "*u1"),
    **dict.fromkeys(["vocab", "logits_stride"], "i32:16"),
    **dict.fromkeys(["parts", "num_drafts"], "i32"),
}
"""Types of the acceptance kernels' arguments but `logits`, by name."""


def acceptance_spec(
    op: str, variant: str, kernel: Any, kind: str, vocab: int, moved: int, **constants: Any
) -> KernelSpec:
    """A specialisation of one of these kernels; a pointer given as None in `constants` is none."""
    part = part_size(vocab)
    sizes = {"PARTS_2": MOST_PARTS, "PART": part, "COLUMNS": 8}
    names = kernel.arg_names
    constants = {key: value for key, value in (sizes | constants).items() if key in names}
    arguments = {key: value for key, value in POINTERS.items() if key in names and key not in constants}
    if "logits" in names:
        arguments["logits"] = f"*{kind}"
    return KernelSpec(
        op=op,
        variant=f"{kind}, {vocab}{', q' if 'draft_probs' in arguments else ''}: {variant}",
        kernel=kernel,
        arguments=arguments,
        constants=constants,
        num_warps=part_warps(part) if "PART" in names else 1,
        enable_fp_fusion=kernel is residual_finish_kernel,
        shape=f"1 row, 5 drafts, vocabulary {vocab}",
        bytes_moved=moved,
    )


def kernel_specs() -> list[KernelSpec]:
    """The residual for one-hot and full draft distributions, with and without a scale."""
    specs = []
    for kind, vocab in SPEC_SIZES:
        moved = vocab * (4 if kind == "fp32" else 2)
        for name, extra, changes in (
            ("residual", 0, {"draft_probs": None, "scale": None}),
            ("residual", 4 * vocab, {"scale": None}),
            ("scaled residual", 4 * vocab, {}),
        ):
            constants = {"STREAM": RESIDUAL, **changes}
            specs.append(acceptance_spec("accept", name, residual_kernel, kind, vocab, moved + extra, **constants))
    for vocab in (128_256, 262_144, 512):
        moved = 8 * num_parts(vocab) + 12
        specs.append(acceptance_spec("accept", "finish", residual_finish_kernel, "any", vocab, moved))
    return specs
