"""The Triton kernels of `sample_target`: every position's vocabulary is split over many programs.

The launches of one call, with their grids fixed by the shapes:

1. `scan_kernel`: each part's largest logit; how many logits have each top digit of their key, for top-k.
2. `count_kernel`, once per further digit: narrows the k-th largest down to that digit.
3. `mass_kernel`, once per four bits of the key: the same for top-p, with masses instead of counts.
4. `draw_kernel`: each part's kept mass, smallest kept number, and Gumbel-max winner.
5. `finish_kernel`: the outputs.

What a launch leaves to the next is one number or histogram per part. Counts and masses are integers, so their sums are
the same in any order, and no atomics are needed. Parts of a position whose filter is off, whose temperature is 0 or
that is padding leave at once.
"""

from __future__ import annotations

from typing import Any

import torch

from .elementary_triton import (
    index_of_rank,
    is_finite,
    log,
    log_of_mass,
    mass,
    ordered_key,
    ranked,
    value_of_key,
    value_of_rank,
)
from .philox import TARGET
from .philox_triton import gumbel_range
from .threshold_triton import (
    MASS_BLOCK,
    STATE,
    count_kernel,
    descend,
    digit_sums,
    largest_rank,
    mass_kernel,
    scan_kernel,
    selected_value,
    slot_of,
)
from .triton_support import UNFUSED, KernelSpec, check_some, check_tensor, jit, tl
from .vocabulary_parts import FLOATS, MOST_PARTS, SPEC_SIZES, num_parts, part_size, part_warps
from .workspace import workspace


@jit(unspecialized=["drawn_size", "num_rows", "parts"])
def draw_kernel(  # type: ignore[no-untyped-def]
    logits,
    rows,
    positions,
    cu_tokens,
    slot_of_row,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    best,
    masses_before,
    state,
    drawn,
    drawn_size,
    num_rows,
    vocab,
    logits_stride,
    STREAM: tl.constexpr,
    parts,
    PARTS_2: tl.constexpr,
    PART: tl.constexpr,
):
    """Of each part's kept tokens the `ranked` winner, the mass, the number, and the smallest z's ordered key: `drawn`.

    int64 [4, W, parts], `drawn_size` apart.
    """
    at = tl.program_id(0)
    part = tl.program_id(1)
    if at >= tl.load(cu_tokens + num_rows):
        return
    slot = slot_of(at, rows, slot_of_row)
    heat = tl.load(temperature + slot)
    if heat <= 0.0:
        return
    KIND: tl.constexpr = logits.dtype.element_ty  # noqa: N806
    LAST: tl.constexpr = KIND.primitive_bitwidth // 4 - 1  # noqa: N806
    top = tl.div_rn(value_of_rank(largest_rank(best, at, parts, PARTS_2)), heat)
    k = tl.load(top_k + slot)
    own = state + at * 5
    bound = -float("inf")
    if tl.load(top_p + slot) < 1.0:
        digits = digit_sums(masses_before, at, parts, PARTS_2, 16)
        last, _ = descend(digits, tl.load(own + LAST % 2 * 2), tl.load(own + LAST % 2 * 2 + 1), 16)
        bound = tl.div_rn(selected_value(last, KIND), heat)
    elif (k > 0) & (k < vocab):
        bound = tl.div_rn(selected_value(tl.load(own + 4), KIND), heat)
    least = tl.load(min_p + slot)
    if least > 0.0:
        bound = tl.maximum(bound, top + log(tl.minimum(tl.maximum(least, 1.1754943508222875e-38), 1.0)))

    first = part * PART
    token = first + tl.arange(0, PART)
    x = tl.load(logits + at.to(tl.int64) * logits_stride + token, mask=token < vocab, other=0.0)
    z = tl.div_rn(x.to(tl.float32), heat)
    kept = (token < vocab) & (z >= bound)
    noise = gumbel_range(tl.load(seed + slot), tl.load(positions + at) + 1, STREAM, first, PART)
    place = drawn + at.to(tl.int64) * parts + part
    tl.store(place, tl.max(ranked(z + noise, token, kept), 0))
    tl.store(place + drawn_size, tl.sum(tl.where(kept, mass(z - top), 0), 0))
    tl.store(place + 2 * drawn_size, tl.sum(kept.to(tl.int32), 0).to(tl.int64))
    tl.store(place + 3 * drawn_size, tl.min(tl.where(kept, ordered_key(z), 0x7FFFFFFF), 0).to(tl.int64))


@jit(unspecialized=["drawn_size", "num_rows", "vocab", "parts"])
def finish_kernel(  # type: ignore[no-untyped-def]
    rows,
    cu_tokens,
    slot_of_row,
    temperature,
    best,
    drawn,
    drawn_size,
    sampled,
    log_normalizer,
    threshold,
    failed,
    num_rows,
    vocab,
    parts,
    PARTS_2: tl.constexpr,
):
    """One program per position: the outputs, from what its parts found."""
    at = tl.program_id(0)
    if at >= tl.load(cu_tokens + num_rows):
        return
    heat = tl.load(temperature + slot_of(at, rows, slot_of_row))
    winner = largest_rank(best, at, parts, PARTS_2)
    top = value_of_rank(winner)
    normalizer = top
    lowest = top
    if heat > 0.0:
        top = tl.div_rn(top, heat)
        part = tl.arange(0, PARTS_2)
        inside = part < parts
        place = drawn + at.to(tl.int64) * parts + part
        winner = tl.max(tl.load(place, mask=inside, other=-0x8000000000000000), 0)
        total = tl.sum(tl.load(place + drawn_size, mask=inside, other=0), 0)
        kept = tl.sum(tl.load(place + 2 * drawn_size, mask=inside, other=0), 0)
        key = tl.min(tl.load(place + 3 * drawn_size, mask=inside, other=0x7FFFFFFF), 0)
        normalizer = top + log_of_mass(total)
        lowest = tl.where(kept == vocab, -float("inf"), value_of_key(key.to(tl.int32)))
    finite = is_finite(top)
    tl.store(sampled + at, tl.where(finite, index_of_rank(winner), 0))
    tl.store(log_normalizer + at, tl.where(finite, normalizer, 0.0))
    tl.store(threshold + at, tl.where(finite, lowest, -float("inf")))
    tl.store(failed + at, finite == 0)


def sample_target_triton(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    cu_tokens: torch.Tensor,
    slot_of_row: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    sampled: torch.Tensor,
    log_normalizer: torch.Tensor,
    threshold: torch.Tensor,
    failed: torch.Tensor,
    stream: int = TARGET,
) -> None:
    """The launches for CUDA tensors, or for CPU tensors under the interpreter.

    Their number depends on the logits' type, 8 for 16 bits and 14 for float32, and their grids on its shape.

    Raises:
        ValueError: an argument that the kernels could not take.
    """
    device = logits.device
    check_tensor("logits", logits, dtypes=FLOATS, shape=(None, None), contiguous=False)
    width, vocab = logits.shape
    int32, float32 = (torch.int32,), (torch.float32,)
    for name, index in (("rows", rows), ("positions", positions), ("sampled", sampled)):
        check_tensor(name, index, dtypes=int32, shape=(width,), device=device)
    for name, number in (("log_normalizer", log_normalizer), ("threshold", threshold)):
        check_tensor(name, number, dtypes=float32, shape=(width,), device=device)
    check_tensor("failed", failed, dtypes=(torch.bool,), shape=(width,), device=device)
    check_tensor("slot_of_row", slot_of_row, dtypes=int32, shape=(None,), device=device)
    num_rows = slot_of_row.shape[0]
    check_tensor("cu_tokens", cu_tokens, dtypes=int32, shape=(num_rows + 1,), device=device)
    check_tensor("seed", seed, dtypes=(torch.int64,), shape=(None,), device=device)
    check_some("seed", "slot", seed.shape[0])
    check_tensor("top_k", top_k, dtypes=int32, shape=seed.shape, device=device)
    for name, number in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
        check_tensor(name, number, dtypes=float32, shape=seed.shape, device=device)
    check_some("logits", "token", vocab)
    if width == 0:
        return
    check_some("slot_of_row", "row", num_rows)

    part, parts = part_size(vocab), num_parts(vocab)
    sizes: dict[str, Any] = {"parts": parts, "PARTS_2": MOST_PARTS, "PART": part}
    options: dict[str, Any] = {"num_warps": part_warps(part), **UNFUSED}
    programs = width * parts
    best = workspace("sample_target.best", programs, torch.int64, device)
    counts = workspace("sample_target.counts", 2 * programs * 256, torch.int32, device).view(2, -1)
    masses = workspace("sample_target.masses", 2 * programs * 16, torch.int64, device).view(2, -1)
    drawn = workspace("sample_target.drawn", 4 * programs, torch.int64, device)
    state = workspace("sample_target.state", width * STATE, torch.int64, device)
    grid, bits = (width, parts), 8 * logits.element_size()
    where = (rows, cu_tokens, slot_of_row, temperature)
    scalars = (num_rows, vocab, logits.stride(0))
    scan_kernel[grid](logits, *where, top_k, best, counts[0], *scalars, parts=parts, PART=part, **options)
    for level in range(1, bits // 8):
        before, after = counts[(level - 1) % 2], counts[level % 2]
        count_kernel[grid](
            logits,
            *where,
            top_k,
            before,
            after,
            state,
            *scalars,
            bits - 8 * level - 8,
            level % 2,
            STAGE=min(level, 2),
            **sizes,
            **options,
        )
    for level in range(bits // 4):
        mass_kernel[grid](
            logits,
            *where,
            top_k,
            top_p,
            best,
            counts[(bits // 8 - 1) % 2],
            masses[(level - 1) % 2],
            masses[level % 2],
            state,
            *scalars,
            bits - 4 * level - 4,
            level % 2,
            STAGE=min(level, 2),
            BLOCK=min(part, MASS_BLOCK),
            **sizes,
            **options,
        )
    draw_kernel[grid](
        logits,
        rows,
        positions,
        *where[1:],
        top_k,
        top_p,
        min_p,
        seed,
        best,
        masses[(bits // 4 - 1) % 2],
        state,
        drawn,
        programs,
        *scalars,
        STREAM=stream,
        **sizes,
        **options,
    )
    finish_kernel[(width,)](
        *where,
        best,
        drawn,
        programs,
        sampled,
        log_normalizer,
        threshold,
        failed,
        num_rows,
        vocab,
        parts=parts,
        PARTS_2=MOST_PARTS,
        **options,
    )


POINTERS = {
    **dict.fromkeys(["rows", "positions", "cu_tokens", "slot_of_row", "top_k", "sampled"], "*i32"),
    **dict.fromkeys(["temperature", "top_p", "min_p", "log_normalizer", "threshold"], "*fp32"),
    **dict.fromkeys(["seed", "best", "masses_before", "masses", "state", "drawn"], "*i64"),
    **dict.fromkeys(["counts_before", "counts"], "*i32"),
    **dict.fromkeys(["num_rows", "shift", "parity", "parts", "drawn_size"], "i32"),
    **dict.fromkeys(["vocab", "logits_stride"], "i32:16"),
    "failed": "*u1",
}
"""Types of these kernels' arguments but `logits`, by name."""


def kernel_specs() -> list[KernelSpec]:
    """Every launch for each type of logits at a vocabulary of 128,256, and the ends of the vocabulary's range."""
    specs = []
    for kind, vocab in SPEC_SIZES:
        part, parts = part_size(vocab), num_parts(vocab)
        sizes = {"PARTS_2": MOST_PARTS, "PART": part}
        element = 4 if kind == "fp32" else 2
        logits_bytes = 8 * vocab * element
        histograms = 8 * parts * 256 * 4
        launches: list[tuple[str, Any, dict[str, Any], int]] = [("scan", scan_kernel, {}, logits_bytes + histograms)]
        for stage in (1, 2) if kind == "fp32" else (1,):
            launches.append((f"count {stage}", count_kernel, {"STAGE": stage}, logits_bytes + 2 * histograms))
        for stage in (0, 1, 2):
            constants = {"STAGE": stage, "BLOCK": min(part, MASS_BLOCK)}
            launches.append((f"mass {stage}", mass_kernel, constants, logits_bytes + histograms // 4))
        launches.append(("draw", draw_kernel, {"STREAM": TARGET}, logits_bytes))
        launches.append(("finish", finish_kernel, {}, 8 * (parts * 5 * 8 + 13)))
        for name, kernel, changes, moved in launches:
            names = kernel.arg_names
            constants = {key: value for key, value in (sizes | changes).items() if key in names}
            arguments = {key: value for key, value in POINTERS.items() if key in names}
            if "logits" in names:
                arguments["logits"] = f"*{kind}"
            specs.append(
                KernelSpec(
                    op="sample_target",
                    variant=f"{kind}, {vocab}: {name}",
                    kernel=kernel,
                    arguments=arguments,
                    constants=constants,
                    num_warps=part_warps(part),
                    enable_fp_fusion=False,
                    shape=f"8 tokens, vocabulary {vocab}",
                    bytes_moved=moved,
                )
            )
    return specs
