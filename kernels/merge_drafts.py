"""Takes, for every row, the drafts of the first of several drafters that has any."""

from __future__ import annotations

import torch

from .registration import define_op
from .triton_support import KernelSpec, check_some, check_tensor, jit, short_range, tl


def merge_drafts_reference(
    member_tokens: torch.Tensor,
    member_count: torch.Tensor,
    member_confidence: torch.Tensor,
    finished: torch.Tensor,
    slot_of_row: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_count: torch.Tensor,
    confidence: torch.Tensor,
) -> None:
    """The specification of `merge_drafts`; reads nothing on the host.

    A drafter has drafts for a live row (one that is not finished) when its count is positive and its first draft is
    not -1 (no proposal). The first such drafter's tokens, count and confidence become the row's. A row without drafts
    gets count 0, tokens -1 and confidence 0.

    Args:
        member_tokens: int32 [M, R1, K], of drafter m at m.
        member_count: int32 [M, R1].
        member_confidence: float32 [M, R1, K].
        finished: bool [R1].
        slot_of_row: int32 [B].
        draft_tokens: int32 [R1, K], written for the slots of `slot_of_row`.
        draft_count: int32 [R1], likewise.
        confidence: float32 [R1, K], likewise.
    """
    slots = slot_of_row.long()
    tokens, count = member_tokens[:, slots], member_count[:, slots]
    has = (count > 0) & (tokens[:, :, 0] >= 0) & ~finished[slots]
    # The first of the maxima is the first drafter with drafts; it is drafter 0 where none has any.
    first = has.to(torch.int32).argmax(0, keepdim=True)
    some = has.any(0)
    index = first[:, :, None].expand(1, -1, tokens.shape[2])
    draft_tokens[slots] = torch.where(some[:, None], tokens.gather(0, index)[0], -1)
    draft_count[slots] = torch.where(some, count.gather(0, first)[0], 0)
    confidence[slots] = torch.where(some[:, None], member_confidence[:, slots].gather(0, index)[0], 0.0)


def _merge_drafts_cpu(
    member_tokens: torch.Tensor,
    member_count: torch.Tensor,
    member_confidence: torch.Tensor,
    finished: torch.Tensor,
    slot_of_row: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_count: torch.Tensor,
    confidence: torch.Tensor,
) -> None:
    """At most 16 rows: a plain loop over host values beats a dozen tensor operations of a few elements."""
    tokens_of, count_of, confidence_of = member_tokens.numpy(), member_count.numpy(), member_confidence.numpy()
    finished_of = finished.numpy()
    tokens_out, count_out, confidence_out = draft_tokens.numpy(), draft_count.numpy(), confidence.numpy()
    members = range(member_tokens.shape[0])
    for slot in slot_of_row.tolist():
        first = None
        if not finished_of[slot]:
            first = next((m for m in members if count_of[m, slot] > 0 and tokens_of[m, slot, 0] >= 0), None)
        tokens_out[slot] = -1 if first is None else tokens_of[first, slot]
        count_out[slot] = 0 if first is None else count_of[first, slot]
        confidence_out[slot] = 0.0 if first is None else confidence_of[first, slot]


@jit(unspecialized=["num_slots", "num_drafts"])
def _merge_drafts_kernel(  # type: ignore[no-untyped-def]
    member_tokens,
    member_count,
    member_confidence,
    finished,
    slot_of_row,
    draft_tokens,
    draft_count,
    confidence,
    num_slots,
    num_drafts,
    MEMBERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row."""
    slot = tl.load(slot_of_row + tl.program_id(0)).to(tl.int64)
    live = tl.load(finished + slot).to(tl.int32) == 0
    place = tl.arange(0, BLOCK)
    inside = place < num_drafts
    tokens = tl.full((BLOCK,), -1, tl.int32)
    sure = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((), tl.int32)
    # From the last drafter to the first, so that the first one's drafts are what remains.
    for back in tl.static_range(MEMBERS):
        at = (MEMBERS - 1 - back) * num_slots + slot
        its_count = tl.load(member_count + at)
        its_first = tl.load(member_tokens + at * num_drafts)
        has = live & (its_count > 0) & (its_first >= 0)
        tokens = tl.where(has, tl.load(member_tokens + at * num_drafts + place, mask=inside, other=-1), tokens)
        sure = tl.where(has, tl.load(member_confidence + at * num_drafts + place, mask=inside, other=0.0), sure)
        count = tl.where(has, its_count, count)
    tl.store(draft_tokens + slot * num_drafts + place, tokens, mask=inside)
    tl.store(confidence + slot * num_drafts + place, sure, mask=inside)
    tl.store(draft_count + slot, count)


def merge_drafts_triton(
    member_tokens: torch.Tensor,
    member_count: torch.Tensor,
    member_confidence: torch.Tensor,
    finished: torch.Tensor,
    slot_of_row: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_count: torch.Tensor,
    confidence: torch.Tensor,
) -> None:
    """The launch for CUDA tensors, or for CPU tensors under the interpreter.

    Raises:
        ValueError: an argument that the kernel could not take.
    """
    device, int32, single = member_tokens.device, (torch.int32,), (torch.float32,)
    check_tensor("member_tokens", member_tokens, dtypes=int32, shape=(None, None, None), device=device)
    members, slots, drafts = member_tokens.shape
    check_tensor("member_count", member_count, dtypes=int32, shape=(members, slots), device=device)
    check_tensor("member_confidence", member_confidence, dtypes=single, shape=(members, slots, drafts), device=device)
    check_tensor("finished", finished, dtypes=(torch.bool,), shape=(slots,), device=device)
    check_tensor("slot_of_row", slot_of_row, dtypes=int32, shape=(None,), device=device)
    check_tensor("draft_tokens", draft_tokens, dtypes=int32, shape=(slots, drafts), device=device)
    check_tensor("draft_count", draft_count, dtypes=int32, shape=(slots,), device=device)
    check_tensor("confidence", confidence, dtypes=single, shape=(slots, drafts), device=device)
    for what, count in (("drafter", members), ("slot", slots), ("draft", drafts)):
        check_some("member_tokens", what, count)
    _merge_drafts_kernel[(slot_of_row.shape[0],)](
        member_tokens,
        member_count,
        member_confidence,
        finished,
        slot_of_row,
        draft_tokens,
        draft_count,
        confidence,
        slots,
        drafts,
        MEMBERS=members,
        BLOCK=short_range(drafts),
        num_warps=1,
    )


def kernel_specs() -> list[KernelSpec]:
    """Two drafters, and as many as anybody would line up."""
    integers = ["member_tokens", "member_count", "slot_of_row", "draft_tokens", "draft_count"]
    return [
        KernelSpec(
            op="merge_drafts",
            variant=f"{members} drafters",
            kernel=_merge_drafts_kernel,
            arguments={
                **dict.fromkeys(integers, "*i32"),
                **dict.fromkeys(["member_confidence", "confidence"], "*fp32"),
                "finished": "*i1",
                **dict.fromkeys(["num_slots", "num_drafts"], "i32"),
            },
            constants={"MEMBERS": members, "BLOCK": short_range(block)},
            num_warps=1,
            num_stages=3,
            shape=f"4 rows, {block} drafts",
            bytes_moved=4 * (5 + 4 * members + 8 * block * (members + 1) + 4),
        )
        for members, block in ((2, 8), (5, 32))
    ]


def _merge_drafts_fake(*args: object) -> None:
    return None


merge_drafts = define_op(
    "merge_drafts(Tensor member_tokens, Tensor member_count, Tensor member_confidence, Tensor finished, "
    "Tensor slot_of_row, Tensor(a!) draft_tokens, Tensor(b!) draft_count, Tensor(c!) confidence) -> ()",
    cpu=_merge_drafts_cpu,
    fake=_merge_drafts_fake,
    cuda=merge_drafts_triton,
)
"""`draftgraph::merge_drafts`; see `merge_drafts_reference`."""
