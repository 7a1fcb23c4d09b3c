"""Packs what a drafter that reads the target has not seen yet: committed tokens beside the target's hidden states."""

from __future__ import annotations

import torch

from .registration import define_op
from .triton_support import KernelSpec, check_some, check_tensor, jit, row_range, tl


def pack_unseen_reference(
    tokens: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    finished: torch.Tensor,
    slot_of_row: torch.Tensor,
    seen: torch.Tensor,
    start: torch.Tensor,
    masks: int,
    mask_token: int,
    mask_state: int,
    ring: int,
    window_tokens: torch.Tensor,
    window_positions: torch.Tensor,
    window_slots: torch.Tensor,
    window_rows: torch.Tensor,
    cu_tokens: torch.Tensor,
    base: torch.Tensor,
    window_slot_of_row: torch.Tensor,
    states: torch.Tensor,
    queries: torch.Tensor,
) -> None:
    """The specification of `pack_unseen`; reads nothing on the host.

    The drafter pairs the target's hidden state at position j with token j + 1 and keeps the pair at position j. Hidden
    states are known up to `length - 2`. A live row (one that is not finished) gets the pairs from `seen` up to there,
    oldest first, and after them, for drafters that draft in parallel, up to `masks` places for tokens that are not
    known, but no more than the row has room for (`limit - length - 2`). A finished row, and one that has no new pair,
    gets an empty window in the reserved slot. The rest of W is padding: token 0, position 0, the reserved slot, row -1.

    Args:
        tokens: int32 [R1, C].
        length: int32 [R1], at least 1.
        limit: int32 [R1].
        finished: bool [R1].
        slot_of_row: int32 [B].
        seen: int32 [R1], how many pairs the drafter has.
        start: int32 [R1], where the row's first hidden state that was not seen lies among the kept ones; the others
            follow it. Not read where they lie in rings.
        masks: the most masked places of a row; 0 for drafters that draft one token after another.
        mask_token: the token of a masked place.
        mask_state: which of the kept states masked places and padding read.
        ring: the size of the rings in which the states lie, that at position j at `slot * ring + j % ring`; 0: they lie
            one after the other from `start` on.
        window_tokens: int32 [W], written. W must hold all pairs and masks.
        window_positions: int32 [W], written.
        window_slots: int32 [W], written.
        window_rows: int32 [W], written.
        cu_tokens: int32 [B + 1], written.
        base: int32 [B], written: the position of the row's first pair; 0 where it has none.
        window_slot_of_row: int32 [B], written: the row's slot, or the reserved one where its window is empty.
        states: int32 [W], written: which of the kept hidden states each packed token reads.
        queries: int32 [N], N at least `B * (masks + 1)`, written: entry `k * B + b` is where the place is packed from
            which row b's draft k is made: its last pair, and then its masks; 0 where there is none.
    """
    width, num_rows, reserved_slot = window_tokens.shape[0], slot_of_row.shape[0], tokens.shape[0] - 1
    slots = slot_of_row.long()
    pairs = (length[slots] - 1 - seen[slots]).clamp_min(0) * ~finished[slots]
    masked = (limit[slots] - length[slots] - 2).clamp(0, masks) * (pairs > 0)
    first = torch.where(pairs > 0, seen[slots], 0)
    origin = start[slots]
    base.copy_(first)
    cu_tokens[:1] = 0
    cu_tokens[1:] = torch.cumsum(pairs + masked, 0, dtype=torch.int32)
    owner = torch.where(pairs > 0, slot_of_row, reserved_slot)
    window_slot_of_row.copy_(owner)
    queries.zero_()
    draft = torch.arange(masks + 1, dtype=torch.int32, device=tokens.device)[:, None]
    place = torch.where((pairs > 0) & (draft <= masked), cu_tokens[:-1] + pairs - 1 + draft, 0)
    queries[: num_rows * (masks + 1)] = place.flatten()

    packed = torch.arange(width, dtype=torch.int32, device=tokens.device)
    row = torch.searchsorted(cu_tokens[1:], packed, right=True)
    used = row < num_rows
    row = row.clamp_max(num_rows - 1)
    offset = packed - cu_tokens[row]
    known = used & (offset < pairs[row])
    position = torch.where(used, first[row] + offset, 0)
    successor = tokens[slots[row], torch.where(known, position + 1, 0).long()]
    window_tokens.copy_(torch.where(known, successor, torch.where(used, mask_token, 0)))
    window_positions.copy_(position)
    window_slots.copy_(torch.where(used, owner[row], reserved_slot))
    window_rows.copy_(torch.where(used, row, -1))
    place = slot_of_row[row] * ring + position % ring if ring else origin[row] + offset
    states.copy_(torch.where(known, place, mask_state))


def _pack_unseen_cpu(
    tokens: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    finished: torch.Tensor,
    slot_of_row: torch.Tensor,
    seen: torch.Tensor,
    start: torch.Tensor,
    masks: int,
    mask_token: int,
    mask_state: int,
    ring: int,
    window_tokens: torch.Tensor,
    window_positions: torch.Tensor,
    window_slots: torch.Tensor,
    window_rows: torch.Tensor,
    cu_tokens: torch.Tensor,
    base: torch.Tensor,
    window_slot_of_row: torch.Tensor,
    states: torch.Tensor,
    queries: torch.Tensor,
) -> None:
    """At most 16 rows: a plain loop over host values beats a dozen tensor operations of a few elements."""
    token_of, length_of, limit_of = tokens.numpy(), length.numpy(), limit.numpy()
    finished_of, start_of, seen_of = finished.numpy(), start.numpy(), seen.numpy()
    rows = slot_of_row.tolist()
    reserved_slot = tokens.shape[0] - 1
    packed_tokens: list[int] = []
    packed_positions: list[int] = []
    packed_slots: list[int] = []
    packed_rows: list[int] = []
    packed_states: list[int] = []
    ends, bases, owners = [0], [], []
    asked = [0] * queries.shape[0]
    for row, slot in enumerate(rows):
        end, first = int(length_of[slot]) - 1, int(seen_of[slot])
        pairs = 0 if finished_of[slot] else max(end - first, 0)
        masked = 0
        if pairs:
            masked = max(0, min(masks, int(limit_of[slot]) - end - 3))
            packed_tokens += token_of[slot, first + 1 : end + 1].tolist()
            if ring:
                packed_states += [slot * ring + position % ring for position in range(first, end)]
            else:
                packed_states += range(int(start_of[slot]), int(start_of[slot]) + pairs)
            for draft in range(masked + 1):
                asked[draft * len(rows) + row] = ends[-1] + pairs - 1 + draft
        packed_tokens += [mask_token] * masked
        packed_states += [mask_state] * masked
        packed_positions += range(first, first + pairs + masked)
        packed_slots += [slot] * (pairs + masked)
        packed_rows += [row] * (pairs + masked)
        ends.append(ends[-1] + pairs + masked)
        bases.append(first if pairs else 0)
        owners.append(slot if pairs else reserved_slot)
    padding = window_tokens.shape[0] - ends[-1]
    window_tokens.numpy()[:] = packed_tokens + [0] * padding
    window_positions.numpy()[:] = packed_positions + [0] * padding
    window_slots.numpy()[:] = packed_slots + [reserved_slot] * padding
    window_rows.numpy()[:] = packed_rows + [-1] * padding
    states.numpy()[:] = packed_states + [mask_state] * padding
    cu_tokens.numpy()[:] = ends
    base.numpy()[:] = bases
    window_slot_of_row.numpy()[:] = owners
    queries.numpy()[:] = asked


_SIZES = (
    "width",
    "num_queries",
    "context",
    "reserved_slot",
    "mask_token",
    "mask_state",
    "ring",
    "masks",
    "num_rows",
    "num_places",
)
# Tokens of the window at a time.
_CHUNK = 32


@jit(unspecialized=_SIZES)
def _pack_unseen_kernel(  # type: ignore[no-untyped-def]
    tokens,
    length,
    limit,
    finished,
    slot_of_row,
    seen,
    start,
    window_tokens,
    window_positions,
    window_slots,
    window_rows,
    cu_tokens,
    base,
    window_slot_of_row,
    states,
    queries,
    width,
    num_queries,
    context,
    reserved_slot,
    mask_token,
    mask_state,
    ring,
    masks,
    num_rows,
    num_places,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program: what each row has, then what each packed token is."""
    every_row = tl.arange(0, ROWS)
    inside = every_row < num_rows
    slot_of = tl.load(slot_of_row + every_row, mask=inside, other=0)
    length_of = tl.load(length + slot_of, mask=inside, other=1)
    live = inside & (tl.load(finished + slot_of, mask=inside, other=1).to(tl.int32) == 0)
    seen_of = tl.load(seen + slot_of, mask=inside, other=0)
    start_of = tl.load(start + slot_of, mask=inside, other=0)
    pairs = tl.where(live, tl.maximum(length_of - 1 - seen_of, 0), 0)
    room = tl.load(limit + slot_of, mask=inside, other=0) - length_of - 2
    masked = tl.where(pairs > 0, tl.minimum(tl.maximum(room, 0), masks), 0)
    first = tl.where(pairs > 0, seen_of, 0)
    owner = tl.where(pairs > 0, slot_of, reserved_slot)
    size = pairs + masked
    ends = tl.cumsum(size, 0)
    begins = ends - size
    tl.store(cu_tokens, 0)
    tl.store(cu_tokens + 1 + every_row, ends, mask=inside)
    tl.store(base + every_row, first, mask=inside)
    tl.store(window_slot_of_row + every_row, owner, mask=inside)
    for draft in range(masks + 1):
        place = tl.where((pairs > 0) & (draft <= masked), begins + pairs - 1 + draft, 0)
        tl.store(queries + draft * num_rows + every_row, place, mask=inside)

    for block in range(0, num_places, CHUNK):
        at = block + tl.arange(0, CHUNK)
        spare = (at >= num_rows * (masks + 1)) & (at < num_queries)
        tl.store(queries + at, tl.zeros((CHUNK,), tl.int32), mask=spare)
        # The row that each packed token belongs to; a row without tokens has none.
        mine = inside[None, :] & (ends[None, :] > at[:, None]) & (begins[None, :] <= at[:, None])
        used = tl.max(mine.to(tl.int32), 1) > 0
        row = tl.sum(tl.where(mine, every_row[None, :], 0), 1)
        slot = tl.sum(tl.where(mine, slot_of[None, :], 0), 1)
        offset = tl.where(used, at - tl.sum(tl.where(mine, begins[None, :], 0), 1), 0)
        position = tl.sum(tl.where(mine, first[None, :], 0), 1) + offset
        known = used & (offset < tl.sum(tl.where(mine, pairs[None, :], 0), 1))
        origin = tl.sum(tl.where(mine, start_of[None, :], 0), 1)
        token = tl.load(tokens + slot.to(tl.int64) * context + position + 1, mask=known, other=0)
        token = tl.where(known, token, tl.where(used, mask_token, 0))
        written = at < width
        tl.store(window_tokens + at, token, mask=written)
        tl.store(window_positions + at, position, mask=written)
        tl.store(window_slots + at, tl.where(used, slot, reserved_slot), mask=written)
        tl.store(window_rows + at, tl.where(used, row, -1), mask=written)
        place = origin + offset
        if ring > 0:
            place = slot * ring + position % ring
        tl.store(states + at, tl.where(known, place, mask_state), mask=written)


def pack_unseen_triton(
    tokens: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    finished: torch.Tensor,
    slot_of_row: torch.Tensor,
    seen: torch.Tensor,
    start: torch.Tensor,
    masks: int,
    mask_token: int,
    mask_state: int,
    ring: int,
    window_tokens: torch.Tensor,
    window_positions: torch.Tensor,
    window_slots: torch.Tensor,
    window_rows: torch.Tensor,
    cu_tokens: torch.Tensor,
    base: torch.Tensor,
    window_slot_of_row: torch.Tensor,
    states: torch.Tensor,
    queries: torch.Tensor,
) -> None:
    """The launch for CUDA tensors, or for CPU tensors under the interpreter.

    Raises:
        ValueError: an argument that the kernel could not take.
    """
    device, int32 = tokens.device, (torch.int32,)
    check_tensor("tokens", tokens, dtypes=int32, shape=(None, None), device=device)
    slots, context = tokens.shape
    check_some("tokens", "slot", slots)
    check_some("tokens", "position", context)
    check_tensor("finished", finished, dtypes=(torch.bool,), shape=(slots,), device=device)
    for name, of_slot in (("length", length), ("limit", limit), ("start", start), ("seen", seen)):
        check_tensor(name, of_slot, dtypes=int32, shape=(slots,), device=device)
    check_tensor("slot_of_row", slot_of_row, dtypes=int32, shape=(None,), device=device)
    rows = slot_of_row.shape[0]
    check_some("slot_of_row", "row", rows)
    check_tensor("window_tokens", window_tokens, dtypes=int32, shape=(None,), device=device)
    width = window_tokens.shape[0]
    for name, of_token in (
        ("window_positions", window_positions),
        ("window_slots", window_slots),
        ("window_rows", window_rows),
        ("states", states),
    ):
        check_tensor(name, of_token, dtypes=int32, shape=(width,), device=device)
    check_tensor("cu_tokens", cu_tokens, dtypes=int32, shape=(rows + 1,), device=device)
    check_tensor("base", base, dtypes=int32, shape=(rows,), device=device)
    check_tensor("window_slot_of_row", window_slot_of_row, dtypes=int32, shape=(rows,), device=device)
    check_tensor("queries", queries, dtypes=int32, shape=(None,), device=device)
    if masks < 0:
        raise ValueError(f"masks is {masks}; accepted: 0 or more")
    if ring < 0:
        raise ValueError(f"ring is {ring}; accepted: 0 for none, or more")
    if queries.shape[0] < rows * (masks + 1):
        raise ValueError(f"queries has {queries.shape[0]} entries; accepted: at least {rows * (masks + 1)}")
    _pack_unseen_kernel[(1,)](
        tokens,
        length,
        limit,
        finished,
        slot_of_row,
        seen,
        start,
        window_tokens,
        window_positions,
        window_slots,
        window_rows,
        cu_tokens,
        base,
        window_slot_of_row,
        states,
        queries,
        width,
        queries.shape[0],
        context,
        slots - 1,
        mask_token,
        mask_state,
        ring,
        masks,
        rows,
        max(width, queries.shape[0]),
        ROWS=row_range(rows),
        CHUNK=_CHUNK,
        num_warps=1,
    )


def kernel_specs() -> list[KernelSpec]:
    """One row and several."""
    names = ["tokens", "length", "limit", "slot_of_row", "start", "seen"]
    names += ["window_tokens", "window_positions", "window_slots", "window_rows"]
    names += ["cu_tokens", "base", "window_slot_of_row", "states", "queries"]
    return [
        KernelSpec(
            op="pack_unseen",
            variant=f"{rows} row{'s' if rows > 1 else ''}",
            kernel=_pack_unseen_kernel,
            arguments={
                **dict.fromkeys(names, "*i32"),
                **dict.fromkeys(_SIZES, "i32"),
                "finished": "*i1",
            },
            constants={
                "ROWS": row_range(rows),
                "CHUNK": _CHUNK,
            },
            num_warps=1,
            num_stages=3,
            shape=f"{width} tokens of {rows} row{'s' if rows > 1 else ''}",
            bytes_moved=24 * width + 32 * rows,
        )
        for rows, width in ((1, 8), (16, 256))
    ]


def _pack_unseen_fake(*args: object) -> None:
    return None


pack_unseen = define_op(
    "pack_unseen(Tensor tokens, Tensor length, Tensor limit, Tensor finished, Tensor slot_of_row, Tensor seen, "
    "Tensor start, int masks, int mask_token, int mask_state, int ring, Tensor(a!) window_tokens, "
    "Tensor(b!) window_positions, Tensor(c!) window_slots, Tensor(d!) window_rows, Tensor(e!) cu_tokens, "
    "Tensor(f!) base, Tensor(g!) window_slot_of_row, Tensor(h!) states, Tensor(i!) queries) -> ()",
    cpu=_pack_unseen_cpu,
    fake=_pack_unseen_fake,
    cuda=pack_unseen_triton,
)
"""`draftgraph::pack_unseen`; see `pack_unseen_reference`."""
