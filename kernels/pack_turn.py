"""Packs the positions that prediction modules read when they are applied once more in a round."""

from __future__ import annotations

import torch

from .registration import define_op
from .triton_support import KernelSpec, check_some, check_tensor, jit, row_range, tl


def pack_turn_reference(
    length: torch.Tensor,
    limit: torch.Tensor,
    slot_of_row: torch.Tensor,
    step: int,
    modules: int,
    stride: int,
    window_positions: torch.Tensor,
    window_slots: torch.Tensor,
    window_rows: torch.Tensor,
    cu_tokens: torch.Tensor,
    base: torch.Tensor,
    window_slot_of_row: torch.Tensor,
    states: torch.Tensor,
    queries: torch.Tensor,
) -> None:
    """The specification of `pack_turn`; reads nothing on the host.

    Every row gets a window of n positions, for n modules: those of its last n drafts, each moved back by one as a
    module keeps it, from `length - 1 + step - n` on. A row of the reserved slot, and one that has no room for draft
    `step` (`limit - length - 1`), gets one from position 0 on in the reserved slot. The rest of W is padding:
    position 0, the reserved slot, row -1.

    Args:
        length: int32 [R1].
        limit: int32 [R1].
        slot_of_row: int32 [B].
        step: drafts so far, at least n.
        modules: n, at least 1.
        stride: module i's output for row b is hidden state `i * stride + b`; at least B.
        window_positions: int32 [W], written; W at least `B * n`.
        window_slots: int32 [W], written.
        window_rows: int32 [W], written.
        cu_tokens: int32 [B + 1], written.
        base: int32 [B], written.
        window_slot_of_row: int32 [B], written.
        states: int32 [W], written: which hidden state each packed token reads; 0 in padding.
        queries: int32 [N], N at least B, written: where each row's last position is packed; 0 past B.
    """
    num_rows, reserved_slot, width = slot_of_row.shape[0], length.shape[0] - 1, window_positions.shape[0]
    length_of = length.index_select(0, slot_of_row)
    room = limit.index_select(0, slot_of_row) - length_of - 1
    goes_on = (slot_of_row < reserved_slot) & (room > step)
    first = torch.where(goes_on, length_of - 1 + step - modules, 0)
    owner = torch.where(goes_on, slot_of_row, reserved_slot)
    row = torch.arange(num_rows, dtype=torch.int32, device=length.device)
    base.copy_(first)
    window_slot_of_row.copy_(owner)
    cu_tokens[:1] = 0
    cu_tokens[1:] = (row + 1) * modules
    queries.zero_()
    queries[:num_rows] = row * modules + (modules - 1)

    packed = torch.arange(width, dtype=torch.int32, device=length.device)
    of_row, module = packed // modules, packed % modules
    used = of_row < num_rows
    inside = of_row.clamp_max(num_rows - 1)
    window_positions.copy_(torch.where(used, first.index_select(0, inside) + module, 0))
    window_slots.copy_(torch.where(used, owner.index_select(0, inside), reserved_slot))
    window_rows.copy_(torch.where(used, of_row, -1))
    states.copy_(torch.where(used, module * stride + of_row, 0))


def _pack_turn_cpu(
    length: torch.Tensor,
    limit: torch.Tensor,
    slot_of_row: torch.Tensor,
    step: int,
    modules: int,
    stride: int,
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
    length_of, limit_of, reserved_slot = length.numpy(), limit.numpy(), length.shape[0] - 1
    positions: list[int] = []
    slots: list[int] = []
    rows: list[int] = []
    read: list[int] = []
    bases, owners = [], []
    for row, slot in enumerate(slot_of_row.tolist()):
        row_length = int(length_of[slot])
        goes_on = slot < reserved_slot and int(limit_of[slot]) - row_length - 1 > step
        bases.append(row_length - 1 + step - modules if goes_on else 0)
        owners.append(slot if goes_on else reserved_slot)
        positions += range(bases[-1], bases[-1] + modules)
        slots += [owners[-1]] * modules
        rows += [row] * modules
        read += range(row, row + modules * stride, stride)
    padding = window_positions.shape[0] - len(positions)
    window_positions.numpy()[:] = positions + [0] * padding
    window_slots.numpy()[:] = slots + [reserved_slot] * padding
    window_rows.numpy()[:] = rows + [-1] * padding
    states.numpy()[:] = read + [0] * padding
    cu_tokens.numpy()[:] = range(0, len(positions) + 1, modules)
    base.numpy()[:] = bases
    window_slot_of_row.numpy()[:] = owners
    lasts = [*range(modules - 1, len(positions), modules)]
    queries.numpy()[:] = lasts + [0] * (queries.shape[0] - len(lasts))


_SIZES = ("reserved_slot", "step", "modules", "stride", "width", "num_queries", "num_rows", "num_places")
# Tokens of the window at a time.
_CHUNK = 32


@jit(unspecialized=_SIZES)
def _pack_turn_kernel(  # type: ignore[no-untyped-def]
    length,
    limit,
    slot_of_row,
    window_positions,
    window_slots,
    window_rows,
    cu_tokens,
    base,
    window_slot_of_row,
    states,
    queries,
    reserved_slot,
    step,
    modules,
    stride,
    width,
    num_queries,
    num_rows,
    num_places,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program: what each row has, then what each packed token is, from its row's slot once more."""
    every_row = tl.arange(0, ROWS)
    inside = every_row < num_rows
    slot = tl.load(slot_of_row + every_row, mask=inside, other=0)
    row_length = tl.load(length + slot, mask=inside, other=0)
    room = tl.load(limit + slot, mask=inside, other=0) - row_length - 1
    goes_on = inside & (slot < reserved_slot) & (room > step)
    tl.store(base + every_row, tl.where(goes_on, row_length - 1 + step - modules, 0), mask=inside)
    tl.store(window_slot_of_row + every_row, tl.where(goes_on, slot, reserved_slot), mask=inside)
    tl.store(cu_tokens, 0)
    tl.store(cu_tokens + 1 + every_row, (every_row + 1) * modules, mask=inside)

    for block in range(0, num_places, CHUNK):
        at = block + tl.arange(0, CHUNK)
        tl.store(queries + at, tl.where(at < num_rows, at * modules + modules - 1, 0), mask=at < num_queries)
        row = at // modules
        used = row < num_rows
        token_slot = tl.load(slot_of_row + row, mask=used, other=0)
        token_length = tl.load(length + token_slot, mask=used, other=0)
        token_room = tl.load(limit + token_slot, mask=used, other=0) - token_length - 1
        stays = used & (token_slot < reserved_slot) & (token_room > step)
        module = at % modules
        position = tl.where(stays, token_length - 1 + step - modules, 0) + module
        written = at < width
        tl.store(window_positions + at, tl.where(used, position, 0), mask=written)
        tl.store(window_slots + at, tl.where(stays, token_slot, reserved_slot), mask=written)
        tl.store(window_rows + at, tl.where(used, row, -1), mask=written)
        tl.store(states + at, tl.where(used, module * stride + row, 0), mask=written)


def pack_turn_triton(
    length: torch.Tensor,
    limit: torch.Tensor,
    slot_of_row: torch.Tensor,
    step: int,
    modules: int,
    stride: int,
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
    device, int32 = length.device, (torch.int32,)
    check_tensor("length", length, dtypes=int32, shape=(None,), device=device)
    slots = length.shape[0]
    check_some("length", "slot", slots)
    check_tensor("limit", limit, dtypes=int32, shape=(slots,), device=device)
    check_tensor("slot_of_row", slot_of_row, dtypes=int32, shape=(None,), device=device)
    rows = slot_of_row.shape[0]
    check_some("slot_of_row", "row", rows)
    check_tensor("window_positions", window_positions, dtypes=int32, shape=(None,), device=device)
    width = window_positions.shape[0]
    for name, of_token in (("window_slots", window_slots), ("window_rows", window_rows), ("states", states)):
        check_tensor(name, of_token, dtypes=int32, shape=(width,), device=device)
    check_tensor("cu_tokens", cu_tokens, dtypes=int32, shape=(rows + 1,), device=device)
    check_tensor("base", base, dtypes=int32, shape=(rows,), device=device)
    check_tensor("window_slot_of_row", window_slot_of_row, dtypes=int32, shape=(rows,), device=device)
    check_tensor("queries", queries, dtypes=int32, shape=(None,), device=device)
    if width < rows:
        raise ValueError(f"window_positions has {width} entries; accepted: at least {rows}, one per row and module")
    if modules < 1 or rows * modules > width:
        raise ValueError(f"modules is {modules}; accepted: 1 to {width // rows}, so that {rows} rows fit {width}")
    if step < modules:
        raise ValueError(f"step is {step}; accepted: at least {modules}, a draft of each module")
    if stride < rows:
        raise ValueError(f"stride is {stride}; accepted: at least {rows}, the rows of a module")
    if queries.shape[0] < rows:
        raise ValueError(f"queries has {queries.shape[0]} entries; accepted: at least {rows}, one per row")
    _pack_turn_kernel[(1,)](
        length,
        limit,
        slot_of_row,
        window_positions,
        window_slots,
        window_rows,
        cu_tokens,
        base,
        window_slot_of_row,
        states,
        queries,
        slots - 1,
        step,
        modules,
        stride,
        width,
        queries.shape[0],
        rows,
        max(width, queries.shape[0]),
        ROWS=row_range(rows),
        CHUNK=_CHUNK,
        num_warps=1,
    )


def kernel_specs() -> list[KernelSpec]:
    """One row and several."""
    names = ["length", "limit", "slot_of_row", "window_positions", "window_slots", "window_rows", "cu_tokens"]
    names += ["base", "window_slot_of_row", "states", "queries"]
    return [
        KernelSpec(
            op="pack_turn",
            variant=f"{rows} row{'s' if rows > 1 else ''}",
            kernel=_pack_turn_kernel,
            arguments={**dict.fromkeys(names, "*i32"), **dict.fromkeys(_SIZES, "i32")},
            constants={"ROWS": row_range(rows), "CHUNK": _CHUNK},
            num_warps=1,
            num_stages=3,
            shape=f"2 tokens of each of {rows} row{'s' if rows > 1 else ''}",
            bytes_moved=16 * width + 28 * rows,
            max_registers=128,
        )
        for rows, width in ((1, 4), (16, 32))
    ]


def _pack_turn_fake(*args: object) -> None:
    return None


pack_turn = define_op(
    "pack_turn(Tensor length, Tensor limit, Tensor slot_of_row, int step, int modules, int stride, "
    "Tensor(a!) window_positions, Tensor(b!) window_slots, Tensor(c!) window_rows, Tensor(d!) cu_tokens, "
    "Tensor(e!) base, Tensor(f!) window_slot_of_row, Tensor(g!) states, Tensor(h!) queries) -> ()",
    cpu=_pack_turn_cpu,
    fake=_pack_turn_fake,
    cuda=pack_turn_triton,
)
"""`draftgraph::pack_turn`; see `pack_turn_reference`."""
