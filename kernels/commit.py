"""Ends a round: appends what accept emitted, finishes rows, fills the output ring and the counters."""

from __future__ import annotations

import torch

from .registration import define_op

# The codes of `graphs/state.py`, which this package may not import; a test holds them equal.
FINISH_NONE = 0
FINISH_STOP = 1
FINISH_LENGTH = 2
FINISH_CANCELLED = 3
FINISH_ERROR = 4


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
    tokens: torch.Tensor,
    length: torch.Tensor,
    finished: torch.Tensor,
    finish_reason: torch.Tensor,
    ring_tokens: torch.Tensor,
    ring_count: torch.Tensor,
    rounds: torch.Tensor,
    histogram: torch.Tensor,
    running: torch.Tensor,
) -> None:
    """The specification of `commit`; reads nothing on the host.

    Only rows with a nonempty window take part. Such a row appends its `accepted + 1` emitted tokens, up to
    and including the first stop token and never past its limit. It finishes, by falling precedence, with
    `error` (the target's logits were not finite; nothing is appended), `cancelled`, `stop` (a stop token was
    appended) or `length` (the limit is reached).

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
        tokens: int32 [R1, C], written.
        length: int32 [R1], at least 1, written.
        finished: bool [R1], written.
        finish_reason: int32 [R1], written.
        ring_tokens: int32 [R1, L], written at index `count % L`; L is at least K + 1.
        ring_count: int64 [R1], written, after the ring.
        rounds: int64 [R1], plus 1.
        histogram: int64 [R1, K + 1, K + 1], plus 1 at (drafts verified, drafts accepted).
        running: bool [1], written: some row of the bucket is unfinished, and no pause is asked for.

    Raises:
        ValueError: the ring does not hold the tokens of one round.
    """
    _check_ring(emitted, ring_tokens)
    context, ring = tokens.shape[1], ring_tokens.shape[1]
    # A row has at least one committed token, so it never appends as many as `context`.
    columns = min(emitted.shape[1], context)
    slots = slot_of_row.long()
    verified = cu_tokens[1:] - cu_tokens[:-1] - 1
    live = verified >= 0
    last = accepted[slots]

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
    running.copy_((~now_finished).any(0, keepdim=True) & ~pause)


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
    tokens: torch.Tensor,
    length: torch.Tensor,
    finished: torch.Tensor,
    finish_reason: torch.Tensor,
    ring_tokens: torch.Tensor,
    ring_count: torch.Tensor,
    rounds: torch.Tensor,
    histogram: torch.Tensor,
    running: torch.Tensor,
) -> None:
    _check_ring(emitted, ring_tokens)
    ends, slots = cu_tokens.tolist(), slot_of_row.tolist()
    emitted_of, accepted_of, failed_of, stops_of = map(
        torch.Tensor.numpy, (emitted, accepted, row_failed, stop_token_ids)
    )
    limit_of, cancel_of, tokens_of, length_of = map(torch.Tensor.numpy, (limit, cancel, tokens, length))
    finished_of, reason_of, ring_of, count_of = map(
        torch.Tensor.numpy, (finished, finish_reason, ring_tokens, ring_count)
    )
    rounds_of, histogram_of = rounds.numpy(), histogram.numpy()
    ring = ring_of.shape[1]
    for row, slot in enumerate(slots):
        verified = ends[row + 1] - ends[row] - 1
        if verified < 0:
            continue
        last = int(accepted_of[slot])
        rounds_of[slot] += 1
        histogram_of[slot, verified, last] += 1
        if failed_of[slot]:
            reason_of[slot] = FINISH_ERROR
            finished_of[slot] = True
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
        count_of[slot] += len(new)
        if cancel_of[slot]:
            reason = FINISH_CANCELLED
        elif reason == FINISH_NONE and new_length >= row_limit:
            reason = FINISH_LENGTH
        reason_of[slot] = reason
        finished_of[slot] = reason != FINISH_NONE
    running.numpy()[0] = not pause.numpy()[0] and not all(finished_of[slot] for slot in slots)


def _commit_fake(*args: torch.Tensor) -> None:
    return None


commit = define_op(
    "commit(Tensor emitted, Tensor accepted, Tensor row_failed, Tensor cu_tokens, Tensor slot_of_row, "
    "Tensor stop_token_ids, Tensor limit, Tensor cancel, Tensor pause, Tensor(a!) tokens, Tensor(b!) length, "
    "Tensor(c!) finished, Tensor(d!) finish_reason, Tensor(e!) ring_tokens, Tensor(f!) ring_count, "
    "Tensor(g!) rounds, Tensor(h!) histogram, Tensor(i!) running) -> ()",
    cpu=_commit_cpu,
    fake=_commit_fake,
)
"""`draftgraph::commit`; see `commit_reference`."""
