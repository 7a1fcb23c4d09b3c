"""Packs the last committed tokens of every row for a drafter with a cache of its own."""

from __future__ import annotations

import torch

from .registration import define_op
from .triton_support import KernelSpec, check_some, check_tensor, jit, row_range, tl


def pack_tail_reference(
    tokens: torch.Tensor,
    length: torch.Tensor,
    finished: torch.Tensor,
    slot_of_row: torch.Tensor,
    draft_ids: torch.Tensor | None,
    tail: int,
    window_tokens: torch.Tensor,
    window_positions: torch.Tensor,
    window_slots: torch.Tensor,
    window_rows: torch.Tensor,
    cu_tokens: torch.Tensor,
    base: torch.Tensor,
    last: torch.Tensor,
) -> None:
    """The specification of `pack_tail`; reads nothing on the host.

    A live row (one that is not finished) gets its last `min(tail, length)` committed tokens, the anchor last. A drafter
    that has seen all but these so catches up on what was committed without it, and writes what it has seen once more,
    unchanged. A finished row's window is empty. The rest of W is padding: token 0, position 0, the reserved slot,
    row -1.

    Args:
        tokens: int32 [R1, C].
        length: int32 [R1], at least 1.
        finished: bool [R1].
        slot_of_row: int32 [B].
        draft_ids: int32 [V], the drafter's id of each token; None where both have the same vocabulary.
        tail: the most tokens of a row, at least 1; `B * tail` must not exceed W.
        window_tokens: int32 [W], written, in the drafter's ids.
        window_positions: int32 [W], written.
        window_slots: int32 [W], written.
        window_rows: int32 [W], written.
        cu_tokens: int32 [B + 1], written.
        base: int32 [B], written: the position of the row's first token.
        last: int32 [N], N at least B, written: where each row's anchor is packed; 0 for finished rows, and past B.
    """
    width, num_rows, reserved_slot = window_tokens.shape[0], slot_of_row.shape[0], tokens.shape[0] - 1
    slots = slot_of_row.long()
    size = length[slots].clamp_max(tail) * ~finished[slots]
    base.copy_(length[slots] - size)
    cu_tokens[:1] = 0
    cu_tokens[1:] = torch.cumsum(size, 0, dtype=torch.int32)
    last.zero_()
    last[:num_rows] = torch.where(size > 0, cu_tokens[1:] - 1, 0)

    packed = torch.arange(width, dtype=torch.int32, device=tokens.device)
    row = torch.searchsorted(cu_tokens[1:], packed, right=True)
    used = row < num_rows
    row = row.clamp_max(num_rows - 1)
    slot = slots[row]
    position = torch.where(used, base[row] + packed - cu_tokens[row], 0)
    token = torch.where(used, tokens[slot, position.long()], 0)
    if draft_ids is not None:
        token = torch.where(used, draft_ids[token.long()], 0)
    window_tokens.copy_(token)
    window_positions.copy_(position)
    window_slots.copy_(torch.where(used, slot, reserved_slot))
    window_rows.copy_(torch.where(used, row, -1))


def _pack_tail_cpu(
    tokens: torch.Tensor,
    length: torch.Tensor,
    finished: torch.Tensor,
    slot_of_row: torch.Tensor,
    draft_ids: torch.Tensor | None,
    tail: int,
    window_tokens: torch.Tensor,
    window_positions: torch.Tensor,
    window_slots: torch.Tensor,
    window_rows: torch.Tensor,
    cu_tokens: torch.Tensor,
    base: torch.Tensor,
    last: torch.Tensor,
) -> None:
    """At most 16 rows: a plain loop over host values beats a dozen tensor operations of a few elements."""
    token_of, length_of, finished_of = tokens.numpy(), length.numpy(), finished.numpy()
    packed_tokens: list[int] = []
    packed_positions: list[int] = []
    packed_slots: list[int] = []
    packed_rows: list[int] = []
    ends, bases, lasts = [0], [], []
    for row, slot in enumerate(slot_of_row.tolist()):
        end = int(length_of[slot])
        begin = end if finished_of[slot] else end - min(end, tail)
        packed_tokens += token_of[slot, begin:end].tolist()
        packed_positions += range(begin, end)
        packed_slots += [slot] * (end - begin)
        packed_rows += [row] * (end - begin)
        bases.append(begin)
        ends.append(len(packed_tokens))
        lasts.append(ends[-1] - 1 if end > begin else 0)
    if draft_ids is not None:
        packed_tokens = draft_ids.numpy()[packed_tokens].tolist()
    padding = window_tokens.shape[0] - ends[-1]
    window_tokens.numpy()[:] = packed_tokens + [0] * padding
    window_positions.numpy()[:] = packed_positions + [0] * padding
    window_slots.numpy()[:] = packed_slots + [tokens.shape[0] - 1] * padding
    window_rows.numpy()[:] = packed_rows + [-1] * padding
    cu_tokens.numpy()[:] = ends
    base.numpy()[:] = bases
    last.numpy()[:] = lasts + [0] * (last.shape[0] - len(lasts))


# Tokens of the window at a time: all of them at once would not fit in registers.
_CHUNK = 32


@jit(unspecialized=["width", "num_last", "context", "reserved_slot", "tail", "num_rows", "num_places"])
def _pack_tail_kernel(  # type: ignore[no-untyped-def]
    tokens,
    length,
    finished,
    slot_of_row,
    draft_ids,
    window_tokens,
    window_positions,
    window_slots,
    window_rows,
    cu_tokens,
    base,
    last,
    width,
    num_last,
    context,
    reserved_slot,
    tail,
    MAPPED: tl.constexpr,
    num_rows,
    num_places,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program: what each row has, then what each packed token is."""
    every_row = tl.arange(0, ROWS)
    inside = every_row < num_rows
    slot_of = tl.load(slot_of_row + every_row, mask=inside, other=0)
    length_of = tl.load(length + slot_of, mask=inside, other=0)
    live = inside & (tl.load(finished + slot_of, mask=inside, other=1).to(tl.int32) == 0)
    size = tl.where(live, tl.minimum(length_of, tail), 0)
    ends = tl.cumsum(size, 0)
    begin_of = length_of - size
    tl.store(cu_tokens, 0)
    tl.store(cu_tokens + 1 + every_row, ends, mask=inside)
    tl.store(base + every_row, begin_of, mask=inside)

    tl.store(last + every_row, tl.where(size > 0, ends - 1, 0), mask=inside)
    for block in range(0, num_places, CHUNK):
        at = block + tl.arange(0, CHUNK)
        tl.store(last + at, tl.zeros((CHUNK,), tl.int32), mask=(at >= num_rows) & (at < num_last))
        # The row that each packed token belongs to; a row without tokens has none.
        mine = inside[None, :] & (ends[None, :] > at[:, None]) & ((ends - size)[None, :] <= at[:, None])
        used = tl.max(mine.to(tl.int32), 1) > 0
        row = tl.sum(tl.where(mine, every_row[None, :], 0), 1)
        slot = tl.sum(tl.where(mine, slot_of[None, :], 0), 1)
        position = tl.sum(tl.where(mine, (begin_of - ends + size)[None, :], 0), 1) + tl.where(used, at, 0)
        token = tl.load(tokens + slot.to(tl.int64) * context + position, mask=used, other=0)
        if MAPPED:
            token = tl.load(draft_ids + token, mask=used, other=0)
        written = at < width
        tl.store(window_tokens + at, token, mask=written)
        tl.store(window_positions + at, position, mask=written)
        tl.store(window_slots + at, tl.where(used, slot, reserved_slot), mask=written)
        tl.store(window_rows + at, tl.where(used, row, -1), mask=written)


def pack_tail_triton(
    tokens: torch.Tensor,
    length: torch.Tensor,
    finished: torch.Tensor,
    slot_of_row: torch.Tensor,
    draft_ids: torch.Tensor | None,
    tail: int,
    window_tokens: torch.Tensor,
    window_positions: torch.Tensor,
    window_slots: torch.Tensor,
    window_rows: torch.Tensor,
    cu_tokens: torch.Tensor,
    base: torch.Tensor,
    last: torch.Tensor,
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
    check_tensor("length", length, dtypes=int32, shape=(slots,), device=device)
    check_tensor("finished", finished, dtypes=(torch.bool,), shape=(slots,), device=device)
    check_tensor("slot_of_row", slot_of_row, dtypes=int32, shape=(None,), device=device)
    rows = slot_of_row.shape[0]
    check_some("slot_of_row", "row", rows)
    if draft_ids is not None:
        check_tensor("draft_ids", draft_ids, dtypes=int32, shape=(None,), device=device)
        check_some("draft_ids", "token", draft_ids.shape[0])
    check_tensor("window_tokens", window_tokens, dtypes=int32, shape=(None,), device=device)
    width = window_tokens.shape[0]
    for name, of_token in (
        ("window_positions", window_positions),
        ("window_slots", window_slots),
        ("window_rows", window_rows),
    ):
        check_tensor(name, of_token, dtypes=int32, shape=(width,), device=device)
    check_tensor("cu_tokens", cu_tokens, dtypes=int32, shape=(rows + 1,), device=device)
    check_tensor("base", base, dtypes=int32, shape=(rows,), device=device)
    check_tensor("last", last, dtypes=int32, shape=(None,), device=device)
    if width < rows:
        raise ValueError(f"window_tokens has {width} entries; accepted: at least {rows}, one per row")
    if tail < 1 or rows * tail > width:
        raise ValueError(f"tail is {tail}; accepted: 1 to {width // rows}, so that {rows} rows fit {width}")
    if last.shape[0] < rows:
        raise ValueError(f"last has {last.shape[0]} entries; accepted: at least {rows}, one per row")
    _pack_tail_kernel[(1,)](
        tokens,
        length,
        finished,
        slot_of_row,
        draft_ids,
        window_tokens,
        window_positions,
        window_slots,
        window_rows,
        cu_tokens,
        base,
        last,
        width,
        last.shape[0],
        context,
        slots - 1,
        tail,
        MAPPED=draft_ids is not None,
        num_rows=rows,
        ROWS=row_range(rows),
        num_places=max(width, last.shape[0]),
        CHUNK=_CHUNK,
        num_warps=1,
    )


def kernel_specs() -> list[KernelSpec]:
    """The smallest bucket and the largest, and the largest with another vocabulary."""
    window = ["window_tokens", "window_positions", "window_slots", "window_rows"]
    pointers = dict.fromkeys(["tokens", "length", "slot_of_row", *window, "cu_tokens", "base", "last"], "*i32")
    scalars = dict.fromkeys(["width", "num_last", "context", "reserved_slot", "tail", "num_rows", "num_places"], "i32")
    return [
        KernelSpec(
            op="pack_tail",
            variant=f"{rows} row{'s' if rows > 1 else ''}{', mapped' if mapped else ''}",
            kernel=_pack_tail_kernel,
            arguments={
                **pointers,
                **scalars,
                "finished": "*i1",
                **({"draft_ids": "*i32"} if mapped else {}),
            },
            constants={
                **({} if mapped else {"draft_ids": None}),
                "MAPPED": mapped,
                "ROWS": row_range(rows),
                "CHUNK": _CHUNK,
            },
            num_warps=1,
            num_stages=3,
            shape=f"2 tokens of each of {rows} row{'s' if rows > 1 else ''}",
            bytes_moved=20 * width + (24 if mapped else 16) * rows,
        )
        for rows, width, mapped in ((1, 4, False), (16, 32, False), (16, 32, True))
    ]


def _pack_tail_fake(*args: object) -> None:
    return None


pack_tail = define_op(
    "pack_tail(Tensor tokens, Tensor length, Tensor finished, Tensor slot_of_row, Tensor? draft_ids, int tail, "
    "Tensor(a!) window_tokens, Tensor(b!) window_positions, Tensor(c!) window_slots, Tensor(d!) window_rows, "
    "Tensor(e!) cu_tokens, Tensor(f!) base, Tensor(g!) last) -> ()",
    cpu=_pack_tail_cpu,
    fake=_pack_tail_fake,
    cuda=pack_tail_triton,
)
"""`draftgraph::pack_tail`; see `pack_tail_reference`."""
