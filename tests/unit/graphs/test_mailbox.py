"""The host's end of the ring: nothing lost, nothing twice, whenever it looks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftgraph.graphs import DecodeState, Mailbox, StateShape
from draftgraph.graphs.state import FINISH_CANCELLED, FINISH_LENGTH, FINISH_NONE, FINISH_STOP, REASON_SHIFT
from draftgraph.kernels.commit import commit

SHAPE = StateShape(slots=2, context=8, num_drafts=3, vocab_size=11, max_bucket=2, max_width=8)


def make_state(shape: StateShape = SHAPE) -> DecodeState:
    return DecodeState.allocate(shape, dtype=torch.float32, device="cpu")


def stores(state: DecodeState, slot: int, tokens: list[int], reason: int = FINISH_NONE):
    """The device's stores for one row of one round, in its order; yields before each."""
    host, size = state.host, state.shape.ring
    count = int(state.ring_count[slot])
    for number, token in enumerate(tokens):
        yield
        host.ring_tokens[slot, (count + number) % size] = token
    yield
    state.finish_reason[slot], state.finished[slot] = reason, reason != FINISH_NONE
    yield
    state.ring_count[slot] = count + len(tokens)
    yield
    host.published[slot] = (count + len(tokens)) | reason << REASON_SHIFT


def publish(state: DecodeState, slot: int, tokens: list[int], reason: int = FINISH_NONE) -> None:
    for _ in stores(state, slot, tokens, reason):
        pass


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(0, 10), max_size=8), max_size=12))
def test_bursts_arrive_whole_and_in_order(bursts):
    state = make_state()
    mailbox = Mailbox(state)
    mailbox.open(1)
    received: list[int] = []
    for burst in bursts:
        publish(state, 1, burst)
        received += mailbox.collect(1).tokens
        assert state.taken[1] == len(received)
        assert mailbox.collect(1).tokens == []
    assert received == [t for burst in bursts for t in burst]


@settings(deadline=None, max_examples=60)
@given(data=st.data(), ring=st.integers(4, 9))
def test_a_look_between_any_two_stores_sees_whole_rounds(data, ring):
    """The host may look before each single store of the device: it sees all of a round or nothing of it."""
    state = make_state(StateShape(**{**vars(SHAPE), "ring": ring}))
    mailbox = Mailbox(state)
    received: list[int] = []
    sent: list[int] = []
    reason = FINISH_NONE
    while reason == FINISH_NONE:
        tokens = data.draw(st.lists(st.integers(0, 10), min_size=1, max_size=4))
        if len(sent) + len(tokens) > 30 or data.draw(st.integers(0, 9)) == 0:
            reason = data.draw(st.sampled_from([FINISH_STOP, FINISH_LENGTH, FINISH_CANCELLED]))
        while len(sent) - int(state.taken[0]) + 4 > ring:  # the device has left its loop until there is room
            received += mailbox.collect(0).tokens
        for _ in stores(state, 0, tokens, reason):
            if data.draw(st.integers(0, 3)) == 0:
                delivery = mailbox.collect(0)
                received += delivery.tokens
                assert not delivery.finished
                assert received == sent
        sent += tokens
    delivery = mailbox.collect(0)
    assert delivery.finish_reason == reason
    assert delivery.finished
    assert received + delivery.tokens == sent
    assert mailbox.collect(0).tokens == []


def test_an_overrun_is_an_error_not_a_loss():
    state = make_state()
    mailbox = Mailbox(state)
    publish(state, 0, list(range(9)))
    with pytest.raises(RuntimeError, match="slot 0 overflowed: 9 tokens unread, 8 kept"):
        mailbox.collect(0)


def test_opening_a_slot_forgets_the_request_before():
    state = make_state()
    mailbox = Mailbox(state)
    publish(state, 0, [1, 2], FINISH_STOP)
    mailbox.cancel(0)
    assert state.cancel[0]
    mailbox.open(0)
    state.ring_count[0] = 0
    assert mailbox.collect(0).tokens == []
    assert not mailbox.collect(0).finished
    assert not state.cancel[0]
    publish(state, 0, [3], FINISH_LENGTH)
    delivery = mailbox.collect(0)
    assert (delivery.tokens, delivery.finished, delivery.finish_reason) == ([3], True, FINISH_LENGTH)


def test_the_largest_count_and_reason_fit_the_word():
    state = make_state()
    mailbox = Mailbox(state)
    state.published[0] = 2**40 + 5 | 4 << REASON_SHIFT
    mailbox._seen[0] = 2**40 + 3
    state.ring_tokens[0, (2**40 + 3) % 8], state.ring_tokens[0, (2**40 + 4) % 8] = 7, 9
    delivery = mailbox.collect(0)
    assert (delivery.tokens, delivery.finish_reason) == ([7, 9], 4)


@pytest.mark.parametrize(("ring", "kept"), [(0, 8), (4, 4), (100, 100)])
def test_the_ring_has_the_size_asked_for(ring, kept):
    shape = StateShape(**{**vars(SHAPE), "ring": ring})
    assert shape.ring == kept
    assert make_state(shape).ring_tokens.shape == (3, kept)


@pytest.mark.parametrize("ring", [-1, 3])
def test_a_ring_too_small_for_a_round_is_refused(ring):
    with pytest.raises(ValueError, match=f"ring must .*got {ring}"):
        StateShape(**{**vars(SHAPE), "ring": ring})


# The commit op on one side, the host on the other

STOP, PROMPT = 10, 3


class Device:
    """Rows that emit given streams of tokens through the commit op, some of each round's window at a time."""

    def __init__(self, state: DecodeState, streams: list[list[int]], limits: list[int]) -> None:
        self.state, self.streams = state, streams
        self.slots = list(range(len(streams)))
        for slot, limit in enumerate(limits):
            state.length[slot], state.limit[slot], state.finished[slot] = PROMPT, PROMPT + limit, False
            state.stop_token_ids[slot, 0] = STOP
        state.slot_of_row[:] = torch.tensor(self.slots + [state.reserved_slot] * (4 - len(self.slots)))

    def round(self, accepted: list[int]) -> None:
        """One round: row i emits `accepted[i]` drafts and one more token."""
        s = self.state
        ends = [0]
        for slot in s.slot_of_row.tolist():
            ends.append(ends[-1] + (0 if s.finished[slot] else s.shape.num_drafts + 1))
        s.cu_tokens[:] = torch.tensor(ends)
        for slot in self.slots:
            at = int(s.length[slot]) - PROMPT
            s.accepted[slot] = accepted[slot]
            s.emitted[slot] = torch.tensor((self.streams[slot][at:] + [0] * 4)[:4])
        flags = (s.cancel, s.pause, s.leave_on_finish, s.taken)
        counters = (s.ring_tokens, s.ring_count, s.published, s.rounds, s.histogram, s.round_pairs)
        commit(
            *(s.emitted, s.accepted, s.failed, s.cu_tokens, s.slot_of_row, s.stop_token_ids, s.limit),
            *flags,
            *(s.tokens, s.length, s.finished, s.finish_reason),
            *counters,
            *(s.rounds_left, s.running),
        )


@settings(deadline=None, max_examples=120)
@given(data=st.data(), rows=st.integers(1, 4), ring=st.integers(4, 12))
def test_the_host_gets_every_row_whole_however_it_looks_and_interferes(data, rows, ring):
    """Stop tokens and limits inside a window, cancelling, pausing, leaving when a row finishes, a budget of rounds,
    rings smaller than the answers: what arrives is the stream, cut where the row ended."""
    shape = StateShape(slots=4, context=48, num_drafts=3, vocab_size=11, max_bucket=4, max_width=16, ring=ring)
    state = make_state(shape)
    streams = data.draw(
        st.lists(st.lists(st.integers(0, STOP), min_size=40, max_size=40), min_size=rows, max_size=rows)
    )
    limits = data.draw(st.lists(st.integers(1, 40), min_size=rows, max_size=rows))
    device, mailbox, host = Device(state, streams, limits), Mailbox(state), state.host
    received: list[list[int]] = [[] for _ in range(rows)]
    reasons, cancelled = [FINISH_NONE] * rows, [False] * rows

    def look() -> None:
        for slot in range(rows):
            delivery = mailbox.collect(slot)
            assert reasons[slot] == FINISH_NONE or not delivery.tokens
            received[slot] += delivery.tokens
            reasons[slot] = delivery.finish_reason

    launches = 0
    while FINISH_NONE in reasons:
        look()  # between two loops, so that every row has room
        host.pause[0], host.leave_on_finish[0] = False, data.draw(st.booleans())
        budget = data.draw(st.sampled_from([1, 2, 3, 1000]))
        state.rounds_left[0], state.running[0] = budget, True
        launches += 1
        rounds = 0
        while state.running[0]:
            before = state.finished[:rows].clone()
            device.round(data.draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows)))
            rounds += 1
            room = all(
                int(state.ring_count[i]) - int(state.taken[i]) + 4 <= ring for i in range(rows) if not state.finished[i]
            )
            leave = bool(state.leave_on_finish[0]) and not torch.equal(before, state.finished[:rows])
            going = not bool(state.finished[:rows].all()) and room and not leave
            assert bool(state.running[0]) == (going and not state.pause[0] and rounds < budget)
            match data.draw(st.sampled_from(["", "look", "cancel", "pause"])):
                case "look":
                    look()
                case "cancel":
                    slot = data.draw(st.integers(0, rows - 1))
                    cancelled[slot] = cancelled[slot] or not state.finished[slot]
                    mailbox.cancel(slot)
                case "pause":
                    host.pause[0] = True
        look()
    assert launches <= 40 * rows
    for slot in range(rows):
        whole = streams[slot][: limits[slot]]
        whole = whole[: whole.index(STOP) + 1] if STOP in whole else whole
        if cancelled[slot]:
            assert reasons[slot] == FINISH_CANCELLED
            assert received[slot] == whole[: len(received[slot])]
        else:
            assert received[slot] == whole
            assert reasons[slot] == (FINISH_STOP if STOP in whole else FINISH_LENGTH)
        assert received[slot] == state.tokens[slot, PROMPT : int(state.length[slot])].tolist()
