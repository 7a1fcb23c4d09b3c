"""The likeliest token of each row of a drafter's logits, and how sure the drafter is of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .elementary import mass, mass_array
from .elementary_triton import index_of_rank, is_finite, ranked, value_of_rank
from .elementary_triton import mass as mass_triton
from .registration import define_op
from .triton_support import UNFUSED, KernelSpec, check_some, check_tensor, jit, next_power_of_2, tl
from .vocabulary import constrain_draft_logits
from .vocabulary_parts import FLOATS, SPEC_SIZES, part_size, part_warps
from .workspace import workspace

_ONE = float(2**40)
# The mass of probability 1.


def draft_argmax_reference(
    logits: torch.Tensor,
    allowed: torch.Tensor | None,
    ids: torch.Tensor | None,
    chosen: torch.Tensor,
    confidence: torch.Tensor,
    failed: torch.Tensor,
) -> None:
    """The specification of `draft_argmax`; reads nothing on the host.

    Args:
        logits: float32, float16 or bfloat16 [N, V].
        allowed: bool [V], the tokens that the target has too; None for all. The others count as -inf.
        ids: int32 [V], what a token is called in `chosen`; None: its index.
        chosen: int32 [N], written: the likeliest token, the lowest index on ties; where failed index
            0, called `ids[0]`.
        confidence: float32 [N], written: its probability at temperature 1, without filters; 0 where failed. Masses are
            those of `elementary.mass`, so that it is the same on every backend.
        failed: bool [N], written: the largest logit is not finite, which NaN counts as.
    """
    z = logits.float()
    if allowed is not None:
        z = constrain_draft_logits(z, allowed)
    top = z.amax(1, keepdim=True)
    bad = ~top.isfinite()
    z, top = torch.where(bad, 0.0, z), torch.where(bad, 0.0, top)
    total = mass(z - top).sum(1)
    failed.copy_(bad[:, 0])
    choice = torch.where(failed, 0, z.argmax(1))
    chosen.copy_(choice if ids is None else ids.index_select(0, choice))
    confidence.copy_(torch.where(failed, 0.0, _ONE / total.float()))


def _draft_argmax_cpu(
    logits: torch.Tensor,
    allowed: torch.Tensor | None,
    ids: torch.Tensor | None,
    chosen: torch.Tensor,
    confidence: torch.Tensor,
    failed: torch.Tensor,
) -> None:
    chosen_of, confidence_of, failed_of = chosen.numpy(), confidence.numpy(), failed.numpy()
    permitted = None if allowed is None else np.flatnonzero(allowed.numpy())
    called = None if ids is None else ids.numpy()
    for row in range(logits.shape[0]):
        # NumPy's argmax is ten times as fast as torch's; on NaN it gives the first of them.
        z = logits[row].float().numpy()
        if permitted is not None:
            z = z[permitted]
        choice = int(z.argmax()) if len(z) else 0
        failed_of[row] = len(z) == 0 or not np.isfinite(z[choice])
        if failed_of[row]:
            chosen_of[row], confidence_of[row] = 0 if called is None else called[0], 0.0
            continue
        token = choice if permitted is None else permitted[choice]
        chosen_of[row] = token if called is None else called[token]
        total = mass_array(z - z[choice]).sum()
        confidence_of[row] = np.float32(_ONE) / np.array([total], dtype=np.int64).astype(np.float32)[0]


@jit
def _best(best, row, PARTS: tl.constexpr, PARTS_2: tl.constexpr):  # type: ignore[no-untyped-def]
    part = tl.arange(0, PARTS_2)
    return tl.max(tl.load(best + row * PARTS + part, mask=part < PARTS, other=-0x8000000000000000), 0)


@jit
def _load_part(logits, allowed, row, part, vocab, logits_stride, PART: tl.constexpr):  # type: ignore[no-untyped-def]
    token = part * PART + tl.arange(0, PART)
    inside = token < vocab
    x = tl.load(logits + row.to(tl.int64) * logits_stride + token, mask=inside, other=0.0).to(tl.float32)
    if allowed is not None:
        permitted = tl.load(allowed + token, mask=inside, other=0).to(tl.int32) != 0
        x = tl.where(permitted, x, -float("inf"))
    return token, inside, x


@jit
def _scan_kernel(  # type: ignore[no-untyped-def]
    logits,
    allowed,
    best,
    vocab,
    logits_stride,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
):
    """Of each part the largest logit, `ranked`: int64 [N, PARTS]."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    token, inside, x = _load_part(logits, allowed, row, part, vocab, logits_stride, PART)
    tl.store(best + row * PARTS + part, tl.max(ranked(x, token, inside), 0))


@jit
def _mass_kernel(  # type: ignore[no-untyped-def]
    logits,
    allowed,
    best,
    masses,
    vocab,
    logits_stride,
    PARTS: tl.constexpr,
    PARTS_2: tl.constexpr,
    PART: tl.constexpr,
):
    """Of each part the mass, relative to the row's largest logit: int64 [N, PARTS]."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    top = value_of_rank(_best(best, row, PARTS, PARTS_2))
    _, inside, x = _load_part(logits, allowed, row, part, vocab, logits_stride, PART)
    weight = tl.where(inside, mass_triton(tl.where(is_finite(top), x - top, 0.0)), 0)
    tl.store(masses + row * PARTS + part, tl.sum(weight, 0))


@jit
def _finish_kernel(  # type: ignore[no-untyped-def]
    best,
    masses,
    ids,
    chosen,
    confidence,
    failed,
    PARTS: tl.constexpr,
    PARTS_2: tl.constexpr,
):
    """One program per row: the outputs, from what its parts found."""
    row = tl.program_id(0)
    winner = _best(best, row, PARTS, PARTS_2)
    finite = is_finite(value_of_rank(winner))
    part = tl.arange(0, PARTS_2)
    total = tl.sum(tl.load(masses + row * PARTS + part, mask=part < PARTS, other=0), 0)
    probability = tl.div_rn(1099511627776.0, tl.where(finite, total, 1).to(tl.float32))
    choice = tl.where(finite, index_of_rank(winner), 0)
    if ids is not None:
        choice = tl.load(ids + choice)
    tl.store(chosen + row, choice)
    tl.store(confidence + row, tl.where(finite, probability, 0.0))
    tl.store(failed + row, finite == 0)


def draft_argmax_triton(
    logits: torch.Tensor,
    allowed: torch.Tensor | None,
    ids: torch.Tensor | None,
    chosen: torch.Tensor,
    confidence: torch.Tensor,
    failed: torch.Tensor,
) -> None:
    """The three launches for CUDA tensors, or for CPU tensors under the interpreter.

    Raises:
        ValueError: an argument that the kernels could not take.
    """
    device = logits.device
    check_tensor("logits", logits, dtypes=FLOATS, shape=(None, None), contiguous=False)
    rows, vocab = logits.shape
    if allowed is not None:
        check_tensor("allowed", allowed, dtypes=(torch.bool,), shape=(vocab,), device=device)
    if ids is not None:
        check_tensor("ids", ids, dtypes=(torch.int32,), shape=(vocab,), device=device)
    check_tensor("chosen", chosen, dtypes=(torch.int32,), shape=(rows,), device=device)
    check_tensor("confidence", confidence, dtypes=(torch.float32,), shape=(rows,), device=device)
    check_tensor("failed", failed, dtypes=(torch.bool,), shape=(rows,), device=device)
    check_some("logits", "token", vocab)
    if rows == 0:
        return
    part = part_size(vocab)
    parts = -(-vocab // part)
    split: dict[str, Any] = {"PARTS": parts, "PARTS_2": next_power_of_2(parts)}
    options: dict[str, Any] = {"num_warps": part_warps(part), **UNFUSED}
    best = workspace("draft_argmax.best", rows * parts, torch.int64, device)
    masses = workspace("draft_argmax.masses", rows * parts, torch.int64, device)
    grid, scalars = (rows, parts), (vocab, logits.stride(0))
    _scan_kernel[grid](logits, allowed, best, *scalars, PARTS=parts, PART=part, **options)
    _mass_kernel[grid](logits, allowed, best, masses, *scalars, PART=part, **split, **options)
    _finish_kernel[(rows,)](best, masses, ids, chosen, confidence, failed, **split, num_warps=1, **UNFUSED)


def kernel_specs() -> list[KernelSpec]:
    """Every launch for each type of logits, and with the tokens of two vocabularies, whose ids are then others too."""
    pointers = {"best": "*i64", "masses": "*i64", "chosen": "*i32", "confidence": "*fp32", "failed": "*i1"}
    scalars = {"vocab": "i32", "logits_stride": "i32:16"}
    specs = []
    for kind, vocab, constrained in (*((*size, False) for size in SPEC_SIZES), ("bf16", 49_152, True)):
        part = part_size(vocab)
        parts = -(-vocab // part)
        sizes = {"PARTS": parts, "PARTS_2": next_power_of_2(parts), "PART": part}
        moved = 4 * vocab * (4 if kind == "fp32" else 2) + (vocab if constrained else 0)
        for name, kernel, warps in (
            ("scan", _scan_kernel, part_warps(part)),
            ("mass", _mass_kernel, part_warps(part)),
            ("finish", _finish_kernel, 1),
        ):
            names = kernel.arg_names
            types = {**pointers, **scalars, "logits": f"*{kind}"}
            if constrained:
                types |= {"allowed": "*i1", "ids": "*i32"}
            constants = {**sizes, **({} if constrained else {"allowed": None, "ids": None})}
            specs.append(
                KernelSpec(
                    op="draft_argmax",
                    variant=f"{kind}, {vocab}{', constrained' if constrained else ''}: {name}",
                    kernel=kernel,
                    arguments={key: value for key, value in types.items() if key in names},
                    constants={key: value for key, value in constants.items() if key in names},
                    num_warps=warps,
                    enable_fp_fusion=False,
                    maxnreg=255,
                    shape=f"4 rows, vocabulary {vocab}",
                    bytes_moved=4 * (parts * 16 + 9) if name == "finish" else moved,
                )
            )
    return specs


def _draft_argmax_fake(*args: torch.Tensor | None) -> None:
    return None


draft_argmax = define_op(
    "draft_argmax(Tensor logits, Tensor? allowed, Tensor? ids, Tensor(a!) chosen, "
    "Tensor(b!) confidence, Tensor(c!) failed) -> ()",
    cpu=_draft_argmax_cpu,
    fake=_draft_argmax_fake,
    cuda=draft_argmax_triton,
)
"""`draftgraph::draft_argmax`; see `draft_argmax_reference`."""
