"""The Triton kernel of `commit`: one program for a whole bucket."""

from __future__ import annotations

import torch

from .finish_reasons import FINISH_CANCELLED, FINISH_ERROR, FINISH_LENGTH, FINISH_STOP, REASON_SHIFT
from .triton_support import (
    KernelSpec,
    check_some,
    check_tensor,
    constants_of,
    draft_range,
    jit,
    next_power_of_2,
    row_range,
    tl,
)

# The most entries of the kernel's tile of rows and emitted tokens.
_TILE = 1024


def check_ring(emitted: torch.Tensor, ring_tokens: torch.Tensor) -> None:
    """Refuses a ring that does not hold the tokens of one round, with a `ValueError`."""
    if ring_tokens.shape[1] < emitted.shape[1]:
        raise ValueError(
            f"the ring holds {ring_tokens.shape[1]} tokens, fewer than the {emitted.shape[1]} of one round"
        )


@jit(unspecialized=["num_rows", "num_emitted", "num_stops", "context", "ring"])
def _commit_kernel(  # type: ignore[no-untyped-def]
    emitted,
    accepted,
    row_failed,
    cu_tokens,
    slot_of_row,
    stop_token_ids,
    limit,
    cancel,
    pause,
    leave_on_finish,
    taken,
    tokens,
    length,
    finished,
    finish_reason,
    ring_tokens,
    ring_count,
    published,
    rounds,
    histogram,
    round_pairs,
    rounds_left,
    running,
    context,
    ring,
    num_rows,
    num_emitted,
    num_stops,
    PASSES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STOP: tl.constexpr,
    LENGTH: tl.constexpr,
    CANCELLED: tl.constexpr,
    ERROR: tl.constexpr,
    SHIFT: tl.constexpr,
):
    # One program for the bucket, `ROWS` rows at a time: the running flag needs them all. What the host writes is in its
    # memory: `volatile` asks for its present value, and the loads come first since they take long.
    paused = tl.load(pause, volatile=True).to(tl.int32) != 0
    leave = tl.load(leave_on_finish, volatile=True).to(tl.int32)
    was_running = tl.load(running).to(tl.int32)
    left = tl.maximum(tl.load(rounds_left) - was_running, 0)
    column = tl.arange(0, COLUMNS)
    unfinished = 0
    blocked = 0
    for turn in range(PASSES):
        row = turn * ROWS + tl.arange(0, ROWS)
        inside = row < num_rows
        slot = tl.load(slot_of_row + row, mask=inside, other=0).to(tl.int64)
        begin = tl.load(cu_tokens + row, mask=inside, other=0)
        verified = tl.load(cu_tokens + row + 1, mask=inside, other=0) - begin - 1
        # Only live rows are written. No two of them share a slot.
        live = inside & (verified >= 0) & (was_running != 0)
        last = tl.load(accepted + slot, mask=live, other=0)
        failed = tl.load(row_failed + slot, mask=live, other=0).to(tl.int32) != 0
        cancelled = tl.load(cancel + slot, mask=live, other=0, volatile=True).to(tl.int32) != 0
        gone = tl.load(taken + slot, mask=live, other=0, volatile=True)
        old_length = tl.load(length + slot, mask=live, other=1)
        most = tl.load(limit + slot, mask=live, other=0)
        old_count = tl.load(ring_count + slot, mask=live, other=0)
        number = tl.load(rounds + slot, mask=live, other=0)
        was_finished = tl.load(finished + slot, mask=inside & ~live, other=1).to(tl.int32)

        candidate = (live & ~failed)[:, None] & (column[None, :] <= last[:, None]) & (column < num_emitted)[None, :]
        new = tl.load(emitted + slot[:, None] * num_emitted + column[None, :], mask=candidate, other=-1)
        is_stop = tl.zeros([ROWS, COLUMNS], dtype=tl.int32)
        for index in range(num_stops):
            stop = tl.load(stop_token_ids + slot * num_stops + index, mask=live, other=-1)
            is_stop = tl.where((new == stop[:, None]) & (stop >= 0)[:, None] & candidate, 1, is_stop)
        stops_before = tl.cumsum(is_stop, 1) - is_stop
        appended = candidate & (stops_before == 0) & (column[None, :] < (most - old_length)[:, None])
        count = tl.sum(appended.to(tl.int32), 1)
        stopped = tl.max(tl.where(appended, is_stop, 0), 1) > 0

        # Several warps may hold a row: none may still be reading what another overwrites.
        tl.debug_barrier()
        at = (old_length[:, None] + column[None, :]) % context
        tl.store(tokens + slot[:, None] * context + at, new, mask=appended)
        at = (old_count[:, None] + column[None, :]) % ring
        tl.store(ring_tokens + slot[:, None] * ring + at, new, mask=appended)
        new_length = old_length + count
        tl.store(length + slot, new_length, mask=live)
        reason = tl.where(new_length >= most, LENGTH, 0)
        reason = tl.where(stopped, STOP, reason)
        reason = tl.where(cancelled, CANCELLED, reason)
        reason = tl.where(failed, ERROR, reason)
        tl.store(finish_reason + slot, reason, mask=live)
        tl.store(finished + slot, reason != 0, mask=live)
        unfinished += tl.sum(tl.where(live, (reason == 0).to(tl.int32), 1 - was_finished), 0)
        new_count = old_count + count
        tl.store(ring_count + slot, new_count, mask=live)
        stays = tl.where(reason == 0, new_count - gone + num_emitted <= ring, leave == 0)
        blocked += tl.sum((live & (stays == 0)).to(tl.int32), 0)

        tl.store(rounds + slot, number + 1, mask=live)
        if round_pairs is not None:
            pair = round_pairs + (slot * context + number) * 2
            tl.store(pair, verified, mask=live & (number < context))
            tl.store(pair + 1, last, mask=live & (number < context))
        cell = histogram + (slot * num_emitted + verified) * num_emitted + last
        tl.store(cell, tl.load(cell, mask=live, other=0) + 1, mask=live)

        # The host polls this one word and then reads the tokens, or what a finished row left: the barrier orders all
        # threads' stores before the word, and the release at system scope publishes them with it.
        word = new_count | (reason.to(tl.int64) << SHIFT)
        tl.debug_barrier()
        tl.atomic_xchg(published + slot, word, mask=live, sem="release", scope="sys")
    tl.store(rounds_left, left)
    tl.store(running, (was_running != 0) & (unfinished > 0) & (blocked == 0) & (left > 0) & (paused == 0))


def _sizes(rows: int, emitted: int, stops: int) -> dict[str, int]:
    """The constants of the kernel, in capitals, and its sizes: the same constants for most buckets and drafts."""
    columns = draft_range(emitted - 1)
    at_once = min(row_range(rows), max(1, _TILE // columns))
    return {
        "num_rows": rows,
        "num_emitted": emitted,
        "num_stops": stops,
        "PASSES": next_power_of_2(-(-rows // at_once)),
        "ROWS": at_once,
        "COLUMNS": columns,
        "STOP": FINISH_STOP,
        "LENGTH": FINISH_LENGTH,
        "CANCELLED": FINISH_CANCELLED,
        "ERROR": FINISH_ERROR,
        "SHIFT": REASON_SHIFT,
    }


def _num_warps(sizes: dict[str, int]) -> int:
    tile = sizes["ROWS"] * sizes["COLUMNS"]
    return 1 if tile <= 64 else 4 if tile < _TILE else 8


def commit_triton(
    emitted: torch.Tensor,
    accepted: torch.Tensor,
    row_failed: torch.Tensor,
    cu_tokens: torch.Tensor,
    slot_of_row: torch.Tensor,
    stop_token_ids: torch.Tensor,
    limit: torch.Tensor,
    cancel: torch.Tensor,
    pause: torch.Tensor,
    leave_on_finish: torch.Tensor,
    taken: torch.Tensor,
    tokens: torch.Tensor,
    length: torch.Tensor,
    finished: torch.Tensor,
    finish_reason: torch.Tensor,
    ring_tokens: torch.Tensor,
    ring_count: torch.Tensor,
    published: torch.Tensor,
    rounds: torch.Tensor,
    histogram: torch.Tensor,
    round_pairs: torch.Tensor | None,
    rounds_left: torch.Tensor,
    running: torch.Tensor,
) -> None:
    """The launch for CUDA tensors, or for CPU tensors under the interpreter.

    Raises:
        ValueError: an argument that the kernel could not take, or a ring that does not hold the tokens of one round.
    """
    device, int32, int64, flag = emitted.device, (torch.int32,), (torch.int64,), (torch.bool,)
    check_tensor("emitted", emitted, dtypes=int32, shape=(None, None), device=device)
    slots, width = emitted.shape
    check_some("emitted", "slot", slots)
    check_tensor("slot_of_row", slot_of_row, dtypes=int32, shape=(None,), device=device)
    rows = slot_of_row.shape[0]
    check_tensor("cu_tokens", cu_tokens, dtypes=int32, shape=(rows + 1,), device=device)
    for name, tensor, kinds in (
        ("accepted", accepted, int32),
        ("row_failed", row_failed, flag),
        ("limit", limit, int32),
        ("cancel", cancel, flag),
        ("length", length, int32),
        ("finished", finished, flag),
        ("finish_reason", finish_reason, int32),
        ("taken", taken, int64),
        ("ring_count", ring_count, int64),
        ("published", published, int64),
        ("rounds", rounds, int64),
    ):
        check_tensor(name, tensor, dtypes=kinds, shape=(slots,), device=device)
    for name, tensor in (("stop_token_ids", stop_token_ids), ("tokens", tokens), ("ring_tokens", ring_tokens)):
        check_tensor(name, tensor, dtypes=int32, shape=(slots, None), device=device)
    check_tensor("histogram", histogram, dtypes=int64, shape=(slots, width, width), device=device)
    if round_pairs is not None:
        check_tensor("round_pairs", round_pairs, dtypes=int32, shape=(slots, tokens.shape[1], 2), device=device)
    check_tensor("rounds_left", rounds_left, dtypes=int32, shape=(1,), device=device)
    for name, tensor in (("pause", pause), ("leave_on_finish", leave_on_finish), ("running", running)):
        check_tensor(name, tensor, dtypes=flag, shape=(1,), device=device)
    check_ring(emitted, ring_tokens)
    if not 1 <= width <= _TILE:
        raise ValueError(f"emitted has {width} columns; accepted: 1 to {_TILE}")
    sizes = _sizes(rows, width, stop_token_ids.shape[1])
    _commit_kernel[(1,)](
        emitted,
        accepted,
        row_failed,
        cu_tokens,
        slot_of_row,
        stop_token_ids,
        limit,
        cancel,
        pause,
        leave_on_finish,
        taken,
        tokens,
        length,
        finished,
        finish_reason,
        ring_tokens,
        ring_count,
        published,
        rounds,
        histogram,
        round_pairs,
        rounds_left,
        running,
        tokens.shape[1],
        ring_tokens.shape[1],
        **sizes,
        num_warps=_num_warps(sizes),
    )


def kernel_specs() -> list[KernelSpec]:
    """One row and several, and several with the tokens of a deep tree; the bucket and fewer drafts do not matter."""

    def spec(rows: int, drafts: int, pairs: bool = False) -> KernelSpec:
        arguments = dict.fromkeys(["row_failed", "cancel", "pause", "leave_on_finish", "finished", "running"], "*i1")
        arguments |= dict.fromkeys(["taken", "ring_count", "published", "rounds", "histogram"], "*i64")
        arguments |= dict.fromkeys(["emitted", "accepted", "cu_tokens", "slot_of_row", "stop_token_ids"], "*i32")
        arguments |= {"rounds_left": "*i32"} | ({"round_pairs": "*i32"} if pairs else {})
        arguments |= dict.fromkeys(["limit", "tokens", "length", "finish_reason", "ring_tokens"], "*i32")
        arguments |= dict.fromkeys(["context", "ring", "num_rows", "num_emitted", "num_stops"], "i32")
        sizes = _sizes(rows, drafts + 1, 8)
        named = f"{rows} row{'s' if rows > 1 else ''}, {drafts} drafts{', pairs' if pairs else ''}"
        return KernelSpec(
            op="commit",
            variant=named,
            kernel=_commit_kernel,
            arguments=arguments,
            constants=constants_of(sizes) | ({} if pairs else {"round_pairs": None}),
            num_warps=_num_warps(sizes),
            num_stages=3,
            shape=f"{named}, 8 stop tokens",
            # Per row 12 for each token, 32 for the stop tokens, eight transfers of 8 bytes and nine of 4.
            bytes_moved=rows * (12 * (drafts + 1) + 32 + 64 + 36 + (8 if pairs else 0)) + 12,
            max_registers=144,
        )

    return [spec(1, 7), spec(16, 7), spec(16, 7, pairs=True), spec(16, 64)]
