"""Ends a round: appends what accept emitted, finishes rows, fills the output ring and the counters."""

from __future__ import annotations

import torch

from .commit_triton import check_ring, commit_triton
from .finish_reasons import (
    FINISH_CANCELLED,
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_NONE,
    FINISH_STOP,
    REASON_SHIFT,
)
from .registration import define_op


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
    check_ring(emitted, ring_tokens)
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
    check_ring(emitted, ring_tokens)
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
