"""Takes one drafted token of every row down, and makes it the window from which the next one is drafted."""

from __future__ import annotations

import torch

from .registration import define_op
from .triton_support import KernelSpec, check_some, check_tensor, jit, short_range, tl
from .vocabulary import map_draft_to_target_ids


def advance_draft_reference(
    chosen: torch.Tensor,
    chosen_confidence: torch.Tensor,
    failed: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    finished: torch.Tensor,
    slot_of_row: torch.Tensor,
    target_ids: torch.Tensor | None,
    step: int,
    shift: int,
    margin: int,
    draft_tokens: torch.Tensor,
    confidence: torch.Tensor,
    draft_count: torch.Tensor,
    window_tokens: torch.Tensor,
    window_positions: torch.Tensor,
    window_slots: torch.Tensor,
    window_rows: torch.Tensor,
    base: torch.Tensor,
    window_slot_of_row: torch.Tensor,
) -> None:
    """The specification of `advance_draft`; reads nothing on the host.

    A live row has room for `limit - length - 1` drafts, since one more could not be emitted, and `margin` besides.
    Where it has room for draft `step`, that is `chosen`, and -1 (no proposal) where the logits failed or the target has
    no such token. Where it has room for another, `chosen` is the next window: one token at position `length + shift`,
    or 0 if that is negative. All other rows get the window of padding, token 0 at position 0 of the reserved slot, so
    row b is always window token b.

    Args:
        chosen: int32 [N], N at least B; row b's is at b. With `target_ids` in the drafter's ids, from 0 to V - 1;
            without, in the target's, which the drafter then reads too (`draft_argmax` may have named them so), and a
            negative one is no proposal.
        chosen_confidence: float32 [N].
        failed: bool [N].
        length: int32 [R1].
        limit: int32 [R1].
        finished: bool [R1].
        slot_of_row: int32 [B].
        target_ids: int32 [V], at least one, the target's id of each token of the drafter, -1 where it has none; None
            where `chosen` is in the target's ids already.
        step: which draft of the row, 0 to K - 1.
        shift: where the drafter keeps draft `step`, counted from `length`: `step` for a language model, `step - 1` for
            a head that pairs a hidden state with the token after it, -2 for one whose drafts all stand where its last
            pair did.
        margin: drafts that are made past the row's room, 0 for most drafters.
        draft_tokens: int32 [R1, K], column `step` is written, in the target's ids.
        confidence: float32 [R1, K], column `step` is written; 0 where there is no draft.
        draft_count: int32 [R1], written: the row's drafts so far, at most its room; 0 for finished rows.
        window_tokens: int32 [N], written, in the ids that `chosen` is in.
        window_positions: int32 [N], written.
        window_slots: int32 [N], written.
        window_rows: int32 [N], written: -1 past B.
        base: int32 [B], written: the position of the row's token.
        window_slot_of_row: int32 [B], written: the row's slot, the reserved one where there is no next draft.
    """
    num_rows, reserved_slot = slot_of_row.shape[0], length.shape[0] - 1
    slots = slot_of_row.long()
    room = (limit[slots] + margin - length[slots] - 1).clamp_min(0) * ~finished[slots]
    token, bad = chosen[:num_rows], failed[:num_rows]
    drafted = token if target_ids is None else map_draft_to_target_ids(token, target_ids)
    proposes = (room > step) & ~bad & (drafted >= 0)
    draft_tokens[slots, step] = torch.where(proposes, drafted, -1)
    confidence[slots, step] = torch.where(proposes, chosen_confidence[:num_rows], 0.0)
    draft_count[slots] = room.clamp_max(step + 1)

    goes_on = room > step + 1
    position = torch.where(goes_on, (length[slots] + shift).clamp_min(0), 0)
    slot = torch.where(goes_on, slot_of_row, reserved_slot)
    row = torch.arange(num_rows, dtype=torch.int32, device=chosen.device)
    for output, content, padding in (
        (window_tokens, torch.where(goes_on, token, 0), 0),
        (window_positions, position, 0),
        (window_slots, slot, reserved_slot),
        (window_rows, row, -1),
    ):
        output[:num_rows] = content
        output[num_rows:] = padding
    base.copy_(position)
    window_slot_of_row.copy_(slot)


def _advance_draft_cpu(
    chosen: torch.Tensor,
    chosen_confidence: torch.Tensor,
    failed: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    finished: torch.Tensor,
    slot_of_row: torch.Tensor,
    target_ids: torch.Tensor | None,
    step: int,
    shift: int,
    margin: int,
    draft_tokens: torch.Tensor,
    confidence: torch.Tensor,
    draft_count: torch.Tensor,
    window_tokens: torch.Tensor,
    window_positions: torch.Tensor,
    window_slots: torch.Tensor,
    window_rows: torch.Tensor,
    base: torch.Tensor,
    window_slot_of_row: torch.Tensor,
) -> None:
    """At most 16 rows: a plain loop over host values beats a dozen tensor operations of a few elements."""
    length_of, limit_of, finished_of = length.numpy(), limit.numpy(), finished.numpy()
    drafts_of, confidence_of, count_of = draft_tokens.numpy(), confidence.numpy(), draft_count.numpy()
    reserved_slot = length.shape[0] - 1
    slots = slot_of_row.tolist()
    tokens, positions, owners = [], [], []
    for slot, token, sure, bad in zip(
        slots, chosen.tolist(), chosen_confidence.tolist(), failed.tolist(), strict=False
    ):
        row_length = int(length_of[slot])
        room = 0 if finished_of[slot] else max(0, int(limit_of[slot]) + margin - row_length - 1)
        drafted = token if target_ids is None else int(target_ids[token])
        proposes = room > step and not bad and drafted >= 0
        drafts_of[slot, step] = drafted if proposes else -1
        confidence_of[slot, step] = sure if proposes else 0.0
        count_of[slot] = min(room, step + 1)
        goes_on = room > step + 1
        tokens.append(token if goes_on else 0)
        positions.append(max(row_length + shift, 0) if goes_on else 0)
        owners.append(slot if goes_on else reserved_slot)
    padding = window_tokens.shape[0] - len(slots)
    window_tokens.numpy()[:] = tokens + [0] * padding
    window_positions.numpy()[:] = positions + [0] * padding
    window_slots.numpy()[:] = owners + [reserved_slot] * padding
    window_rows.numpy()[:] = [*range(len(slots)), *[-1] * padding]
    base.numpy()[:] = positions
    window_slot_of_row.numpy()[:] = owners


@jit(unspecialized=["width", "reserved_slot", "step", "shift", "margin", "num_rows", "num_drafts"])
def _advance_draft_kernel(  # type: ignore[no-untyped-def]
    chosen,
    chosen_confidence,
    failed,
    length,
    limit,
    finished,
    slot_of_row,
    target_ids,
    draft_tokens,
    confidence,
    draft_count,
    window_tokens,
    window_positions,
    window_slots,
    window_rows,
    base,
    window_slot_of_row,
    width,
    reserved_slot,
    step,
    shift,
    margin,
    num_rows,
    num_drafts,
    BLOCK: tl.constexpr,
):
    row = tl.arange(0, BLOCK)
    inside = row < num_rows
    slot = tl.load(slot_of_row + row, mask=inside, other=0)
    live = inside & (tl.load(finished + slot, mask=inside, other=1).to(tl.int32) == 0)
    row_length = tl.load(length + slot, mask=inside, other=0)
    row_limit = tl.load(limit + slot, mask=inside, other=0) + margin
    room = tl.where(live, tl.maximum(row_limit - row_length - 1, 0), 0)
    token = tl.load(chosen + row, mask=inside, other=0)
    good = tl.load(failed + row, mask=inside, other=1).to(tl.int32) == 0
    drafted = token if target_ids is None else tl.load(target_ids + token, mask=inside, other=-1)
    proposes = (room > step) & good & (drafted >= 0)
    # Rows that share a slot, the padding ones, are finished and all write the same.
    place = slot.to(tl.int64) * num_drafts + step
    sure = tl.load(chosen_confidence + row, mask=inside, other=0.0)
    tl.store(draft_tokens + place, tl.where(proposes, drafted, -1), mask=inside)
    tl.store(confidence + place, tl.where(proposes, sure, 0.0), mask=inside)
    tl.store(draft_count + slot, tl.minimum(room, step + 1), mask=inside)

    goes_on = room > step + 1
    position = tl.where(goes_on, tl.maximum(row_length + shift, 0), 0)
    owner = tl.where(goes_on, slot, reserved_slot)
    written = row < width
    tl.store(window_tokens + row, tl.where(goes_on, token, 0), mask=written)
    tl.store(window_positions + row, position, mask=written)
    tl.store(window_slots + row, owner, mask=written)
    tl.store(window_rows + row, tl.where(inside, row, -1), mask=written)
    tl.store(base + row, position, mask=inside)
    tl.store(window_slot_of_row + row, owner, mask=inside)


def advance_draft_triton(
    chosen: torch.Tensor,
    chosen_confidence: torch.Tensor,
    failed: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    finished: torch.Tensor,
    slot_of_row: torch.Tensor,
    target_ids: torch.Tensor | None,
    step: int,
    shift: int,
    margin: int,
    draft_tokens: torch.Tensor,
    confidence: torch.Tensor,
    draft_count: torch.Tensor,
    window_tokens: torch.Tensor,
    window_positions: torch.Tensor,
    window_slots: torch.Tensor,
    window_rows: torch.Tensor,
    base: torch.Tensor,
    window_slot_of_row: torch.Tensor,
) -> None:
    """The launch for CUDA tensors, or for CPU tensors under the interpreter.

    Raises:
        ValueError: an argument that the kernel could not take.
    """
    device, int32, flag, single = chosen.device, (torch.int32,), (torch.bool,), (torch.float32,)
    check_tensor("chosen", chosen, dtypes=int32, shape=(None,), device=device)
    width = chosen.shape[0]
    check_tensor("chosen_confidence", chosen_confidence, dtypes=single, shape=(width,), device=device)
    check_tensor("failed", failed, dtypes=flag, shape=(width,), device=device)
    check_tensor("length", length, dtypes=int32, shape=(None,), device=device)
    slots = length.shape[0]
    check_some("length", "slot", slots)
    check_tensor("limit", limit, dtypes=int32, shape=(slots,), device=device)
    check_tensor("finished", finished, dtypes=flag, shape=(slots,), device=device)
    check_tensor("slot_of_row", slot_of_row, dtypes=int32, shape=(None,), device=device)
    rows = slot_of_row.shape[0]
    if target_ids is not None:
        check_tensor("target_ids", target_ids, dtypes=int32, shape=(None,), device=device)
        check_some("target_ids", "token", target_ids.shape[0])
    check_tensor("draft_tokens", draft_tokens, dtypes=int32, shape=(slots, None), device=device)
    num_drafts = draft_tokens.shape[1]
    check_some("draft_tokens", "draft", num_drafts)
    check_tensor("confidence", confidence, dtypes=single, shape=(slots, num_drafts), device=device)
    check_tensor("draft_count", draft_count, dtypes=int32, shape=(slots,), device=device)
    window = (window_tokens, window_positions, window_slots, window_rows)
    for name, of_token in zip(
        ("window_tokens", "window_positions", "window_slots", "window_rows"), window, strict=True
    ):
        check_tensor(name, of_token, dtypes=int32, shape=(width,), device=device)
    check_tensor("base", base, dtypes=int32, shape=(rows,), device=device)
    check_tensor("window_slot_of_row", window_slot_of_row, dtypes=int32, shape=(rows,), device=device)
    if rows > width:
        raise ValueError(f"slot_of_row has {rows} rows; accepted: at most {width}, the tokens of the window")
    if margin < 0:
        raise ValueError(f"margin is {margin}; accepted: 0 or more")
    if not 0 <= step < num_drafts:
        raise ValueError(f"step is {step}; accepted: 0 to {num_drafts - 1}")
    _advance_draft_kernel[(1,)](
        chosen,
        chosen_confidence,
        failed,
        length,
        limit,
        finished,
        slot_of_row,
        target_ids,
        draft_tokens,
        confidence,
        draft_count,
        *window,
        base,
        window_slot_of_row,
        width,
        slots - 1,
        step,
        shift,
        margin,
        num_rows=rows,
        num_drafts=num_drafts,
        BLOCK=short_range(width),
        num_warps=1,
    )


def kernel_specs() -> list[KernelSpec]:
    """One kernel for all buckets, and one for another vocabulary; the first at two shapes."""
    window = ["window_tokens", "window_positions", "window_slots", "window_rows", "base", "window_slot_of_row"]
    names = ["chosen", "length", "limit", "slot_of_row", "draft_tokens", "draft_count", *window]
    return [
        KernelSpec(
            op="advance_draft",
            variant=f"{rows} row{'s' if rows > 1 else ''}{', mapped' if mapped else ''}",
            kernel=_advance_draft_kernel,
            arguments={
                **dict.fromkeys(names, "*i32"),
                **dict.fromkeys(["chosen_confidence", "confidence"], "*fp32"),
                **dict.fromkeys(["failed", "finished"], "*i1"),
                **dict.fromkeys(["width", "reserved_slot", "step", "shift", "margin", "num_rows", "num_drafts"], "i32"),
                **({"target_ids": "*i32"} if mapped else {}),
            },
            constants={
                **({} if mapped else {"target_ids": None}),
                "BLOCK": short_range(width),
            },
            num_warps=1,
            num_stages=3,
            shape=f"{rows} row{'s' if rows > 1 else ''}",
            bytes_moved=16 * width + (46 if mapped else 42) * rows,
            max_registers=64,
        )
        for rows, width, mapped in ((1, 4, False), (16, 16, False), (16, 16, True))
    ]


def _advance_draft_fake(*args: object) -> None:
    return None


advance_draft = define_op(
    "advance_draft(Tensor chosen, Tensor chosen_confidence, Tensor failed, Tensor length, Tensor limit, "
    "Tensor finished, Tensor slot_of_row, Tensor? target_ids, int step, int shift, int margin, "
    "Tensor(a!) draft_tokens, Tensor(b!) confidence, Tensor(c!) draft_count, Tensor(d!) window_tokens, "
    "Tensor(e!) window_positions, Tensor(f!) window_slots, Tensor(g!) window_rows, Tensor(h!) base, "
    "Tensor(i!) window_slot_of_row) -> ()",
    cpu=_advance_draft_cpu,
    fake=_advance_draft_fake,
    cuda=advance_draft_triton,
)
"""`draftgraph::advance_draft`; see `advance_draft_reference`."""
