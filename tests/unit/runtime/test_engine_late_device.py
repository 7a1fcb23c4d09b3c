"""The core in front of a device that runs ahead: the same answers, and nothing touched that the device is using."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from late_executors import LateExecutor, ThreadedExecutor

from draftgraph import Engine, SamplingParams
from draftgraph.runtime.engine_config import EngineConfig
from draftgraph.runtime.loading import build_core, load_target
from draftgraph.runtime.speculative_config import SpeculativeConfig

SPEC = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
PROMPTS = ["one two three, one", "a", "def add(a", "The steam engine", "你好", "two"]
LENGTHS = [5, 40, 17, 33, 9, 26]


@pytest.fixture(scope="module")
def engine_with(tiny_model_path):
    """Makes engines on the tiny model whose executor, ring and rounds per launch are given."""
    targets = {}

    @contextmanager
    def make(executor=None, *, ring=None, rounds_per_launch=None, spec=SPEC, **options):
        settings = {"dtype": "float32", "compile": False, "max_batch_size": 2, "metrics": "detailed"}
        config = EngineConfig(
            speculative=SpeculativeConfig.parse(spec), **{**settings, "max_model_len": 512, **options}
        )
        if "target" not in targets:
            targets["target"] = load_target(tiny_model_path, config, None)
        target = targets["target"]
        core = build_core(target, config, executor=executor, ring=ring, rounds_per_launch=rounds_per_launch)
        if executor is not None:
            cache = core._builder._cache
            executor.watched += [cache.key, cache.value]
        with Engine(target, core, config) as engine:
            yield engine

    return make


def facts(result):
    """What of a result must not depend on the executor."""
    m = result.metrics
    return result.token_ids, result.text, result.finish_reason, result.logprobs, m.rounds, m.round_pairs


def batch(engine, **options):
    """The facts of every prompt, all submitted at once, and then consumed as streams in turns."""
    params = [SamplingParams(max_tokens=length, seed=7, **options) for length in LENGTHS]
    streams = [engine.stream(prompt, p) for prompt, p in zip(PROMPTS, params, strict=True)]
    chunks = [[] for _ in streams]
    left = list(range(len(streams)))
    while left:
        for i in list(left):
            chunk = next(streams[i], None)
            if chunk is None:
                left.remove(i)
            else:
                chunks[i].append(chunk)
    for given in chunks:
        result = given[-1].result
        assert tuple(t for chunk in given for t in chunk.token_ids) == result.token_ids
        assert "".join(chunk.text for chunk in given) == result.text
    return [facts(given[-1].result) for given in chunks]


@pytest.fixture(scope="module")
def expected(engine_with):
    with engine_with() as engine:
        return {
            "greedy": batch(engine, ignore_eos=True),
            "eos": batch(engine),
            "sampled": batch(engine, temperature=0.8, top_p=0.9, logprobs=2),
        }


MODES = {
    "greedy": {"ignore_eos": True},
    "eos": {},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "logprobs": 2},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("ring", "rounds"), [(None, None), (5, None), (9, 3), (None, 1), (12, 2)], ids=lambda value: str(value)
)
def test_answers_are_the_same_as_of_the_host_executor(engine_with, expected, mode, ring, rounds):
    """Six requests of different lengths through two slots; rings smaller than the answers; few rounds per launch."""
    with engine_with(LateExecutor(seed=1), ring=ring, rounds_per_launch=rounds) as engine:
        assert batch(engine, **MODES[mode]) == expected[mode]


@pytest.mark.parametrize("ring", [5, None])
def test_a_small_ring_or_budget_changes_nothing_for_the_host_executor(engine_with, expected, ring):
    with engine_with(ring=ring, rounds_per_launch=2) as engine:
        assert batch(engine) == expected["eos"]


@pytest.mark.parametrize("ring", [6, None])
def test_a_device_in_another_thread(engine_with, expected, ring):
    with engine_with(ThreadedExecutor(), ring=ring) as engine:
        assert batch(engine) == expected["eos"]
        assert batch(engine, **MODES["sampled"]) == expected["sampled"]


def test_a_ring_that_is_full_ends_the_loop_and_it_goes_on(engine_with):
    executor = LateExecutor(most=50)
    with engine_with(executor, ring=10) as engine, engine_with() as plain:
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        assert engine.generate("one", params).token_ids == plain.generate("one", params).token_ids
    assert len(executor.entered) >= 6


def test_finished_rows_do_not_end_a_loop_whose_bucket_still_fits(engine_with):
    """Three answers end at different times in a bucket of four, the only one: one loop, entered once."""
    executor = LateExecutor()
    with engine_with(executor, max_batch_size=4, batch_buckets=(4,)) as engine:
        # Prompts of one token need no prefill chunk, between which the loop is entered anew.
        prompts = [[30], [40], [50]]
        results = [
            engine.stream(p, SamplingParams(max_tokens=n, ignore_eos=True))
            for p, n in zip(prompts, [5, 60, 25], strict=True)
        ]
        lengths = [sum(len(chunk.token_ids) for chunk in stream) for stream in results]
    assert lengths == [5, 60, 25]
    assert executor.entered == ["round[4]"]


def test_the_loop_moves_to_a_smaller_bucket(engine_with):
    executor = LateExecutor()
    with engine_with(executor, max_batch_size=4) as engine:
        streams = [
            engine.stream([30 + 10 * n], SamplingParams(max_tokens=20 * n + 10, ignore_eos=True)) for n in range(3)
        ]
        for n, stream in reversed(list(enumerate(streams))):
            assert sum(len(chunk.token_ids) for chunk in stream) == 20 * n + 10
    assert executor.entered == ["round[4]", "round[2]", "round[1]"]


def test_a_waiting_request_gets_the_slot_of_a_row_that_finishes(engine_with):
    """The device leaves its loop when the short answer ends, long before the long one does."""
    executor = LateExecutor(most=1000)
    with engine_with(executor, batch_buckets=(2,)) as engine:
        long = engine.stream([30], SamplingParams(max_tokens=400, ignore_eos=True))
        short = engine.stream([40], SamplingParams(max_tokens=4, ignore_eos=True))
        waiting = engine.stream([50], SamplingParams(max_tokens=4, ignore_eos=True))
        assert next(waiting).token_ids
        assert short.results[0] is not None
        assert sum(len(chunk.token_ids) for chunk in long) == 400
    assert executor.entered == ["round[2]"] * 2
    assert executor.began[1] <= 4


@pytest.mark.parametrize("make", [LateExecutor, ThreadedExecutor])
def test_cancelling_one_leaves_the_others_alone(engine_with, make):
    params = SamplingParams(max_tokens=120, ignore_eos=True)
    executor = make()
    with engine_with(executor, max_batch_size=2, batch_buckets=(2,), ring=16) as engine, engine_with() as plain:
        whole = [plain.generate(prompt, params).token_ids for prompt in ([30], [40], [50])]
        kept, dropped = engine.stream([30], params), engine.stream([40], params)
        seen = [*next(kept).token_ids, *next(kept).token_ids]
        dropped.cancel()
        chunks = list(dropped)
        result = chunks[-1].result
        assert result.finish_reason == "cancelled"
        assert result.token_ids == tuple(t for chunk in chunks for t in chunk.token_ids)
        assert result.token_ids == whole[1][: len(result.token_ids)]
        # Its slot goes to another, while the first goes on.
        assert engine.generate([50], params).token_ids == whole[2]
        seen += [t for chunk in kept for t in chunk.token_ids]
        assert tuple(seen) == whole[0]
        assert kept.results[0].finish_reason == "length"


def test_a_cancelled_row_ends_on_the_device_without_leaving_the_loop(engine_with):
    executor = LateExecutor(most=2)
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    with engine_with(executor, max_batch_size=2, batch_buckets=(2,)) as engine:
        kept, dropped = engine.stream([30], params), engine.stream([40], params)
        next(kept), next(kept)
        slot = dropped._requests[0].slot
        dropped.cancel()
        state = engine._core.state
        assert not state.finished[slot]
        next(kept)
        assert state.finished[slot]
        assert state.finish_reason[slot] == 3
        assert executor.entered == ["round[2]"]
        assert sum(len(chunk.token_ids) for chunk in kept) > 0


@pytest.mark.parametrize("make", [LateExecutor, ThreadedExecutor])
def test_a_stop_string_ends_a_row_of_which_the_device_runs_ahead(engine_with, make):
    """Tokens past the stop string are published and dropped; the next request in the slot sees none of them."""
    long = SamplingParams(max_tokens=100, ignore_eos=True)
    with engine_with(make(), max_batch_size=2) as engine, engine_with() as plain:
        text = plain.generate("one two", long).text
        params = SamplingParams(max_tokens=100, ignore_eos=True, stop=(text[30:34],))
        for _ in range(3):
            other = engine.stream("The steam", long)
            next(other)
            ours, theirs = engine.generate("one two", params), plain.generate("one two", params)
            assert (ours.text, ours.token_ids, ours.stop_reason) == (theirs.text, theirs.token_ids, theirs.stop_reason)
            assert ours.metrics.rounds >= theirs.metrics.rounds
            assert len(ours.metrics.round_pairs) == ours.metrics.rounds
            assert list(other)[-1].result.token_ids == plain.generate("The steam", long).token_ids


def test_closing_the_engine_delivers_what_was_published(engine_with):
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    executor = LateExecutor(most=3)
    with engine_with() as plain:
        whole = plain.generate([30], params).token_ids
    with engine_with(executor) as engine:
        stream = engine.stream([30], params)
        next(stream)
        state, slot = engine._core.state, stream._requests[0].slot
    assert stream.results[0].finish_reason == "cancelled"
    tokens = stream.results[0].token_ids
    assert len(tokens) == int(state.ring_count[slot])
    assert tokens == whole[: len(tokens)]
    assert len(tokens) > executor.rounds_run - 1


@pytest.mark.parametrize("make", [LateExecutor, ThreadedExecutor])
def test_a_device_that_fails_tells_everyone_and_the_engine_stays_usable(engine_with, make, monkeypatch):
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    with engine_with(make()) as engine, engine_with() as plain:
        whole = plain.generate([30], params).token_ids
        policy = type(engine._core._builder._policy)
        accept, calls = policy.accept, []

        def failing(self, state, bucket):
            calls.append(bucket)
            if len(calls) == 4:
                raise FloatingPointError("boom")
            accept(self, state, bucket)

        monkeypatch.setattr(policy, "accept", failing)
        other = engine.stream([40], params)
        with pytest.raises(FloatingPointError, match="boom"):
            engine.generate([30], params)
        monkeypatch.undo()
        assert list(other)[-1].finish_reason == "error"
        assert engine.generate([30], params).token_ids == whole
