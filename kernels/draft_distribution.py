"""Keeps the distribution that a draft was sampled from: the q of speculative sampling."""

from __future__ import annotations

import torch

from .accept_standard import _probability, _probability_array
from .registration import define_op
from .residual_triton import probability as probability_triton
from .triton_support import UNFUSED, KernelSpec, check_some, check_tensor, jit, tl
from .vocabulary_parts import FLOATS, part_size, part_warps


def draft_distribution_reference(
    logits: torch.Tensor,
    sampled: torch.Tensor,
    log_normalizer: torch.Tensor,
    threshold: torch.Tensor,
    temperature: torch.Tensor,
    finished: torch.Tensor,
    slot_of_row: torch.Tensor,
    step: int,
    draft_probs: torch.Tensor,
) -> None:
    """The specification of `draft_distribution`; reads nothing on the host.

    q(x) is exp(z - log_normalizer) with z = logits / temperature, or 0 where z < threshold; at temperature 0 it is 1 at
    `sampled` and 0 elsewhere. It is the formula by which the acceptance rules compute p, so a drafter whose logits are
    the target's has q = p to the last bit.

    Args:
        logits: float32, float16 or bfloat16 [N, V], N at least B; row b's are at b.
        sampled: int32 [N].
        log_normalizer: float32 [N].
        threshold: float32 [N]; all three as `sample_target` wrote them.
        temperature: float32 [R1].
        finished: bool [R1]; a finished row's distribution is not touched.
        slot_of_row: int32 [B].
        step: which draft of the row, 0 to K - 1.
        draft_probs: float32 [R1, K, V], written.
    """
    num_rows, vocab = slot_of_row.shape[0], logits.shape[1]
    slots = slot_of_row.long()
    heat = temperature[slots][:, None]
    z = logits[:num_rows].float() / torch.where(heat > 0.0, heat, 1.0)
    warm = _probability(z, log_normalizer[:num_rows, None], threshold[:num_rows, None])
    token = torch.arange(vocab, dtype=torch.int32, device=logits.device)
    cold = (token == sampled[:num_rows, None]).float()
    q = torch.where(heat > 0.0, warm, cold)
    draft_probs[slots, step] = torch.where(finished[slots][:, None], draft_probs[slots, step], q)


def _draft_distribution_cpu(
    logits: torch.Tensor,
    sampled: torch.Tensor,
    log_normalizer: torch.Tensor,
    threshold: torch.Tensor,
    temperature: torch.Tensor,
    finished: torch.Tensor,
    slot_of_row: torch.Tensor,
    step: int,
    draft_probs: torch.Tensor,
) -> None:
    for row, slot in enumerate(slot_of_row.tolist()):
        if finished[slot]:
            continue
        heat, q = float(temperature[slot]), draft_probs[slot, step].numpy()
        if heat > 0.0:
            z = logits[row].float().numpy() / temperature.numpy()[slot]
            q[:] = _probability_array(z, log_normalizer.numpy()[row], threshold.numpy()[row])
        else:
            q.fill(0.0)
            q[int(sampled[row])] = 1.0


@jit(unspecialized=["step", "num_drafts"])
def _draft_distribution_kernel(  # type: ignore[no-untyped-def]
    logits,
    sampled,
    log_normalizer,
    threshold,
    temperature,
    finished,
    slot_of_row,
    draft_probs,
    vocab,
    logits_stride,
    step,
    num_drafts,
    PART: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slot_of_row + row).to(tl.int64)
    if tl.load(finished + slot).to(tl.int32) != 0:
        return
    token = tl.program_id(1) * PART + tl.arange(0, PART)
    inside = token < vocab
    heat = tl.load(temperature + slot)
    x = tl.load(logits + row.to(tl.int64) * logits_stride + token, mask=inside, other=0.0).to(tl.float32)
    z = tl.div_rn(x, tl.where(heat > 0.0, heat, 1.0))
    warm = probability_triton(z, tl.load(log_normalizer + row), tl.load(threshold + row))
    cold = (token == tl.load(sampled + row)).to(tl.float32)
    tl.store(
        draft_probs + (slot * num_drafts + step) * vocab + token,
        tl.where(heat > 0.0, warm, cold),
        mask=inside,
    )


def draft_distribution_triton(
    logits: torch.Tensor,
    sampled: torch.Tensor,
    log_normalizer: torch.Tensor,
    threshold: torch.Tensor,
    temperature: torch.Tensor,
    finished: torch.Tensor,
    slot_of_row: torch.Tensor,
    step: int,
    draft_probs: torch.Tensor,
) -> None:
    """The launch for CUDA tensors, or for CPU tensors under the interpreter.

    Raises:
        ValueError: an argument that the kernel could not take.
    """
    device, single = logits.device, (torch.float32,)
    check_tensor("logits", logits, dtypes=FLOATS, shape=(None, None), contiguous=False)
    width, vocab = logits.shape
    check_tensor("sampled", sampled, dtypes=(torch.int32,), shape=(width,), device=device)
    check_tensor("log_normalizer", log_normalizer, dtypes=single, shape=(width,), device=device)
    check_tensor("threshold", threshold, dtypes=single, shape=(width,), device=device)
    check_tensor("temperature", temperature, dtypes=single, shape=(None,), device=device)
    slots = temperature.shape[0]
    check_some("temperature", "slot", slots)
    check_tensor("finished", finished, dtypes=(torch.bool,), shape=(slots,), device=device)
    check_tensor("slot_of_row", slot_of_row, dtypes=(torch.int32,), shape=(None,), device=device)
    check_tensor("draft_probs", draft_probs, dtypes=single, shape=(slots, None, vocab), device=device)
    rows, num_drafts = slot_of_row.shape[0], draft_probs.shape[1]
    check_some("draft_probs", "draft", num_drafts)
    if rows > width:
        raise ValueError(f"slot_of_row has {rows} rows; accepted: at most {width}, the rows of logits")
    if not 0 <= step < num_drafts:
        raise ValueError(f"step is {step}; accepted: 0 to {num_drafts - 1}")
    if rows == 0 or vocab == 0:
        return
    part = part_size(vocab)
    _draft_distribution_kernel[(rows, -(-vocab // part))](
        logits,
        sampled,
        log_normalizer,
        threshold,
        temperature,
        finished,
        slot_of_row,
        draft_probs,
        vocab,
        logits.stride(0),
        step,
        num_drafts=num_drafts,
        PART=part,
        num_warps=part_warps(part),
        **UNFUSED,
    )


def kernel_specs() -> list[KernelSpec]:
    """The types of logits, at a vocabulary of 128,256."""
    vocab = 128_256
    single = dict.fromkeys(["log_normalizer", "threshold", "temperature", "draft_probs"], "*fp32")
    return [
        KernelSpec(
            op="draft_distribution",
            variant=f"{kind}, {vocab}",
            kernel=_draft_distribution_kernel,
            arguments={
                "logits": f"*{kind}",
                "sampled": "*i32",
                **single,
                "finished": "*i1",
                "slot_of_row": "*i32",
                "vocab": "i32",
                "logits_stride": "i32:16",
                "step": "i32",
                "num_drafts": "i32",
            },
            constants={"PART": part_size(vocab)},
            num_warps=part_warps(part_size(vocab)),
            enable_fp_fusion=False,
            maxnreg=255,
            shape=f"1 row, vocabulary {vocab}",
            bytes_moved=vocab * (8 if kind == "fp32" else 6),
        )
        for kind in ("bf16", "fp16", "fp32")
    ]


def _draft_distribution_fake(*args: object) -> None:
    return None


draft_distribution = define_op(
    "draft_distribution(Tensor logits, Tensor sampled, Tensor log_normalizer, Tensor threshold, Tensor temperature, "
    "Tensor finished, Tensor slot_of_row, int step, Tensor(a!) draft_probs) -> ()",
    cpu=_draft_distribution_cpu,
    fake=_draft_distribution_fake,
    cuda=draft_distribution_triton,
)
"""`draftgraph::draft_distribution`; see `draft_distribution_reference`."""
