import dataclasses
import json

import pytest

from draftgraph.runtime.outputs import GenerationResult, RequestMetrics, StreamChunk, TokenLogprobs

# K = 2. Rounds: 1 without drafts; 2 with one draft (one of them accepted); 4 with two (0, 1, 2, 2 accepted).
HISTOGRAM = [[1, 0, 0], [1, 1, 0], [1, 1, 2]]


def example(**changes):
    values = {
        "prompt_tokens": 5,
        "reused_prompt_tokens": 2,
        "output_tokens": 4,
        "submitted": 10.0,
        "token_times": [10.5, 11.0, 11.0, 11.5],
    }
    return RequestMetrics.from_histogram(HISTOGRAM, **(values | changes))


def test_counts_and_rates():
    metrics = example()
    assert metrics.rounds == 7
    assert metrics.proposed_tokens == 2 * 1 + 4 * 2
    assert metrics.accepted_tokens == 1 + (1 + 2 + 2)
    assert metrics.mean_acceptance_length == pytest.approx(1 + 6 / 7)
    assert metrics.draft_acceptance_rate == pytest.approx(6 / 10)
    # Position 0 was verified in 6 rounds and accepted in 1 + 3; position 1 in 4 and accepted in 2.
    assert metrics.acceptance_by_position == pytest.approx((4 / 6, 2 / 4))
    assert metrics.acceptance_histogram == ((1, 0, 0), (1, 1, 0), (1, 1, 2))
    assert metrics.round_pairs is None


def test_times():
    metrics = example()
    assert metrics.time_to_first_token == pytest.approx(0.5)
    assert metrics.inter_token_latencies == pytest.approx((0.5, 0.0, 0.5))
    assert metrics.total_time == pytest.approx(1.5)
    assert metrics.tokens_per_second == pytest.approx(3.0)
    assert example(finished=13.0).total_time == pytest.approx(3.0)


def test_without_drafts_and_without_tokens():
    plain = RequestMetrics.from_histogram(
        [[3]], prompt_tokens=1, output_tokens=4, submitted=0.0, token_times=[1.0, 2.0, 3.0, 4.0]
    )
    assert plain.rounds == 3
    assert plain.mean_acceptance_length == 1.0
    assert plain.draft_acceptance_rate == 0.0
    assert plain.acceptance_by_position == ()
    empty = RequestMetrics.from_histogram(
        [[0, 0], [0, 0]], prompt_tokens=1, output_tokens=0, submitted=2.0, token_times=[], finished=5.0
    )
    assert empty.mean_acceptance_length == 1.0
    assert empty.acceptance_by_position == (0.0,)
    assert empty.time_to_first_token == empty.total_time == 3.0
    assert empty.tokens_per_second == 0.0


def test_a_result_goes_through_json():
    result = GenerationResult(
        text="héllo",
        token_ids=(1, 2),
        finish_reason="stop",
        stop_reason=2,
        logprobs=(TokenLogprobs(token_id=1, logprob=-0.5, top=((1, -0.5), (3, -1.0))),),
        metrics=example(round_pairs=[(2, 1), (1, 0)]),
        prompt_token_ids=(7,),
        seed=3,
    )
    document = json.loads(json.dumps(result.to_dict()))
    assert document["text"] == "héllo"
    assert document["token_ids"] == [1, 2]
    assert document["finish_reason"] == "stop"
    assert document["stop_reason"] == 2
    assert document["logprobs"] == [{"token_id": 1, "logprob": -0.5, "top": [[1, -0.5], [3, -1.0]]}]
    assert document["metrics"]["round_pairs"] == [[2, 1], [1, 0]]
    assert document["metrics"]["rounds"] == 7
    assert document["metrics"]["mean_acceptance_length"] == pytest.approx(1 + 6 / 7)
    assert document["metrics"]["tokens_per_second"] == pytest.approx(3.0)
    assert document["error"] is None


def test_frozen():
    chunk = StreamChunk(text="a", token_ids=(1,))
    with pytest.raises(dataclasses.FrozenInstanceError):
        chunk.text = "b"
