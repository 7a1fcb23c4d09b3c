"""The host's end of the ring: nothing lost, nothing twice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftgraph.graphs import DecodeState, Mailbox, StateShape

SHAPE = StateShape(slots=2, context=8, num_drafts=3, vocab_size=11, max_bucket=2, max_width=8)


def publish(state: DecodeState, slot: int, tokens: list[int]) -> None:
    size = state.ring_tokens.shape[1]
    for token in tokens:
        state.ring_tokens[slot, int(state.ring_count[slot]) % size] = token
        state.ring_count[slot] += 1


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(0, 10), max_size=8), max_size=12))
def test_bursts_arrive_whole_and_in_order(bursts):
    state = DecodeState.allocate(SHAPE, dtype=torch.float32, device="cpu")
    mailbox = Mailbox(state)
    mailbox.open(1)
    received: list[int] = []
    for burst in bursts:
        publish(state, 1, burst)
        received += mailbox.collect(1).tokens
        assert mailbox.collect(1).tokens == []
    assert received == [t for burst in bursts for t in burst]


def test_an_overrun_is_an_error_not_a_loss():
    state = DecodeState.allocate(SHAPE, dtype=torch.float32, device="cpu")
    mailbox = Mailbox(state)
    publish(state, 0, list(range(9)))
    with pytest.raises(RuntimeError, match="slot 0 overflowed: 9 tokens unread, 8 kept"):
        mailbox.collect(0)


def test_opening_a_slot_forgets_the_request_before():
    state = DecodeState.allocate(SHAPE, dtype=torch.float32, device="cpu")
    mailbox = Mailbox(state)
    publish(state, 0, [1, 2])
    mailbox.open(0)
    assert mailbox.collect(0).tokens == []
    publish(state, 0, [3])
    state.finished[0] = True
    state.finish_reason[0] = 2
    delivery = mailbox.collect(0)
    assert (delivery.tokens, delivery.finished, delivery.finish_reason) == ([3], True, 2)
