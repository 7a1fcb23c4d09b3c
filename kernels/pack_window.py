"""Packs the rows' windows, or one chunk of a prompt, into the token positions of one forward."""

from __future__ import annotations

import torch

from .registration import define_op


def pack_window_reference(
    tokens: torch.Tensor,
    length: torch.Tensor,
    draft_tokens: torch.Tensor,
    cu_tokens: torch.Tensor,
    slot_of_row: torch.Tensor,
    window_tokens: torch.Tensor,
    window_positions: torch.Tensor,
    window_slots: torch.Tensor,
    window_rows: torch.Tensor,
) -> None:
    """The specification of `pack_window`; reads nothing on the host.

    Token 0 of a row's window is its anchor, `tokens[slot, length - 1]`, and token j is
    `draft_tokens[slot, j - 1]`; token j stands at position `length - 1 + j`. A draft of -1 (no draft) is
    packed as token 0: accept never takes it for a proposal. Positions past `cu_tokens[B]` are padding:
    token 0, position 0, the reserved slot, row -1.

    Args:
        tokens: int32 [R1, C].
        length: int32 [R1].
        draft_tokens: int32 [R1, K].
        cu_tokens: int32 [B + 1].
        slot_of_row: int32 [B].
        window_tokens: int32 [W], written.
        window_positions: int32 [W], written.
        window_slots: int32 [W], written.
        window_rows: int32 [W], written.
    """
    width, num_rows, num_drafts = window_tokens.shape[0], slot_of_row.shape[0], draft_tokens.shape[1]
    reserved_slot = tokens.shape[0] - 1
    packed = torch.arange(width, dtype=torch.int32, device=tokens.device)
    row = torch.searchsorted(cu_tokens[1:], packed, right=True)
    used = row < num_rows
    row = row.clamp_max(num_rows - 1)
    slot = slot_of_row[row].long()
    offset = packed - cu_tokens[row]
    anchor = length[slot].long() - 1
    token = tokens[slot, anchor]
    if num_drafts > 0:
        draft = draft_tokens[slot, (offset.long() - 1).clamp(0, num_drafts - 1)].clamp_min(0)
        token = torch.where(offset > 0, draft, token)
    window_tokens.copy_(torch.where(used, token, 0))
    window_positions.copy_(torch.where(used, anchor + offset, 0))
    window_slots.copy_(torch.where(used, slot, reserved_slot))
    window_rows.copy_(torch.where(used, row, -1))


def _pack_window_cpu(
    tokens: torch.Tensor,
    length: torch.Tensor,
    draft_tokens: torch.Tensor,
    cu_tokens: torch.Tensor,
    slot_of_row: torch.Tensor,
    window_tokens: torch.Tensor,
    window_positions: torch.Tensor,
    window_slots: torch.Tensor,
    window_rows: torch.Tensor,
) -> None:
    ends = cu_tokens.tolist()
    tokens_of_slot, length_of_slot, drafts_of_slot = tokens.numpy(), length.numpy(), draft_tokens.numpy()
    packed_tokens: list[int] = []
    packed_positions: list[int] = []
    packed_slots: list[int] = []
    packed_rows: list[int] = []
    for row, slot in enumerate(slot_of_row.tolist()):
        count = ends[row + 1] - ends[row]
        if count == 0:
            continue
        anchor = int(length_of_slot[slot]) - 1
        packed_tokens.append(int(tokens_of_slot[slot, anchor]))
        packed_tokens.extend(max(draft, 0) for draft in drafts_of_slot[slot, : count - 1].tolist())
        packed_positions.extend(range(anchor, anchor + count))
        packed_slots.extend([slot] * count)
        packed_rows.extend([row] * count)
    padding = window_tokens.shape[0] - ends[-1]
    window_tokens.numpy()[:] = packed_tokens + [0] * padding
    window_positions.numpy()[:] = packed_positions + [0] * padding
    window_slots.numpy()[:] = packed_slots + [tokens.shape[0] - 1] * padding
    window_rows.numpy()[:] = packed_rows + [-1] * padding


def pack_prefill_reference(
    tokens: torch.Tensor,
    prefill_slot: torch.Tensor,
    prefill_range: torch.Tensor,
    window_tokens: torch.Tensor,
    window_positions: torch.Tensor,
    window_slots: torch.Tensor,
    window_rows: torch.Tensor,
    cu_tokens: torch.Tensor,
    base: torch.Tensor,
    slot_of_row: torch.Tensor,
) -> None:
    """The specification of `pack_prefill`: one chunk of one prompt as a window; reads nothing on the host.

    Args:
        tokens: int32 [R1, C].
        prefill_slot: int32 [1].
        prefill_range: int32 [2]: first position of the chunk, and its token count, at most W.
        window_tokens: int32 [W], written.
        window_positions: int32 [W], written.
        window_slots: int32 [W], written.
        window_rows: int32 [W], written: 0, and -1 in padding.
        cu_tokens: int32 [2], written: 0 and the token count.
        base: int32 [1], written: the first position.
        slot_of_row: int32 [1], written: the slot.
    """
    width, context, reserved_slot = window_tokens.shape[0], tokens.shape[1], tokens.shape[0] - 1
    start, count = prefill_range[:1], prefill_range[1:]
    packed = torch.arange(width, dtype=torch.int32, device=tokens.device)
    used = packed < count
    position = start + packed
    row_tokens = tokens.index_select(0, prefill_slot)[0]
    token = row_tokens.index_select(0, position.clamp(0, context - 1))
    window_tokens.copy_(torch.where(used, token, 0))
    window_positions.copy_(torch.where(used, position, 0))
    window_slots.copy_(torch.where(used, prefill_slot, reserved_slot))
    window_rows.copy_(torch.where(used, 0, -1))
    cu_tokens[:1] = 0
    cu_tokens[1:] = count
    base.copy_(start)
    slot_of_row.copy_(prefill_slot)


def _pack_prefill_cpu(
    tokens: torch.Tensor,
    prefill_slot: torch.Tensor,
    prefill_range: torch.Tensor,
    window_tokens: torch.Tensor,
    window_positions: torch.Tensor,
    window_slots: torch.Tensor,
    window_rows: torch.Tensor,
    cu_tokens: torch.Tensor,
    base: torch.Tensor,
    slot_of_row: torch.Tensor,
) -> None:
    (slot,) = prefill_slot.tolist()
    start, count = prefill_range.tolist()
    for output, content, padding in (
        (window_tokens, tokens[slot, start : start + count], 0),
        (window_positions, torch.arange(start, start + count, dtype=torch.int32), 0),
        (window_slots, slot, tokens.shape[0] - 1),
        (window_rows, 0, -1),
    ):
        output[:count] = content
        output[count:] = padding
    cu_tokens.numpy()[:] = (0, count)
    base.copy_(prefill_range[:1])
    slot_of_row.copy_(prefill_slot)


def _writes_only(*args: torch.Tensor) -> None:
    return None


_WINDOW_SCHEMA = (
    "Tensor(a!) window_tokens, Tensor(b!) window_positions, Tensor(c!) window_slots, Tensor(d!) window_rows"
)

pack_window = define_op(
    "pack_window(Tensor tokens, Tensor length, Tensor draft_tokens, Tensor cu_tokens, Tensor slot_of_row, "
    f"{_WINDOW_SCHEMA}) -> ()",
    cpu=_pack_window_cpu,
    fake=_writes_only,
)
"""`draftgraph::pack_window`; see `pack_window_reference`."""

pack_prefill = define_op(
    f"pack_prefill(Tensor tokens, Tensor prefill_slot, Tensor prefill_range, {_WINDOW_SCHEMA}, "
    "Tensor(e!) cu_tokens, Tensor(f!) base, Tensor(g!) slot_of_row) -> ()",
    cpu=_pack_prefill_cpu,
    fake=_writes_only,
)
"""`draftgraph::pack_prefill`; see `pack_prefill_reference`."""
