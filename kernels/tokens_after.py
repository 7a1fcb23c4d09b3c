"""Looks up the token that follows each position of a window, at a distance."""

from __future__ import annotations

import torch

from .registration import define_op
from .triton_support import KernelSpec, check_some, check_tensor, jit, tl

_BLOCK = 128


def tokens_after_reference(
    tokens: torch.Tensor,
    length: torch.Tensor,
    draft_tokens: torch.Tensor | None,
    slots: torch.Tensor,
    positions: torch.Tensor,
    distance: int,
    out: torch.Tensor,
) -> None:
    """The specification of `tokens_after`; reads nothing on the host.

    Past the committed tokens these are the drafts of this round, and what is no proposal (-1) has token 0. Past the
    last of either the last one counts, which nobody needs.

    Args:
        tokens: int32 [R1, C].
        length: int32 [R1], not read without drafts.
        draft_tokens: int32 [R1, K]; None: all that is looked up lies in `tokens`, as in a prompt.
        slots: int32 [W].
        positions: int32 [W].
        distance: how far after its position a token lies, from 0 to 2**31 - 1 - C.
        out: int32 [W], written.
    """
    context, index = tokens.shape[1], positions + distance
    committed = tokens.flatten().index_select(0, slots * context + index.clamp_max(context - 1))
    if draft_tokens is None:
        out.copy_(committed)
        return
    drafts, ahead = draft_tokens.shape[1], index - length.index_select(0, slots)
    drafted = draft_tokens.flatten().index_select(0, slots * drafts + ahead.clamp(0, drafts - 1))
    out.copy_(torch.where(ahead < 0, committed, drafted.clamp_min(0)))


@jit(unspecialized=["width", "context", "num_drafts", "distance"])
def _tokens_after_kernel(  # type: ignore[no-untyped-def]
    tokens,
    length,
    draft_tokens,
    slots,
    positions,
    out,
    width,
    context,
    num_drafts,
    distance,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    slot = tl.load(slots + at, mask=inside, other=0).to(tl.int64)
    index = tl.load(positions + at, mask=inside, other=0) + distance
    found = tl.load(tokens + slot * context + tl.minimum(index, context - 1), mask=inside, other=0)
    if draft_tokens is not None:
        ahead = index - tl.load(length + slot, mask=inside, other=0)
        place = tl.minimum(tl.maximum(ahead, 0), num_drafts - 1)
        drafted = tl.load(draft_tokens + slot * num_drafts + place, mask=inside, other=0)
        found = tl.where(ahead < 0, found, tl.maximum(drafted, 0))
    tl.store(out + at, found, mask=inside)


def tokens_after_triton(
    tokens: torch.Tensor,
    length: torch.Tensor,
    draft_tokens: torch.Tensor | None,
    slots: torch.Tensor,
    positions: torch.Tensor,
    distance: int,
    out: torch.Tensor,
) -> None:
    """The launch for CUDA tensors, or for CPU tensors under the interpreter.

    Raises:
        ValueError: an argument that the kernel could not take.
    """
    device, int32 = tokens.device, (torch.int32,)
    check_tensor("tokens", tokens, dtypes=int32, shape=(None, None), device=device)
    num_slots, context = tokens.shape
    check_some("tokens", "slot", num_slots)
    check_some("tokens", "position", context)
    check_tensor("length", length, dtypes=int32, shape=(num_slots,), device=device)
    num_drafts = 0
    if draft_tokens is not None:
        check_tensor("draft_tokens", draft_tokens, dtypes=int32, shape=(num_slots, None), device=device)
        num_drafts = draft_tokens.shape[1]
        check_some("draft_tokens", "draft", num_drafts)
    check_tensor("slots", slots, dtypes=int32, shape=(None,), device=device)
    width = slots.shape[0]
    check_tensor("positions", positions, dtypes=int32, shape=(width,), device=device)
    check_tensor("out", out, dtypes=int32, shape=(width,), device=device)
    # So that a position and it make an int32.
    most = torch.iinfo(torch.int32).max - context
    if not 0 <= distance <= most:
        raise ValueError(f"distance is {distance}; accepted: 0 to {most}")
    if width:
        _tokens_after_kernel[(-(-width // _BLOCK),)](
            tokens,
            length,
            draft_tokens,
            slots,
            positions,
            out,
            width,
            context,
            num_drafts,
            distance,
            BLOCK=_BLOCK,
            num_warps=1,
        )


def kernel_specs() -> list[KernelSpec]:
    """In a round and in a prompt."""
    return [
        KernelSpec(
            op="tokens_after",
            variant="with drafts" if drafts else "a chunk",
            kernel=_tokens_after_kernel,
            arguments={
                **dict.fromkeys(["tokens", "length", "slots", "positions", "out"], "*i32"),
                **dict.fromkeys(["width", "context", "num_drafts", "distance"], "i32"),
                **({"draft_tokens": "*i32"} if drafts else {}),
            },
            constants={"BLOCK": _BLOCK, **({} if drafts else {"draft_tokens": None})},
            num_warps=1,
            num_stages=3,
            shape=f"{width} tokens",
            bytes_moved=(24 if drafts else 16) * width,
            max_registers=64,
        )
        for drafts, width in ((True, 8), (False, 256))
    ]


def _tokens_after_fake(*args: object) -> None:
    return None


tokens_after = define_op(
    "tokens_after(Tensor tokens, Tensor length, Tensor? draft_tokens, Tensor slots, Tensor positions, int distance, "
    "Tensor(a!) out) -> ()",
    cpu=tokens_after_reference,
    fake=_tokens_after_fake,
    cuda=tokens_after_triton,
)
"""`draftgraph::tokens_after`; see `tokens_after_reference`."""
