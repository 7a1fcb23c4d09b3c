from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import assert_same_effect, check_capture_safe, check_registration, random_round

from draftgraph.graphs.state import DecodeState
from draftgraph.kernels.record_logprobs import record_logprobs, record_logprobs_reference

BOTH = pytest.mark.parametrize("record", [record_logprobs, record_logprobs_reference])


def arguments(state: DecodeState, bucket: int, count: int) -> list[Any]:
    shape = (*state.tokens.shape, count + 1)
    return [
        state.logits,
        state.emitted,
        state.accepted,
        state.failed,
        state.cu_tokens[: bucket + 1],
        state.slot_of_row[:bucket],
        state.length,
        torch.full(shape, 7.0),
        torch.full(shape, -7, dtype=torch.int32),
    ]


@given(
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from([5, 7, 130]),
    num_drafts=st.integers(0, 4),
    count=st.integers(0, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    coarse=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_cpu_equals_reference(
    seed: int, vocab: int, num_drafts: int, count: int, dtype: torch.dtype, coarse: bool
) -> None:
    state, bucket = random_round(seed, vocab=vocab, num_drafts=num_drafts, dtype=dtype)
    if coarse:
        state.logits.copy_(state.logits.round())
    state.logits[:, 1] = -torch.inf
    assert_same_effect(record_logprobs, record_logprobs_reference, arguments(state, bucket, count))


@BOTH
def test_against_log_softmax(record: Any) -> None:
    count = 4
    for seed in range(20):
        state, bucket = random_round(seed, vocab=50)
        args = arguments(state, bucket, count)
        record(*args)
        logprobs, tokens = args[7:]
        recorded = torch.zeros(state.tokens.shape, dtype=torch.bool)
        for row in range(bucket):
            slot, begin = int(state.slot_of_row[row]), int(state.cu_tokens[row])
            if begin == state.cu_tokens[row + 1] or state.failed[slot]:
                continue
            for j in range(int(state.accepted[slot]) + 1):
                position = int(state.length[slot]) + j
                if position >= state.shape.context:
                    continue
                expected = state.logits[begin + j].log_softmax(0)
                best = expected.topk(count)
                recorded[slot, position] = True
                assert tokens[slot, position, 0] == state.emitted[slot, j]
                assert tokens[slot, position, 1:].tolist() == best.indices.tolist()
                wanted = torch.cat([expected[state.emitted[slot, j]][None], best.values])
                assert torch.allclose(logprobs[slot, position], wanted, atol=2e-6, rtol=1e-6)
        assert (logprobs[~recorded] == 7).all()
        assert (tokens[~recorded] == -7).all()


@BOTH
def test_ties_take_the_lower_id_first(record: Any) -> None:
    state, _ = random_round(0, rows=1, vocab=6)
    slot = int(state.slot_of_row[0])
    state.cu_tokens[:2] = torch.tensor([0, 1])
    state.accepted[slot], state.failed[slot], state.length[slot], state.emitted[slot, 0] = 0, False, 3, 4
    state.logits[0] = torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0, 0.0])
    args = arguments(state, 1, 4)
    record(*args)
    assert args[8][slot, 3].tolist() == [4, 1, 3, 0, 2]


def test_reference_is_capture_safe() -> None:
    check_capture_safe(record_logprobs_reference, arguments(*random_round(2), 3))


def test_registration() -> None:
    check_registration(record_logprobs, arguments(*random_round(3), 3))
