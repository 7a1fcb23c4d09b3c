"""Decides how many drafts every row verifies, and from that the packed windows and the verify width."""

from __future__ import annotations

import torch

from .registration import define_op


def plan_window_reference(
    finished: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    draft_count: torch.Tensor,
    draft_limit: torch.Tensor,
    slot_of_row: torch.Tensor,
    widths: torch.Tensor,
    cu_tokens: torch.Tensor,
    base: torch.Tensor,
    width_index: torch.Tensor,
) -> None:
    """The specification of `plan_window`; reads nothing on the host.

    A live row (one that is not finished) verifies at least 0 and at most
    `min(draft_count, draft_limit[live rows], limit - length - 1)` drafts: one beyond its limit could not be
    emitted, since a round emits one token more than it accepts. Its window is its anchor and these drafts.
    A finished row has an empty window.

    Args:
        finished: bool [R1].
        length: int32 [R1], committed tokens, at least 1.
        limit: int32 [R1].
        draft_count: int32 [R1], the drafts that the speculator made; overwritten with those that are verified
            (0 for finished rows).
        draft_limit: int32 [at least B + 1], the most drafts per row by the number of live rows.
        slot_of_row: int32 [B].
        widths: int32 [n], ascending verify widths; the last must hold all the windows.
        cu_tokens: int32 [B + 1], written.
        base: int32 [B], written: `length - 1`.
        width_index: int32 [1], written: the first of `widths` that holds all the windows.
    """
    slots = slot_of_row.long()
    live = ~finished[slots]
    length_of_row = length[slots]
    most = draft_limit.index_select(0, live.sum().reshape(1))
    drafts = torch.minimum(torch.minimum(draft_count[slots], most), limit[slots] - length_of_row - 1)
    drafts = drafts.clamp_min(0) * live
    draft_count[slots] = drafts
    base.copy_(length_of_row - 1)
    cu_tokens[:1] = 0
    cu_tokens[1:] = torch.cumsum(drafts + live, 0, dtype=torch.int32)
    width_index.copy_((widths < cu_tokens[-1:]).sum(0, keepdim=True))


def _plan_window_cpu(
    finished: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    draft_count: torch.Tensor,
    draft_limit: torch.Tensor,
    slot_of_row: torch.Tensor,
    widths: torch.Tensor,
    cu_tokens: torch.Tensor,
    base: torch.Tensor,
    width_index: torch.Tensor,
) -> None:
    """At most 16 rows: a plain loop over host values beats a dozen tensor operations of a few elements."""
    slots = slot_of_row.tolist()
    finished_of_slot, length_of_slot = finished.numpy(), length.numpy()
    limit_of_slot, count_of_slot = limit.numpy(), draft_count.numpy()
    live = [not finished_of_slot[slot] for slot in slots]
    most = int(draft_limit[sum(live)])
    ends, bases = [0], []
    for slot, is_live in zip(slots, live, strict=True):
        row_length = int(length_of_slot[slot])
        drafts = 0
        if is_live:
            drafts = max(0, min(int(count_of_slot[slot]), most, int(limit_of_slot[slot]) - row_length - 1))
        count_of_slot[slot] = drafts
        bases.append(row_length - 1)
        ends.append(ends[-1] + drafts + is_live)
    cu_tokens.numpy()[:] = ends
    base.numpy()[:] = bases
    width_index.numpy()[0] = sum(width < ends[-1] for width in widths.tolist())


def _plan_window_fake(*args: torch.Tensor) -> None:
    return None


plan_window = define_op(
    "plan_window(Tensor finished, Tensor length, Tensor limit, Tensor(a!) draft_count, Tensor draft_limit, "
    "Tensor slot_of_row, Tensor widths, Tensor(b!) cu_tokens, Tensor(c!) base, Tensor(d!) width_index) -> ()",
    cpu=_plan_window_cpu,
    fake=_plan_window_fake,
)
"""`draftgraph::plan_window`; see `plan_window_reference`."""
