"""Packs the rows' windows, or one chunk of a prompt, into the token positions of one forward."""

from __future__ import annotations

import torch

from .registration import define_op
from .triton_support import KernelSpec, check_some, check_tensor, jit, row_range, tl

_BLOCK = 64
_PREFILL_BLOCK = 256


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


@jit(unspecialized=["width", "context", "reserved_slot", "num_rows", "num_drafts"])
def _pack_window_kernel(  # type: ignore[no-untyped-def]
    tokens,
    length,
    draft_tokens,
    cu_tokens,
    slot_of_row,
    window_tokens,
    window_positions,
    window_slots,
    window_rows,
    width,
    context,
    reserved_slot,
    num_rows,
    num_drafts,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    packed = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    every_row = tl.arange(0, ROWS)
    ends = tl.load(cu_tokens + 1 + every_row, mask=every_row < num_rows, other=2147483647)
    row = tl.sum((ends[None, :] <= packed[:, None]).to(tl.int32), 1)
    used = row < num_rows
    offset = packed - tl.load(cu_tokens + row, mask=used, other=0)
    slot = tl.load(slot_of_row + row, mask=used, other=0)
    anchor = tl.load(length + slot, mask=used, other=1) - 1
    token = tl.load(tokens + slot.to(tl.int64) * context + anchor, mask=used, other=0)
    is_draft = used & (offset > 0) & (num_drafts > 0)
    at = tl.minimum(tl.maximum(offset - 1, 0), num_drafts - 1)
    draft = tl.load(draft_tokens + slot.to(tl.int64) * num_drafts + at, mask=is_draft, other=0)
    token = tl.where(is_draft, tl.maximum(draft, 0), token)
    inside = packed < width
    tl.store(window_tokens + packed, token, mask=inside)
    tl.store(window_positions + packed, tl.where(used, anchor + offset, 0), mask=inside)
    tl.store(window_slots + packed, tl.where(used, slot, reserved_slot), mask=inside)
    tl.store(window_rows + packed, tl.where(used, row, -1), mask=inside)


@jit(unspecialized=["width", "context", "reserved_slot"])
def _pack_prefill_kernel(  # type: ignore[no-untyped-def]
    tokens,
    prefill_slot,
    prefill_range,
    window_tokens,
    window_positions,
    window_slots,
    window_rows,
    cu_tokens,
    base,
    slot_of_row,
    width,
    context,
    reserved_slot,
    BLOCK: tl.constexpr,
):
    packed = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(prefill_slot)
    start = tl.load(prefill_range)
    count = tl.load(prefill_range + 1)
    used = packed < count
    position = start + packed
    at = tl.minimum(tl.maximum(position, 0), context - 1)
    inside = packed < width
    token = tl.load(tokens + slot.to(tl.int64) * context + at, mask=used & inside, other=0)
    tl.store(window_tokens + packed, token, mask=inside)
    tl.store(window_positions + packed, tl.where(used, position, 0), mask=inside)
    tl.store(window_slots + packed, tl.where(used, slot, reserved_slot), mask=inside)
    tl.store(window_rows + packed, tl.where(used, 0, -1), mask=inside)
    if tl.program_id(0) == 0:
        tl.store(cu_tokens, 0)
        tl.store(cu_tokens + 1, count)
        tl.store(base, start)
        tl.store(slot_of_row, slot)


def _check_window(device: torch.device, *window: torch.Tensor) -> int:
    """Checks the tensors of the packed window, in the order of the op's arguments; their length."""
    for index, name in enumerate(("window_tokens", "window_positions", "window_slots", "window_rows")):
        width = None if index == 0 else window[0].shape[0]
        check_tensor(name, window[index], dtypes=(torch.int32,), shape=(width,), device=device)
    return window[0].shape[0]


def pack_window_triton(
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
    check_tensor("draft_tokens", draft_tokens, dtypes=int32, shape=(slots, None), device=device)
    check_tensor("slot_of_row", slot_of_row, dtypes=int32, shape=(None,), device=device)
    rows = slot_of_row.shape[0]
    check_some("slot_of_row", "row", rows)
    check_tensor("cu_tokens", cu_tokens, dtypes=int32, shape=(rows + 1,), device=device)
    window = (window_tokens, window_positions, window_slots, window_rows)
    width = _check_window(device, *window)
    if width == 0:
        return
    _pack_window_kernel[(-(-width // _BLOCK),)](
        tokens,
        length,
        draft_tokens,
        cu_tokens,
        slot_of_row,
        *window,
        width,
        context,
        slots - 1,
        num_rows=rows,
        num_drafts=draft_tokens.shape[1],
        ROWS=row_range(rows),
        BLOCK=_BLOCK,
        num_warps=2,
    )


def pack_prefill_triton(
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
    """The launch for CUDA tensors, or for CPU tensors under the interpreter.

    Raises:
        ValueError: an argument that the kernel could not take.
    """
    device, int32 = tokens.device, (torch.int32,)
    check_tensor("tokens", tokens, dtypes=int32, shape=(None, None), device=device)
    slots, context = tokens.shape
    check_some("tokens", "slot", slots)
    check_some("tokens", "position", context)
    check_tensor("prefill_slot", prefill_slot, dtypes=int32, shape=(1,), device=device)
    check_tensor("prefill_range", prefill_range, dtypes=int32, shape=(2,), device=device)
    window = (window_tokens, window_positions, window_slots, window_rows)
    width = _check_window(device, *window)
    check_tensor("cu_tokens", cu_tokens, dtypes=int32, shape=(2,), device=device)
    check_tensor("base", base, dtypes=int32, shape=(1,), device=device)
    check_tensor("slot_of_row", slot_of_row, dtypes=int32, shape=(1,), device=device)
    _pack_prefill_kernel[(max(1, -(-width // _PREFILL_BLOCK)),)](
        tokens,
        prefill_slot,
        prefill_range,
        *window,
        cu_tokens,
        base,
        slot_of_row,
        width,
        context,
        slots - 1,
        BLOCK=_PREFILL_BLOCK,
        num_warps=4,
    )


def kernel_specs() -> list[KernelSpec]:
    """The smallest bucket and the largest; and a chunk of a prompt."""
    pointers = ["tokens", "cu_tokens", "slot_of_row"]
    pointers += ["window_tokens", "window_positions", "window_slots", "window_rows"]
    sizes = dict.fromkeys(["width", "context", "reserved_slot"], "i32")

    def window(variant: str, rows: int, width: int) -> KernelSpec:
        return KernelSpec(
            op="pack_window",
            variant=variant,
            kernel=_pack_window_kernel,
            arguments=dict.fromkeys([*pointers, "length", "draft_tokens"], "*i32")
            | sizes
            | {"num_rows": "i32", "num_drafts": "i32"},
            constants={"ROWS": row_range(rows), "BLOCK": _BLOCK},
            num_warps=2,
            num_stages=3,
            shape=f"{width} tokens of {rows} row{'s' if rows > 1 else ''}",
            bytes_moved=20 * width + 12 * rows + 4,
            max_registers=96,
        )

    return [
        window("1 row, 7 drafts", 1, 8),
        window("16 rows, 7 drafts", 16, 128),
        KernelSpec(
            op="pack_prefill",
            variant="a chunk",
            kernel=_pack_prefill_kernel,
            arguments=dict.fromkeys([*pointers, "prefill_slot", "prefill_range", "base"], "*i32") | sizes,
            constants={"BLOCK": _PREFILL_BLOCK},
            num_stages=3,
            shape="512 tokens",
            bytes_moved=20 * 512 + 28,
            max_registers=64,
        ),
    ]


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
    cuda=pack_window_triton,
)
"""`draftgraph::pack_window`; see `pack_window_reference`."""

pack_prefill = define_op(
    f"pack_prefill(Tensor tokens, Tensor prefill_slot, Tensor prefill_range, {_WINDOW_SCHEMA}, "
    "Tensor(e!) cu_tokens, Tensor(f!) base, Tensor(g!) slot_of_row) -> ()",
    cpu=_pack_prefill_cpu,
    fake=_writes_only,
    cuda=pack_prefill_triton,
)
"""`draftgraph::pack_prefill`; see `pack_prefill_reference`."""
