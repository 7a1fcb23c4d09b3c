"""Widens the logits of a drafter that knows a part of the target's vocabulary to all of it."""

from __future__ import annotations

import torch

from .registration import define_op
from .triton_support import KernelSpec, check_some, check_tensor, jit, next_power_of_2, tl

_BLOCK = 1024
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def widen_logits_reference(logits: torch.Tensor, places: torch.Tensor, out: torch.Tensor) -> None:
    """The specification of `widen_logits`: every token's logit, and -inf where the drafter does not know it.

    Args:
        logits: float32, float16 or bfloat16 [B, Vd].
        places: int32 [V], the drafter's index of each token of the target, -1 where it has none.
        out: [B, V], like `logits`, written.
    """
    out.copy_(torch.where(places >= 0, logits.index_select(1, places.clamp_min(0)), -torch.inf))


def widening_places(target_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """int32 [V] as `widen_logits` takes it, from the target's id of each token that the drafter knows, int32 [Vd]."""
    places = torch.full((vocab_size,), -1, dtype=torch.int32, device=target_ids.device)
    known = torch.arange(target_ids.shape[0], dtype=torch.int32, device=target_ids.device)
    return places.index_copy_(0, target_ids.long(), known)


@jit(unspecialized=["vocab", "logits_stride"])
def _widen_logits_kernel(logits, places, out, vocab, logits_stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    place = tl.load(places + token, mask=inside, other=-1)
    known = tl.load(logits + row * logits_stride + place, mask=place >= 0, other=-float("inf"))
    tl.store(out + row * vocab + token, known, mask=inside)


def widen_logits_triton(logits: torch.Tensor, places: torch.Tensor, out: torch.Tensor) -> None:
    """The launch for CUDA tensors, or for CPU tensors under the interpreter.

    Raises:
        ValueError: an argument that the kernel could not take.
    """
    device = logits.device
    check_tensor("logits", logits, dtypes=_FLOATS, shape=(None, None), device=device, contiguous=False)
    check_tensor("places", places, dtypes=(torch.int32,), shape=(None,), device=device)
    rows, vocab = logits.shape[0], places.shape[0]
    check_tensor("out", out, dtypes=(logits.dtype,), shape=(rows, vocab), device=device)
    if out.numel():
        check_some("logits", "token", logits.shape[1])
        block = min(_BLOCK, next_power_of_2(vocab))
        _widen_logits_kernel[(rows, -(-vocab // block))](
            logits, places, out, vocab, logits.stride(0), BLOCK=block, num_warps=4
        )


def kernel_specs() -> list[KernelSpec]:
    """In the types that models have."""
    return [
        KernelSpec(
            op="widen_logits",
            variant=kind,
            kernel=_widen_logits_kernel,
            arguments={
                "logits": f"*{kind}",
                "out": f"*{kind}",
                "places": "*i32",
                **dict.fromkeys(["vocab", "logits_stride"], "i32"),
            },
            constants={"BLOCK": _BLOCK},
            num_stages=3,
            shape="4 rows, 32000 of a vocabulary of 128256",
            bytes_moved=4 * 128256 + 4 * (32000 + 128256) * (4 if kind == "fp32" else 2),
            max_registers=64,
        )
        for kind in ("bf16", "fp16", "fp32")
    ]


def _widen_logits_fake(*args: object) -> None:
    return None


widen_logits = define_op(
    "widen_logits(Tensor logits, Tensor places, Tensor(a!) out) -> ()",
    cpu=widen_logits_reference,
    fake=_widen_logits_fake,
    cuda=widen_logits_triton,
)
"""`draftgraph::widen_logits`; see `widen_logits_reference`."""
