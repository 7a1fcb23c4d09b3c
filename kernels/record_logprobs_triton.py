"""The Triton kernels of `record_logprobs`, with the vocabulary split as in `vocabulary_parts.py`.

`likeliest_kernel` finds each part's N largest logits, `mass_kernel` each part's mass below the largest of all, and
`record_kernel` merges the parts of a token.
"""

from __future__ import annotations

from typing import Any

import torch

from .elementary_triton import index_of_rank, log_of_mass, mass, ranked, value_of_rank
from .residual_triton import check_rows
from .triton_support import UNFUSED, KernelSpec, check_some, check_tensor, jit, next_power_of_2, tl
from .vocabulary_parts import FLOATS, MOST_PARTS, SPEC_SIZES, num_parts, part_size, part_warps
from .workspace import workspace


@jit
def _recorded(row, column, accepted, row_failed, cu_tokens, slot_of_row, length, context):  # type: ignore[no-untyped-def]
    # Whether the row's token in this column is recorded; its place in the window, its slot and its position.
    slot = tl.load(slot_of_row + row).to(tl.int64)
    at = tl.load(cu_tokens + row)
    live = (at < tl.load(cu_tokens + row + 1)) & (tl.load(row_failed + slot).to(tl.int32) == 0)
    position = tl.load(length + slot) + column
    recorded = live & (column <= tl.load(accepted + slot)) & (position < context)
    return recorded, (at + column).to(tl.int64), slot, position


@jit(unspecialized=["context", "parts"])
def likeliest_kernel(  # type: ignore[no-untyped-def]
    logits,
    accepted,
    row_failed,
    cu_tokens,
    slot_of_row,
    length,
    best,
    vocab,
    context,
    logits_stride,
    KEPT: tl.constexpr,
    KEPT_2: tl.constexpr,
    parts,
    PART: tl.constexpr,
):
    """Of each emitted token and part the KEPT largest logits, `ranked`: int64 [B, columns, parts, KEPT_2]."""
    row = tl.program_id(0)
    column = tl.program_id(1)
    part = tl.program_id(2)
    recorded, at, _, _ = _recorded(row, column, accepted, row_failed, cu_tokens, slot_of_row, length, context)
    if recorded == 0:
        return
    token = part * PART + tl.arange(0, PART)
    inside = token < vocab
    x = tl.load(logits + at * logits_stride + token, mask=inside, other=0.0).to(tl.float32)
    rank = ranked(x, token, inside)
    order = tl.arange(0, KEPT_2)
    largest = tl.full((KEPT_2,), -0x8000000000000000, tl.int64)
    for i in range(KEPT):
        winner = tl.max(rank, 0)
        largest = tl.where(order == i, winner, largest)
        rank = tl.where(rank == winner, -0x8000000000000000, rank)
    place = (row * tl.num_programs(1) + column).to(tl.int64) * parts + part
    tl.store(best + place * KEPT_2 + order, largest)


@jit(unspecialized=["context", "parts"])
def mass_kernel(  # type: ignore[no-untyped-def]
    logits,
    accepted,
    row_failed,
    cu_tokens,
    slot_of_row,
    length,
    best,
    masses,
    vocab,
    context,
    logits_stride,
    KEPT_2: tl.constexpr,
    parts,
    PARTS_2: tl.constexpr,
    PART: tl.constexpr,
):
    """Of each emitted token and part the mass relative to the token's largest logit: int64 [B, columns, parts]."""
    row = tl.program_id(0)
    column = tl.program_id(1)
    part = tl.program_id(2)
    recorded, at, _, _ = _recorded(row, column, accepted, row_failed, cu_tokens, slot_of_row, length, context)
    if recorded == 0:
        return
    every = tl.arange(0, PARTS_2)
    first = (row * tl.num_programs(1) + column).to(tl.int64) * parts
    winners = tl.load(best + (first + every) * KEPT_2, mask=every < parts, other=-0x8000000000000000)
    top = value_of_rank(tl.max(winners, 0))
    token = part * PART + tl.arange(0, PART)
    inside = token < vocab
    x = tl.load(logits + at * logits_stride + token, mask=inside, other=0.0).to(tl.float32)
    tl.store(masses + first + part, tl.sum(tl.where(inside, mass(x - top), 0), 0))


@jit(unspecialized=["emitted_stride", "context", "logits_stride", "parts"])
def record_kernel(  # type: ignore[no-untyped-def]
    logits,
    emitted,
    accepted,
    row_failed,
    cu_tokens,
    slot_of_row,
    length,
    best,
    masses,
    logprobs,
    logprob_tokens,
    emitted_stride,
    context,
    logits_stride,
    ENTRIES: tl.constexpr,
    ENTRIES_2: tl.constexpr,
    KEPT_2: tl.constexpr,
    parts,
    PARTS_2: tl.constexpr,
):
    """One program per emitted token: its entries, from what the parts found."""
    row = tl.program_id(0)
    column = tl.program_id(1)
    recorded, at, slot, position = _recorded(row, column, accepted, row_failed, cu_tokens, slot_of_row, length, context)
    if recorded == 0:
        return
    first = (row * tl.num_programs(1) + column).to(tl.int64) * parts
    every = tl.arange(0, PARTS_2)
    total = tl.sum(tl.load(masses + first + every, mask=every < parts, other=0), 0)
    place = tl.arange(0, PARTS_2 * KEPT_2)
    rank = tl.load(best + first * KEPT_2 + place, mask=place < parts * KEPT_2, other=-0x8000000000000000)
    normalizer = value_of_rank(tl.max(rank, 0)) + log_of_mass(total)
    own = tl.maximum(tl.load(emitted + slot * emitted_stride + column), 0)
    order = tl.arange(0, ENTRIES_2)
    tokens = tl.zeros((ENTRIES_2,), tl.int32) + own
    values = tl.zeros((ENTRIES_2,), tl.float32) + tl.load(logits + at * logits_stride + own).to(tl.float32)
    for i in range(1, ENTRIES):
        winner = tl.max(rank, 0)
        tokens = tl.where(order == i, index_of_rank(winner), tokens)
        values = tl.where(order == i, value_of_rank(winner), values)
        rank = tl.where(rank == winner, -0x8000000000000000, rank)
    target = (slot * context + position) * ENTRIES + order
    tl.store(logprobs + target, values - normalizer, mask=order < ENTRIES)
    tl.store(logprob_tokens + target, tokens, mask=order < ENTRIES)


def record_logprobs_triton(
    logits: torch.Tensor,
    emitted: torch.Tensor,
    accepted: torch.Tensor,
    row_failed: torch.Tensor,
    cu_tokens: torch.Tensor,
    slot_of_row: torch.Tensor,
    length: torch.Tensor,
    logprobs: torch.Tensor,
    logprob_tokens: torch.Tensor,
) -> None:
    """The launches for CUDA tensors, or for CPU tensors under the interpreter.

    Raises:
        ValueError: an argument that the kernels could not take, or more entries than the vocabulary has.
    """
    device, int32 = logits.device, (torch.int32,)
    check_tensor("logits", logits, dtypes=FLOATS, shape=(None, None), contiguous=False)
    width, vocab = logits.shape
    check_some("logits", "row", width)
    check_some("logits", "token", vocab)
    check_rows(cu_tokens, slot_of_row, device)
    check_tensor("emitted", emitted, dtypes=int32, shape=(None, None), device=device)
    slots = emitted.shape[0]
    check_some("emitted", "slot", slots)
    check_tensor("accepted", accepted, dtypes=int32, shape=(slots,), device=device)
    check_tensor("length", length, dtypes=int32, shape=(slots,), device=device)
    check_tensor("row_failed", row_failed, dtypes=(torch.bool,), shape=(slots,), device=device)
    check_tensor("logprobs", logprobs, dtypes=(torch.float32,), shape=(slots, None, None), device=device)
    check_tensor("logprob_tokens", logprob_tokens, dtypes=int32, shape=logprobs.shape, device=device)
    context, entries = logprobs.shape[1:]
    if not 1 <= entries <= vocab + 1:
        raise ValueError(f"logprobs has {entries} entries; accepted: 1 to one more than the {vocab} tokens")
    # A row has at least one committed token, so `context` columns are more than it can append.
    rows, columns = slot_of_row.shape[0], min(emitted.shape[1], context)
    if rows == 0 or columns == 0:
        return
    sizes, part = _sizes(vocab, entries), part_size(vocab)
    tokens = rows * columns * sizes["parts"]
    best = workspace("record_logprobs.best", tokens * sizes["KEPT_2"], torch.int64, device)
    masses = workspace("record_logprobs.masses", tokens, torch.int64, device)
    where = (accepted, row_failed, cu_tokens, slot_of_row, length)
    grid, scalars = (rows, columns, sizes["parts"]), (vocab, context, logits.stride(0))
    options: dict[str, Any] = {"num_warps": part_warps(part), **UNFUSED}
    likeliest_kernel[grid](logits, *where, best, *scalars, **_constants(likeliest_kernel, sizes), **options)
    mass_kernel[grid](logits, *where, best, masses, *scalars, **_constants(mass_kernel, sizes), **options)
    record_kernel[(rows, columns)](
        logits,
        emitted,
        *where,
        best,
        masses,
        logprobs,
        logprob_tokens,
        emitted.shape[1],
        *scalars[1:],
        **_constants(record_kernel, sizes),
        num_warps=4,
        **UNFUSED,
    )


def _sizes(vocab: int, entries: int) -> dict[str, int]:
    kept = max(entries - 1, 1)
    return {
        "ENTRIES": entries,
        "ENTRIES_2": next_power_of_2(entries),
        "KEPT": kept,
        "KEPT_2": next_power_of_2(kept),
        "parts": num_parts(vocab),
        "PARTS_2": MOST_PARTS,
        "PART": part_size(vocab),
    }


def _constants(kernel: Any, sizes: dict[str, int]) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if name in kernel.arg_names}


def kernel_specs() -> list[KernelSpec]:
    """Each launch for each type of logits with the most entries that a request may ask for, and with the fewest."""
    pointers = dict.fromkeys(["emitted", "accepted", "cu_tokens", "slot_of_row", "length", "logprob_tokens"], "*i32")
    pointers |= {"row_failed": "*u1", "best": "*i64", "masses": "*i64", "logprobs": "*fp32"}
    pointers |= {
        "vocab": "i32:16",
        "context": "i32",
        "emitted_stride": "i32",
        "logits_stride": "i32:16",
        "parts": "i32",
    }
    specs = []
    for kind, vocab, entries in [(*size, 21) for size in SPEC_SIZES] + [("bf16", 128_256, 1)]:
        sizes, element = _sizes(vocab, entries), 4 if kind == "fp32" else 2
        ranks = sizes["parts"] * sizes["KEPT_2"] * 8
        for name, kernel, moved in (
            ("likeliest", likeliest_kernel, vocab * element + ranks),
            ("mass", mass_kernel, vocab * element + sizes["parts"] * 16),
            ("record", record_kernel, ranks + sizes["parts"] * 8 + entries * 8),
        ):
            arguments = {key: value for key, value in pointers.items() if key in kernel.arg_names}
            specs.append(
                KernelSpec(
                    op="record_logprobs",
                    variant=f"{kind}, {vocab}, {entries} entries: {name}",
                    kernel=kernel,
                    arguments=arguments | {"logits": f"*{kind}"},
                    constants={key: size for key, size in _constants(kernel, sizes).items() if key != "parts"},
                    num_warps=4 if kernel is record_kernel else part_warps(sizes["PART"]),
                    enable_fp_fusion=False,
                    shape=f"1 token, vocabulary {vocab}",
                    bytes_moved=moved,
                )
            )
    return specs
