"""Ends a round: appends what accept emitted, finishes rows, fills the output ring and the counters."""

from __future__ import annotations

import torch

from .registration import define_op
from .triton_support import KernelSpec, check_tensor, jit, next_power_of_2, tl

# The codes of `graphs/state.py`, which this package may not import; a test holds them equal.
FINISH_NONE = 0
FINISH_STOP = 1
FINISH_LENGTH = 2
FINISH_CANCELLED = 3
FINISH_ERROR = 4
REASON_SHIFT = 56

# The most entries of the kernel's tile of rows and emitted tokens.
_TILE = 1024


def commit_reference(
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
    """The specification of `commit`; reads nothing on the host.

    A round that runs while `running` is false changes nothing: it was launched before the host knew that the loop had
    ended. In any other, only rows with a nonempty window take part. Such a row appends its `accepted + 1` emitted
    tokens, up to and including the first stop token and never past its limit. It finishes, by falling precedence, with
    `error` (the target's logits were not finite; nothing is appended), `cancelled`, `stop` (a stop token was
    appended) or `length` (the limit is reached).

    The loop of rounds goes on while all of this holds: some row of the bucket is unfinished; the host asks for no
    pause; rounds are left; no row finished in this round, or the host does not mind; and the ring of every unfinished
    row that took part has room for another round's K + 1 tokens, so that nothing is overwritten before the host took
    it. `cancel`, `pause`, `leave_on_finish` and `taken` are the host's, which may write them at any time; each is read
    once.

    Args:
        emitted: int32 [R1, K + 1].
        accepted: int32 [R1].
        row_failed: bool [R1].
        cu_tokens: int32 [B + 1].
        slot_of_row: int32 [B].
        stop_token_ids: int32 [R1, S]; -1 matches nothing.
        limit: int32 [R1], at most C.
        cancel: bool [R1].
        pause: bool [1].
        leave_on_finish: bool [1]: leave the loop when a row finishes.
        taken: int64 [R1]: tokens that the host has taken from the ring, at most `ring_count`.
        tokens: int32 [R1, C], written.
        length: int32 [R1], at least 1, written.
        finished: bool [R1], written.
        finish_reason: int32 [R1], written.
        ring_tokens: int32 [R1, L], written at index `count % L`; L is at least K + 1.
        ring_count: int64 [R1], written: tokens ever put into the ring.
        published: int64 [R1], written after all else of the row: `ring_count | finish_reason << 56`.
        rounds: int64 [R1], plus 1.
        histogram: int64 [R1, K + 1, K + 1], plus 1 at (drafts verified, drafts accepted).
        round_pairs: int32 [R1, C, 2] or None, written at [slot, rounds]: (drafts verified, drafts accepted). Rounds
            past C are left out.
        rounds_left: int32 [1], minus 1, but never below 0.
        running: bool [1], written: the loop goes on; false remains false.

    Raises:
        ValueError: the ring does not hold the tokens of one round.
    """
    _check_ring(emitted, ring_tokens)
    context, ring = tokens.shape[1], ring_tokens.shape[1]
    # A row has at least one committed token, so it never appends as many as `context`.
    columns = min(emitted.shape[1], context)
    slots = slot_of_row.long()
    verified = cu_tokens[1:] - cu_tokens[:-1] - 1
    live = (verified >= 0) & running
    last = accepted[slots]

    if round_pairs is not None:
        pair = torch.stack((verified, last), 1)
        number = rounds[slots].clamp(max=round_pairs.shape[1] - 1)
        kept = (live & (rounds[slots] < round_pairs.shape[1]))[:, None]
        round_pairs[slots, number] = torch.where(kept, pair, round_pairs[slots, number])
    rounds[slots] += live
    histogram.index_put_((slots, verified.clamp_min(0).long(), last.long()), live.long(), accumulate=True)

    column = torch.arange(columns, device=tokens.device)
    new = emitted[slots, :columns]
    stop_ids = stop_token_ids[slots]
    is_stop = ((new[:, :, None] == stop_ids[:, None, :]) & (stop_ids >= 0)[:, None, :]).any(2)
    stops_before = torch.cumsum(is_stop, 1) - is_stop.long()
    old_length = length[slots]
    failed = row_failed[slots] & live
    appended = (
        (column <= last[:, None])
        & (stops_before == 0)
        & (column < (limit[slots] - old_length)[:, None])
        & (live & ~failed)[:, None]
    )
    count = appended.sum(1)

    # Entries that are not appended write back what is there. Within a row all indices differ, because of the
    # modulo; padding rows all write the same.
    row = slots[:, None]
    at = (old_length[:, None] + column) % context
    tokens[row, at] = torch.where(appended, new, tokens[row, at])
    at = (ring_count[slots][:, None] + column) % ring
    ring_tokens[row, at] = torch.where(appended, new, ring_tokens[row, at])
    new_length = old_length + count
    length[slots] = new_length.int()
    ring_count[slots] += count

    reason = torch.where(new_length >= limit[slots], FINISH_LENGTH, FINISH_NONE)
    reason = torch.where((appended & is_stop).any(1), FINISH_STOP, reason)
    reason = torch.where(cancel[slots], FINISH_CANCELLED, reason)
    reason = torch.where(failed, FINISH_ERROR, reason)
    finish_reason[slots] = torch.where(live, reason, finish_reason[slots]).int()
    now_finished = torch.where(live, reason != FINISH_NONE, finished[slots])
    finished[slots] = now_finished
    word = ring_count[slots] | finish_reason[slots].long() << REASON_SHIFT
    published[slots] = torch.where(live, word, published[slots])

    rounds_left.copy_((rounds_left - running.int()).clamp_min(0))
    full = ring_count[slots] - taken[slots] + emitted.shape[1] > ring
    blocked = live & torch.where(now_finished, leave_on_finish, full)
    running.copy_(running & (~now_finished).any() & ~blocked.any() & ~pause & (rounds_left > 0))


def _check_ring(emitted: torch.Tensor, ring_tokens: torch.Tensor) -> None:
    if ring_tokens.shape[1] < emitted.shape[1]:
        raise ValueError(
            f"the ring holds {ring_tokens.shape[1]} tokens, fewer than the {emitted.shape[1]} of one round"
        )


def _commit_cpu(
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
    _check_ring(emitted, ring_tokens)
    if not running.numpy()[0]:
        return
    ends, slots = cu_tokens.tolist(), slot_of_row.tolist()
    emitted_of, accepted_of, failed_of, stops_of = map(
        torch.Tensor.numpy, (emitted, accepted, row_failed, stop_token_ids)
    )
    limit_of, cancel_of, tokens_of, length_of = map(torch.Tensor.numpy, (limit, cancel, tokens, length))
    finished_of, reason_of, ring_of, count_of = map(
        torch.Tensor.numpy, (finished, finish_reason, ring_tokens, ring_count)
    )
    rounds_of, histogram_of, taken_of, published_of = map(torch.Tensor.numpy, (rounds, histogram, taken, published))
    pairs_of = None if round_pairs is None else round_pairs.numpy()
    leave, left = bool(leave_on_finish.numpy()[0]), max(0, int(rounds_left.numpy()[0]) - 1)
    ring, blocked = ring_of.shape[1], False
    for row, slot in enumerate(slots):
        verified = ends[row + 1] - ends[row] - 1
        if verified < 0:
            continue
        last = int(accepted_of[slot])
        if pairs_of is not None and rounds_of[slot] < pairs_of.shape[1]:
            pairs_of[slot, rounds_of[slot]] = verified, last
        rounds_of[slot] += 1
        histogram_of[slot, verified, last] += 1
        if failed_of[slot]:
            reason_of[slot] = FINISH_ERROR
            finished_of[slot] = True
            published_of[slot] = int(count_of[slot]) | FINISH_ERROR << REASON_SHIFT
            blocked |= leave
            continue
        old_length, row_limit = int(length_of[slot]), int(limit_of[slot])
        stop_ids = stops_of[slot].tolist()
        room = max(0, row_limit - old_length)
        new: list[int] = []
        reason = FINISH_NONE
        for token in emitted_of[slot, : last + 1][:room].tolist():
            new.append(token)
            if token >= 0 and token in stop_ids:
                reason = FINISH_STOP
                break
        new_length = old_length + len(new)
        tokens_of[slot, old_length:new_length] = new
        first = int(count_of[slot]) % ring
        before_wrap = ring - first
        ring_of[slot, first : first + len(new)] = new[:before_wrap]
        if len(new) > before_wrap:
            ring_of[slot, : len(new) - before_wrap] = new[before_wrap:]
        length_of[slot] = new_length
        count = int(count_of[slot]) + len(new)
        count_of[slot] = count
        if cancel_of[slot]:
            reason = FINISH_CANCELLED
        elif reason == FINISH_NONE and new_length >= row_limit:
            reason = FINISH_LENGTH
        reason_of[slot] = reason
        finished_of[slot] = reason != FINISH_NONE
        published_of[slot] = count | reason << REASON_SHIFT
        full = count - int(taken_of[slot]) + emitted_of.shape[1] > ring
        blocked |= full if reason == FINISH_NONE else leave
    rounds_left.numpy()[0] = left
    unfinished = not all(finished_of[slot] for slot in slots)
    running.numpy()[0] = unfinished and not blocked and left > 0 and not pause.numpy()[0]


@jit
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
    NUM_ROWS: tl.constexpr,
    EMITTED: tl.constexpr,
    STOPS: tl.constexpr,
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
    for first_row in range(0, NUM_ROWS, ROWS):
        row = first_row + tl.arange(0, ROWS)
        inside = row < NUM_ROWS
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

        candidate = (live & ~failed)[:, None] & (column[None, :] <= last[:, None]) & (column < EMITTED)[None, :]
        new = tl.load(emitted + slot[:, None] * EMITTED + column[None, :], mask=candidate, other=-1)
        is_stop = tl.zeros([ROWS, COLUMNS], dtype=tl.int32)
        for index in range(STOPS):
            stop = tl.load(stop_token_ids + slot * STOPS + index, mask=live, other=-1)
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
        stays = tl.where(reason == 0, new_count - gone + EMITTED <= ring, leave == 0)
        blocked += tl.sum((live & (stays == 0)).to(tl.int32), 0)

        tl.store(rounds + slot, number + 1, mask=live)
        if round_pairs is not None:
            pair = round_pairs + (slot * context + number) * 2
            tl.store(pair, verified, mask=live & (number < context))
            tl.store(pair + 1, last, mask=live & (number < context))
        cell = histogram + (slot * EMITTED + verified) * EMITTED + last
        tl.store(cell, tl.load(cell, mask=live, other=0) + 1, mask=live)

        # The host polls this one word and then reads the tokens, or what a finished row left: the barrier orders all
        # threads' stores before the word, and the release at system scope publishes them with it.
        word = new_count | (reason.to(tl.int64) << SHIFT)
        tl.debug_barrier()
        tl.atomic_xchg(published + slot, word, mask=live, sem="release", scope="sys")
    tl.store(rounds_left, left)
    tl.store(running, (was_running != 0) & (unfinished > 0) & (blocked == 0) & (left > 0) & (paused == 0))


def _sizes(rows: int, emitted: int, stops: int) -> dict[str, int]:
    """The constants of the kernel."""
    columns = next_power_of_2(emitted)
    return {
        "NUM_ROWS": rows,
        "EMITTED": emitted,
        "STOPS": stops,
        "ROWS": min(next_power_of_2(rows), max(1, _TILE // columns)),
        "COLUMNS": columns,
        "STOP": FINISH_STOP,
        "LENGTH": FINISH_LENGTH,
        "CANCELLED": FINISH_CANCELLED,
        "ERROR": FINISH_ERROR,
        "SHIFT": REASON_SHIFT,
    }


def _num_warps(sizes: dict[str, int]) -> int:
    return 1 if sizes["ROWS"] * sizes["COLUMNS"] <= 128 else 4


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
    _check_ring(emitted, ring_tokens)
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
    """The smallest bucket, without drafts and with them, the largest, and one with the tokens of a deep tree."""

    def spec(rows: int, drafts: int, pairs: bool = False) -> KernelSpec:
        arguments = dict.fromkeys(["row_failed", "cancel", "pause", "leave_on_finish", "finished", "running"], "*i1")
        arguments |= dict.fromkeys(["taken", "ring_count", "published", "rounds", "histogram"], "*i64")
        arguments |= dict.fromkeys(["emitted", "accepted", "cu_tokens", "slot_of_row", "stop_token_ids"], "*i32")
        arguments |= {"rounds_left": "*i32"} | ({"round_pairs": "*i32"} if pairs else {})
        arguments |= dict.fromkeys(["limit", "tokens", "length", "finish_reason", "ring_tokens"], "*i32")
        arguments |= {"context": "i32:16", "ring": "i32:16"}
        sizes = _sizes(rows, drafts + 1, 8)
        named = f"{rows} row{'s' if rows > 1 else ''}, {drafts} drafts{', pairs' if pairs else ''}"
        return KernelSpec(
            op="commit",
            variant=named,
            kernel=_commit_kernel,
            arguments=arguments,
            constants=sizes if pairs else sizes | {"round_pairs": None},
            num_warps=_num_warps(sizes),
            num_stages=3,
            shape=f"{named}, 8 stop tokens",
            # Per row 12 for each token, 32 for the stop tokens, eight transfers of 8 bytes and nine of 4.
            bytes_moved=rows * (12 * (drafts + 1) + 32 + 64 + 36 + (8 if pairs else 0)) + 12,
            max_registers=208,
        )

    return [spec(1, 0), spec(1, 7), spec(16, 7), spec(16, 7, pairs=True), spec(16, 64)]


def _commit_fake(*args: torch.Tensor | None) -> None:
    return None


commit = define_op(
    "commit(Tensor emitted, Tensor accepted, Tensor row_failed, Tensor cu_tokens, Tensor slot_of_row, "
    "Tensor stop_token_ids, Tensor limit, Tensor cancel, Tensor pause, Tensor leave_on_finish, Tensor taken, "
    "Tensor(a!) tokens, Tensor(b!) length, Tensor(c!) finished, Tensor(d!) finish_reason, Tensor(e!) ring_tokens, "
    "Tensor(f!) ring_count, Tensor(g!) published, Tensor(h!) rounds, Tensor(i!) histogram, "
    "Tensor(j!)? round_pairs, Tensor(k!) rounds_left, Tensor(l!) running) -> ()",
    cpu=_commit_cpu,
    fake=_commit_fake,
    cuda=commit_triton,
)
"""`draftgraph::commit`; see `commit_reference`."""
