"""Packs the queries of a block drafter: of every row its anchor, and masks for the tokens that follow."""

from __future__ import annotations

import torch

from .registration import define_op
from .triton_support import KernelSpec, check_some, check_tensor, jit, short_range, tl


def pack_block_reference(
    tokens: torch.Tensor,
    length: torch.Tensor,
    finished: torch.Tensor,
    slot_of_row: torch.Tensor,
    size: int,
    mask_token: int,
    window_tokens: torch.Tensor,
    window_positions: torch.Tensor,
    window_slots: torch.Tensor,
    window_rows: torch.Tensor,
    base: torch.Tensor,
    window_slot_of_row: torch.Tensor,
) -> None:
    """The specification of `pack_block`; reads nothing on the host.

    Row b's queries are window tokens `b * size` to `b * size + size - 1`, whichever rows are live: its last committed
    token at position `length - 1`, then masks at the positions after it. A block is never cut short, since in a drafter
    whose queries see each other every one of them decides what the others draft. A finished row's block has the token
    0 at its beginning and stands at position 0 of the reserved slot. The rest of W is padding: token 0, position 0, the
    reserved slot, row -1.

    Args:
        tokens: int32 [R1, C].
        length: int32 [R1], at least 1.
        finished: bool [R1].
        slot_of_row: int32 [B].
        size: queries of a row, at least 1; `B * size` must not exceed W.
        mask_token: the token of all but a row's first.
        window_tokens: int32 [W], written.
        window_positions: int32 [W], written.
        window_slots: int32 [W], written.
        window_rows: int32 [W], written.
        base: int32 [B], written: the position of the row's first query.
        window_slot_of_row: int32 [B], written: the row's slot, the reserved one where it is finished.
    """
    width, num_rows, reserved_slot = window_tokens.shape[0], slot_of_row.shape[0], tokens.shape[0] - 1
    slots = slot_of_row.long()
    live = ~finished[slots]
    start = torch.where(live, length[slots] - 1, 0)
    owner = torch.where(live, slot_of_row, reserved_slot)
    anchor = torch.where(live, tokens[slots, start.long()], 0)
    base.copy_(start)
    window_slot_of_row.copy_(owner)

    packed = torch.arange(width, dtype=torch.int32, device=tokens.device)
    used = packed < num_rows * size
    row = (packed // size).clamp_max(num_rows - 1)
    offset = packed % size
    window_tokens.copy_(torch.where(used, torch.where(offset == 0, anchor[row], mask_token), 0))
    window_positions.copy_(torch.where(used, start[row] + offset, 0))
    window_slots.copy_(torch.where(used, owner[row], reserved_slot))
    window_rows.copy_(torch.where(used, row, -1))


def _pack_block_cpu(
    tokens: torch.Tensor,
    length: torch.Tensor,
    finished: torch.Tensor,
    slot_of_row: torch.Tensor,
    size: int,
    mask_token: int,
    window_tokens: torch.Tensor,
    window_positions: torch.Tensor,
    window_slots: torch.Tensor,
    window_rows: torch.Tensor,
    base: torch.Tensor,
    window_slot_of_row: torch.Tensor,
) -> None:
    """At most 16 rows: a plain loop over host values beats a dozen tensor operations of a few elements."""
    token_of, length_of, finished_of = tokens.numpy(), length.numpy(), finished.numpy()
    reserved_slot = tokens.shape[0] - 1
    packed_tokens: list[int] = []
    packed_positions: list[int] = []
    packed_slots: list[int] = []
    packed_rows: list[int] = []
    bases, owners = [], []
    for row, slot in enumerate(slot_of_row.tolist()):
        dead = bool(finished_of[slot])
        start, owner = (0, reserved_slot) if dead else (int(length_of[slot]) - 1, slot)
        packed_tokens += [0 if dead else int(token_of[slot, start]), *[mask_token] * (size - 1)]
        packed_positions += range(start, start + size)
        packed_slots += [owner] * size
        packed_rows += [row] * size
        bases.append(start)
        owners.append(owner)
    padding = window_tokens.shape[0] - len(packed_tokens)
    window_tokens.numpy()[:] = packed_tokens + [0] * padding
    window_positions.numpy()[:] = packed_positions + [0] * padding
    window_slots.numpy()[:] = packed_slots + [reserved_slot] * padding
    window_rows.numpy()[:] = packed_rows + [-1] * padding
    base.numpy()[:] = bases
    window_slot_of_row.numpy()[:] = owners


@jit(unspecialized=["width", "num_rows", "context", "reserved_slot", "size", "mask_token"])
def _pack_block_kernel(  # type: ignore[no-untyped-def]
    tokens,
    length,
    finished,
    slot_of_row,
    window_tokens,
    window_positions,
    window_slots,
    window_rows,
    base,
    window_slot_of_row,
    width,
    num_rows,
    context,
    reserved_slot,
    size,
    mask_token,
    BLOCK: tl.constexpr,
):
    """Each program: some of the window's tokens; the first token of a row also says where the row stands."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = at // size
    offset = at % size
    used = row < num_rows
    slot = tl.load(slot_of_row + row, mask=used, other=0)
    live = used & (tl.load(finished + slot, mask=used, other=1).to(tl.int32) == 0)
    start = tl.load(length + slot, mask=live, other=1) - 1
    first = live & (offset == 0)
    token = tl.load(tokens + slot.to(tl.int64) * context + start, mask=first, other=0)
    token = tl.where(used & (offset > 0), mask_token, token)
    owner = tl.where(live, slot, reserved_slot)
    written = at < width
    tl.store(window_tokens + at, token, mask=written)
    tl.store(window_positions + at, tl.where(used, start + offset, 0), mask=written)
    tl.store(window_slots + at, owner, mask=written)
    tl.store(window_rows + at, tl.where(used, row, -1), mask=written)
    tl.store(base + row, start, mask=used & (offset == 0))
    tl.store(window_slot_of_row + row, owner, mask=used & (offset == 0))


_TOKENS = 128
"""Of one program, at most."""


def pack_block_triton(
    tokens: torch.Tensor,
    length: torch.Tensor,
    finished: torch.Tensor,
    slot_of_row: torch.Tensor,
    size: int,
    mask_token: int,
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
    check_tensor("window_tokens", window_tokens, dtypes=int32, shape=(None,), device=device)
    width = window_tokens.shape[0]
    for name, of_token in (
        ("window_positions", window_positions),
        ("window_slots", window_slots),
        ("window_rows", window_rows),
    ):
        check_tensor(name, of_token, dtypes=int32, shape=(width,), device=device)
    for name, of_row in (("base", base), ("window_slot_of_row", window_slot_of_row)):
        check_tensor(name, of_row, dtypes=int32, shape=(rows,), device=device)
    if width < rows:
        raise ValueError(f"window_tokens has {width} entries; accepted: at least {rows}, one per row")
    most = width // rows
    if not 1 <= size <= most:
        raise ValueError(f"size is {size}; accepted: 1 to {most}, as a window of {width} tokens holds for {rows} rows")
    block = min(_TOKENS, short_range(width))
    _pack_block_kernel[(-(-width // block),)](
        tokens,
        length,
        finished,
        slot_of_row,
        window_tokens,
        window_positions,
        window_slots,
        window_rows,
        base,
        window_slot_of_row,
        width,
        rows,
        context,
        slots - 1,
        size,
        mask_token,
        BLOCK=block,
        num_warps=1,
    )


def kernel_specs() -> list[KernelSpec]:
    """The smallest bucket and the largest."""
    names = ["tokens", "length", "slot_of_row", "window_tokens", "window_positions", "window_slots", "window_rows"]
    names += ["base", "window_slot_of_row"]
    return [
        KernelSpec(
            op="pack_block",
            variant=f"{rows} row{'s' if rows > 1 else ''}",
            kernel=_pack_block_kernel,
            arguments={
                **dict.fromkeys(names, "*i32"),
                **dict.fromkeys(["width", "num_rows", "context", "reserved_slot", "size", "mask_token"], "i32"),
                "finished": "*i1",
            },
            constants={"BLOCK": min(_TOKENS, width)},
            num_warps=1,
            num_stages=3,
            shape=f"{width} tokens of {rows} row{'s' if rows > 1 else ''}",
            bytes_moved=16 * width + 21 * rows,
            max_registers=64,
        )
        for rows, width in ((1, 16), (16, 256))
    ]


def _pack_block_fake(*args: object) -> None:
    return None


pack_block = define_op(
    "pack_block(Tensor tokens, Tensor length, Tensor finished, Tensor slot_of_row, int size, int mask_token, "
    "Tensor(a!) window_tokens, Tensor(b!) window_positions, Tensor(c!) window_slots, Tensor(d!) window_rows, "
    "Tensor(e!) base, Tensor(f!) window_slot_of_row) -> ()",
    cpu=_pack_block_cpu,
    fake=_pack_block_fake,
    cuda=pack_block_triton,
)
"""`draftgraph::pack_block`; see `pack_block_reference`."""
