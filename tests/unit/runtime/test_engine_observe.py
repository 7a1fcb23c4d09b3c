"""An engine under observation: the same tokens, and every request, round and step seen."""

from __future__ import annotations

import threading

import pytest
import torch

from draftgraph import Engine, SamplingParams
from draftgraph.graphs import HostExecutor
from draftgraph.profiling import Observer, RoundShape, StepTimer, phase_seconds, total_calls, total_seconds

PROMPT = "Repeat after me: one two three, one two three."
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


class Requests(Observer):
    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        self.prompt_tokens: list[int] = []

    def request_started(self, number: int, prompt_tokens: int) -> None:
        self.seen.append(("started", number))
        self.prompt_tokens.append(prompt_tokens)

    def request_decoding(self, number: int) -> None:
        self.seen.append(("decoding", number))

    def request_finished(self, number: int) -> None:
        self.seen.append(("finished", number))


def test_an_observed_answer_is_the_same_and_its_rounds_are_counted(engine):
    plain = engine.generate(PROMPT, PARAMS)
    timer = StepTimer("cpu")
    with engine.observe(timer):
        observed = engine.generate(PROMPT, PARAMS)
    assert observed.token_ids == plain.token_ids
    table = timer.table()
    assert total_calls(table) == observed.metrics.rounds
    assert {row.bucket for row in table if row.name.is_round} == {1}
    phases = phase_seconds(table)
    assert {"propose", "budget", "verify", "accept", "commit"} <= set(phases)
    assert 0.0 < sum(phases.values()) <= total_seconds(table)
    verifies = [row for row in table if row.phase == "verify"]
    assert sum(row.calls for row in verifies) == observed.metrics.rounds
    assert all(row.width in (4, 8) for row in verifies)
    again = engine.generate(PROMPT, PARAMS)
    assert again.token_ids == plain.token_ids
    assert timer.table() == table


def test_log_probabilities_are_a_phase_of_their_own(engine):
    timer = StepTimer("cpu")
    with engine.observe(timer):
        engine.generate(PROMPT, SamplingParams(max_tokens=4, logprobs=2, ignore_eos=True))
    assert phase_seconds(timer.table())["logprobs"] > 0.0


def test_requests_start_decode_and_finish(engine):
    requests = Requests()
    with engine.observe(requests):
        engine.generate([PROMPT, "def add(a, b):"], PARAMS)
    first, second = sorted({number for _, number in requests.seen})
    for number in (first, second):
        events = [event for event, n in requests.seen if n == number]
        assert events == ["started", "decoding", "finished"]
    assert requests.prompt_tokens[0] > requests.prompt_tokens[1] > 0


def test_an_observer_that_comes_in_the_middle_is_told_of_requests_under_way(engine):
    requests = Requests()
    with engine.stream(PROMPT, PARAMS) as stream:
        next(iter(stream))
        with engine.observe(requests):
            next(iter(stream))
            assert [event for event, _ in requests.seen] == ["started", "decoding"]
        assert [event for event, _ in requests.seen] == ["started", "decoding", "finished"]
        rest = [token for chunk in stream for token in chunk.token_ids]
    assert rest
    assert len(requests.seen) == 3


def test_two_observers_and_another_thread(engine):
    timer, requests = StepTimer("cpu"), Requests()
    results = []
    with engine.observe(timer):
        thread = threading.Thread(target=lambda: results.append(engine.generate(PROMPT, PARAMS)))
        thread.start()
        with engine.observe(requests):
            results.append(engine.generate(PROMPT, PARAMS))
        thread.join()
    assert results[0].token_ids == results[1].token_ids
    assert 0 < total_calls(timer.table()) <= sum(r.metrics.rounds for r in results)
    assert ("finished", requests.seen[0][1]) in requests.seen


def test_an_error_in_the_block_still_detaches(engine):
    timer = StepTimer("cpu")
    with pytest.raises(KeyError), engine.observe(timer):
        raise KeyError("mine")
    engine.generate(PROMPT, PARAMS)
    assert timer.table() == []


def test_the_engine_knows_the_floor_of_its_rounds(engine):
    shape = RoundShape(rows=1, width=8, window=5, context=10, num_drafts=4, dtype=torch.float32)
    costs = engine.round_costs(shape)
    assert list(costs) == ["propose", "budget", "verify", "accept", "commit"]
    # The tiny model's weights: 2 layers of hidden 48, 4 and 2 heads of 16, feed-forward 96, an own head.
    layer = 48 * (4 + 2 + 2) * 16 + 64 * 48 + 3 * 48 * 96 + 2 * 48
    vocabulary = len(engine.tokenizer)
    weights = 2 * layer + 48 + 48 * vocabulary
    assert costs["verify"].bytes_read == 4 * (weights + 8 * 48 + 10 * 2 * 2 * 2 * 16 + 5)
    assert engine.prefill_cost(width=16, tokens=9, context=0).bytes_read == 4 * (weights - 48 * vocabulary + 16 * 48)


def test_an_observer_is_attached_once_at_a_time(engine):
    timer = StepTimer("cpu")
    with (
        engine.observe(timer),
        pytest.raises(ValueError, match="attached to the engine already"),
        engine.observe(timer),
    ):
        pass
    with engine.observe(timer):
        engine.generate(PROMPT, PARAMS)
    assert total_calls(timer.table()) > 0


def test_other_executors_give_way_to_the_host_executor_while_observed(tiny_model_path):
    """As an engine would have it whose rounds the host does not see into."""

    class Opaque:
        name = "opaque"

        def __init__(self) -> None:
            self.inner, self.calls = HostExecutor(), 0

        def run(self, program):
            self.calls += 1
            self.inner.run(program)

        def rounds(self, program):
            for _ in self.inner.rounds(program):
                self.calls += 1
                yield

    options = {"dtype": "float32", "compile": False, "max_batch_size": 1, "max_model_len": 128}
    with Engine.from_pretrained(tiny_model_path, prefix_caching=False, **options) as engine:
        opaque = Opaque()
        engine._core._own_executor = engine._core._executor = opaque
        plain = engine.generate(PROMPT, PARAMS)
        before, timer = opaque.calls, StepTimer("cpu")
        assert before >= plain.metrics.rounds
        with engine.observe(timer):
            observed = engine.generate(PROMPT, PARAMS)
        assert opaque.calls == before
        assert total_calls(timer.table()) == plain.metrics.rounds
        again = engine.generate(PROMPT, PARAMS)
        assert opaque.calls > before
    assert plain.token_ids == observed.token_ids == again.token_ids
