from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import assert_same_effect, check_capture_safe, check_registration, random_round

from draftgraph.graphs import state as state_module
from draftgraph.graphs.state import DecodeState
from draftgraph.kernels import finish_reasons
from draftgraph.kernels.commit import commit, commit_reference


def arguments(state: DecodeState, bucket: int, pairs: bool = True) -> list[Any]:
    return [
        state.emitted,
        state.accepted,
        state.failed,
        state.cu_tokens[: bucket + 1],
        state.slot_of_row[:bucket],
        state.stop_token_ids,
        state.limit,
        state.cancel,
        state.pause,
        state.leave_on_finish,
        state.taken,
        state.tokens,
        state.length,
        state.finished,
        state.finish_reason,
        state.ring_tokens,
        state.ring_count,
        state.published,
        state.rounds,
        state.histogram,
        state.round_pairs if pairs else None,
        state.rounds_left,
        state.running,
    ]


def one_row(*, emitted: list[int], accepted: int, verified: int = 3) -> tuple[DecodeState, int]:
    """A bucket of one live row of length 5 and limit 20 that emits `emitted`; no stop tokens."""
    state, _ = random_round(0, rows=1, num_drafts=3)
    slot = int(state.slot_of_row[0])
    state.cu_tokens[:2] = torch.tensor([0, verified + 1])
    state.finished[slot], state.failed[slot], state.cancel[slot], state.pause[0] = False, False, False, False
    state.stop_token_ids[slot] = -1
    state.length[slot], state.limit[slot], state.accepted[slot] = 5, 20, accepted
    state.ring_count[slot] = state.taken[slot] = 22  # of 24: a round of three wraps
    state.rounds[slot], state.rounds_left[0], state.leave_on_finish[0] = 0, 9, False
    state.running[0] = True
    state.emitted[slot] = torch.tensor(emitted)
    return state, slot


def test_codes_are_those_of_the_state() -> None:
    names = [name for name in vars(state_module) if name.startswith("FINISH_")]
    assert len(names) == 5
    for name in [*names, "REASON_SHIFT"]:
        assert getattr(finish_reasons, name) == getattr(state_module, name)


@given(seed=st.integers(0, 10**6), rows=st.integers(1, 5), num_drafts=st.integers(0, 4), pairs=st.booleans())
@settings(max_examples=300, deadline=None)
def test_cpu_equals_reference(seed: int, rows: int, num_drafts: int, pairs: bool) -> None:
    state, bucket = random_round(seed, rows=rows, num_drafts=num_drafts)
    assert_same_effect(commit, commit_reference, arguments(state, bucket, pairs))


BOTH = pytest.mark.parametrize("run", [commit, commit_reference])


@BOTH
def test_appends_and_wraps_the_ring(run: Any) -> None:
    state, slot = one_row(emitted=[4, 5, 6, 0], accepted=2)
    run(*arguments(state, 1))
    assert state.tokens[slot, 5:8].tolist() == [4, 5, 6]
    assert state.length[slot] == 8
    assert state.ring_tokens[slot, 22:].tolist() == [4, 5]
    assert state.ring_tokens[slot, :1].tolist() == [6]
    assert state.ring_count[slot] == state.published[slot] == 25
    assert state.rounds[slot] == 1
    assert state.round_pairs[slot, 0].tolist() == [3, 2]
    assert state.rounds_left[0] == 8
    assert state.histogram[slot, 3, 2] == 1
    assert state.histogram.sum() == 1
    assert not state.finished[slot]
    assert state.running[0]


@BOTH
def test_stops_after_the_first_stop_token(run: Any) -> None:
    state, slot = one_row(emitted=[4, 5, 5, 6], accepted=3)
    state.stop_token_ids[slot, 1] = 5
    run(*arguments(state, 1))
    assert state.length[slot] == 7
    assert state.finish_reason[slot] == state_module.FINISH_STOP
    assert state.finished[slot]
    assert not state.running[0]


@BOTH
@pytest.mark.parametrize(("limit", "reason", "length"), [(6, 2, 6), (7, 1, 7), (5, 2, 5), (9, 1, 7)])
def test_limit_and_stop(run: Any, limit: int, reason: int, length: int) -> None:
    """The stop token is the second of four: it counts when it is appended, also as the last that may be."""
    state, slot = one_row(emitted=[4, 5, 1, 6], accepted=3)
    state.stop_token_ids[slot, 0] = 5
    state.limit[slot] = limit
    run(*arguments(state, 1))
    assert state.length[slot] == length
    assert state.finish_reason[slot] == reason


@BOTH
def test_minus_one_never_stops(run: Any) -> None:
    state, slot = one_row(emitted=[4, -1, 1, 6], accepted=3)
    run(*arguments(state, 1))
    assert state.length[slot] == 9
    assert not state.finished[slot]


@BOTH
def test_failure_appends_nothing_and_wins(run: Any) -> None:
    state, slot = one_row(emitted=[4, 5, 1, 6], accepted=3)
    state.failed[slot], state.cancel[slot] = True, True
    before = state.tokens.clone()
    run(*arguments(state, 1))
    assert torch.equal(state.tokens, before)
    assert state.length[slot] == 5
    assert state.ring_count[slot] == 22
    assert state.published[slot] == 22 + (state_module.FINISH_ERROR << state_module.REASON_SHIFT)
    assert state.finish_reason[slot] == state_module.FINISH_ERROR
    assert state.rounds[slot] == 1


@BOTH
def test_cancel_appends_then_finishes(run: Any) -> None:
    state, slot = one_row(emitted=[4, 5, 1, 6], accepted=1)
    state.cancel[slot] = True
    run(*arguments(state, 1))
    assert state.length[slot] == 7
    assert state.finish_reason[slot] == state_module.FINISH_CANCELLED
    assert state.published[slot] == 24 + (state_module.FINISH_CANCELLED << state_module.REASON_SHIFT)


@BOTH
def test_pause_leaves_the_loop_with_the_row_unfinished(run: Any) -> None:
    state, slot = one_row(emitted=[4, 5, 1, 6], accepted=1)
    state.pause[0] = True
    run(*arguments(state, 1))
    assert not state.running[0]
    assert not state.finished[slot]


@BOTH
@pytest.mark.parametrize(("left", "running", "after"), [(2, True, 1), (1, False, 0), (0, False, 0)])
def test_the_loop_ends_when_no_rounds_are_left(run: Any, left: int, running: bool, after: int) -> None:
    state, slot = one_row(emitted=[4, 5, 1, 6], accepted=1)
    state.rounds_left[0] = left
    run(*arguments(state, 1))
    assert bool(state.running[0]) == running
    assert state.rounds_left[0] == after
    assert not state.finished[slot]


@BOTH
@pytest.mark.parametrize(("taken", "running"), [(4, True), (3, False)])
def test_a_ring_without_room_for_another_round_ends_the_loop(run: Any, taken: int, running: bool) -> None:
    """Of the ring's 24 places 20 are in use after this round, and the next may need 4; or 21 are."""
    state, slot = one_row(emitted=[4, 5, 1, 6], accepted=1)
    state.taken[slot] = taken
    run(*arguments(state, 1))
    assert state.ring_count[slot] == 24
    assert bool(state.running[0]) == running


@BOTH
@pytest.mark.parametrize("leave", [True, False])
@pytest.mark.parametrize("end", ["limit", "failed", "before"])
def test_a_row_that_finishes_ends_the_loop_if_others_wait(run: Any, leave: bool, end: str) -> None:
    """Of two rows one finishes in this round, or had finished before it."""
    state, bucket = random_round(0, rows=2, num_drafts=3)
    slots = state.slot_of_row[:2].long()
    state.finished[slots], state.failed[slots], state.cancel[slots], state.pause[0] = False, False, False, False
    state.stop_token_ids[slots] = -1
    state.running[0] = True
    state.length[slots], state.limit[slots], state.accepted[slots] = 5, 20, 0
    state.cu_tokens[:] = torch.tensor([0, 2] + [4] * (bucket - 1))
    state.ring_count[slots], state.taken[slots], state.rounds_left[0], state.leave_on_finish[0] = 0, 0, 9, leave
    if end == "limit":
        state.limit[slots[0]] = 6
    elif end == "failed":
        state.failed[slots[0]] = True
    else:
        state.finished[slots[0]] = True
        state.cu_tokens[1:] = 2
        state.cu_tokens[1] = 0
    run(*arguments(state, bucket))
    assert state.finished[slots].tolist() == [True, False]
    assert bool(state.running[0]) == (end == "before" or not leave)


@BOTH
def test_rounds_past_the_table_of_pairs_are_left_out(run: Any) -> None:
    state, slot = one_row(emitted=[4, 5, 1, 6], accepted=1)
    state.rounds[slot] = 24
    before = state.round_pairs.clone()
    run(*arguments(state, 1))
    assert torch.equal(state.round_pairs, before)
    assert state.rounds[slot] == 25


@BOTH
def test_finished_rows_are_untouched(run: Any) -> None:
    state, slot = one_row(emitted=[4, 5, 1, 6], accepted=1)
    state.finished[slot] = True
    state.cancel[slot] = True
    state.cu_tokens[:2] = 0
    before = {name: tensor.clone() for name, tensor in state.tensors().items()}
    run(*arguments(state, 1))
    before["running"][0] = False
    before["rounds_left"] -= 1
    for name, tensor in state.tensors().items():
        assert torch.equal(tensor, before[name]), name


@BOTH
def test_ring_smaller_than_a_round_is_refused(run: Any) -> None:
    args = arguments(*one_row(emitted=[4, 5, 1, 6], accepted=1))
    args[15] = args[15][:, :3].contiguous()
    with pytest.raises(ValueError, match="ring holds 3 tokens"):
        run(*args)


@pytest.mark.parametrize("pairs", [False, True])
def test_reference_is_capture_safe(pairs: bool) -> None:
    check_capture_safe(commit_reference, arguments(*random_round(2), pairs))


@pytest.mark.parametrize("pairs", [False, True])
def test_registration(pairs: bool) -> None:
    check_registration(commit, arguments(*random_round(3), pairs))


@BOTH
def test_a_round_after_the_end_of_the_loop_changes_nothing(run: Any) -> None:
    """It was launched before the host knew; the ring may be full, for one."""
    state, _ = one_row(emitted=[4, 5, 6, 0], accepted=2)
    state.running[0] = False
    before = {name: tensor.clone() for name, tensor in state.tensors().items()}
    run(*arguments(state, 1))
    for name, tensor in state.tensors().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True, msg=name)
