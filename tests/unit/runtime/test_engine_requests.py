"""Requests of every kind through one engine: stops, limits, streams, cancellation, errors, reuse, metrics."""

from __future__ import annotations

import itertools
import math
import signal
import threading

import pytest
import torch

from draftgraph import Engine, SamplingParams
from draftgraph.runtime.errors import DraftgraphError
from draftgraph.runtime.interrupts import deferred_interrupt

SPEC = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}


# Shapes of input and output


def test_one_prompt_gives_one_result_and_a_list_a_list(engine):
    params = SamplingParams(max_tokens=4)
    assert engine.generate("one", params).text is not None
    assert [r.index for r in engine.generate(["one", "two", "three"], params)] == [0, 0, 0]
    one = engine.generate("one", SamplingParams(max_tokens=4, n=3, temperature=1.0, seed=5))
    assert [r.index for r in one] == [0, 1, 2]
    assert [r.seed for r in one] == [5, 6, 7]
    many = engine.generate(["one", "two"], SamplingParams(max_tokens=4, n=2))
    assert [len(group) for group in many] == [2, 2]


def test_sample_i_of_n_is_the_answer_to_seed_plus_i(engine):
    group = engine.generate("one two", SamplingParams(max_tokens=12, n=3, temperature=1.2, seed=5))
    single = engine.generate("one two", SamplingParams(max_tokens=12, temperature=1.2, seed=7))
    assert group[2].token_ids == single.token_ids
    assert len({r.token_ids for r in group}) > 1


def test_text_ids_and_chat_are_prompts(engine):
    params = SamplingParams(max_tokens=6)
    text = "<|user|>one two\n<|assistant|>"
    ids = engine.tokenizer(text)["input_ids"]
    chat = [{"role": "user", "content": "one two"}]
    results = [engine.generate(p, params) for p in (text, ids, torch.tensor(ids), chat)]
    assert len({r.token_ids for r in results}) == 1
    assert {r.prompt_token_ids for r in results} == {tuple(ids)}
    assert engine.generate([chat, ids], params)[0].token_ids == results[0].token_ids


def test_more_prompts_than_rows_are_queued(engine):
    words = ["one", "two", "three", "def", "The", "a", "b"]
    together = engine.generate(words, SamplingParams(max_tokens=10))
    assert [r.token_ids for r in together] == [
        engine.generate(w, SamplingParams(max_tokens=10)).token_ids for w in words
    ]


# Ends


def test_limits_hold_inside_a_window(engine):
    full = engine.generate("one two three, one two", SamplingParams(max_tokens=40, ignore_eos=True))
    assert full.metrics.accepted_tokens > 0
    for n in range(1, 12):
        cut = engine.generate("one two three, one two", SamplingParams(max_tokens=n, ignore_eos=True))
        assert cut.token_ids == full.token_ids[:n]
        assert cut.finish_reason == "length"


def test_max_model_len_ends_an_answer(engine):
    prompt = engine.tokenizer("one two three " * 200)["input_ids"][:505]
    result = engine.generate(prompt, SamplingParams(max_tokens=100, ignore_eos=True))
    assert len(result.token_ids) == 512 - 505
    assert result.finish_reason == "length"


def test_stop_tokens_end_an_answer_inside_a_window(engine):
    full = engine.generate("one two three, one two", SamplingParams(max_tokens=40, ignore_eos=True)).token_ids
    for token in set(full):
        result = engine.generate(
            "one two three, one two", SamplingParams(max_tokens=40, ignore_eos=True, stop_token_ids=(token,))
        )
        assert result.token_ids == full[: full.index(token) + 1]
        assert (result.finish_reason, result.stop_reason) == ("stop", token)


def test_stop_strings_cut_the_text_and_take_back_tokens(engine):
    prompt = "one two three, one two"
    full = engine.generate(prompt, SamplingParams(max_tokens=40, ignore_eos=True))
    assert len(full.text) > 12
    for start in range(2, len(full.text) - 3, 3):
        stop = full.text[start : start + 3]
        if "\ufffd" in stop:  # half a character: how it is shown depends on what follows
            continue
        result = engine.generate(prompt, SamplingParams(max_tokens=40, ignore_eos=True, stop=stop))
        assert result.text == full.text[: full.text.index(stop)]
        assert (result.finish_reason, result.stop_reason) == ("stop", stop)
        assert result.token_ids == full.token_ids[: len(result.token_ids)]
        decoded = engine.tokenizer.decode(result.token_ids)
        assert stop in decoded
        assert stop not in engine.tokenizer.decode(result.token_ids[:-1])


def test_a_stop_string_is_never_streamed_in_part(engine):
    prompt = "one two three, one two"
    full = engine.generate(prompt, SamplingParams(max_tokens=40, ignore_eos=True)).text
    stop = full[6:10]
    pieces = [c.text for c in engine.stream(prompt, SamplingParams(max_tokens=40, ignore_eos=True, stop=[stop]))]
    assert "".join(pieces) == full[: full.index(stop)]


# Streams


def test_a_stream_gives_what_generate_gives(engine):
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    whole = engine.generate("你好，世界。one two", params)
    chunks = list(engine.stream("你好，世界。one two", params))
    assert "".join(c.text for c in chunks) == whole.text
    assert tuple(itertools.chain.from_iterable(c.token_ids for c in chunks)) == whole.token_ids
    assert chunks[-1].finish_reason == "length"
    assert chunks[-1].result.token_ids == whole.token_ids
    assert all(c.finish_reason is None for c in chunks[:-1])


def test_streams_interleave_and_wait_for_each_other(engine):
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    expected = [engine.generate(p, params).token_ids for p in ("one", "two", "three")]
    streams = [engine.stream(p, params) for p in ("one", "two", "three")]  # three streams, two rows
    collected: list[list[int]] = [[], [], []]
    alive = set(range(3))
    while alive:
        for i in sorted(alive):
            chunk = next(streams[i], None)
            if chunk is None:
                alive.discard(i)
            else:
                collected[i] += chunk.token_ids
    assert [tuple(c) for c in collected] == expected


def test_n_samples_stream_together(engine):
    params = SamplingParams(max_tokens=8, n=3, temperature=1.0, seed=1, ignore_eos=True)
    whole = engine.generate("one", params)
    texts = ["", "", ""]
    for chunk in engine.stream("one", params):
        texts[chunk.index] += chunk.text
    assert texts == [r.text for r in whole]


def test_cancelling_a_stream_keeps_what_came(engine):
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    whole = engine.generate("one", params).token_ids
    stream = engine.stream("one", params)
    next(stream)
    next(stream)
    stream.cancel()
    last = list(stream)[-1]
    assert last.finish_reason == "cancelled"
    assert last.result.token_ids == whole[: len(last.result.token_ids)]
    assert 0 < len(last.result.token_ids) < 200


@pytest.mark.parametrize("how", ["close", "with", "drop"])
def test_leaving_a_stream_frees_its_slot(engine, how):
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    for _ in range(4):  # twice as many as there are rows
        stream = engine.stream("one two", params)
        next(stream)
        if how == "close":
            stream.close()
            assert next(stream, None) is None
        elif how == "with":
            with stream:
                next(stream)
        else:
            del stream
    assert not engine._core.busy
    assert engine.generate("one", SamplingParams(max_tokens=5)).finish_reason in ("length", "stop")


def test_an_interrupt_in_the_middle_leaves_the_engine_usable(engine, monkeypatch):
    expected = engine.generate("one two", SamplingParams(max_tokens=20, ignore_eos=True)).token_ids
    other = engine.stream("three", SamplingParams(max_tokens=20, ignore_eos=True))
    rest = engine.generate("three", SamplingParams(max_tokens=20, ignore_eos=True)).token_ids
    seen = list(next(other).token_ids)
    step, count = type(engine._core).step, itertools.count()

    def interrupted(core):
        step(core)
        if next(count) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(type(engine._core), "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate("one two", SamplingParams(max_tokens=400, ignore_eos=True))
    monkeypatch.undo()
    for chunk in other:
        seen += chunk.token_ids
    assert tuple(seen) == rest  # the stream that was under way lost and repeated nothing
    assert engine.generate("one two", SamplingParams(max_tokens=20, ignore_eos=True)).token_ids == expected


@pytest.fixture
def default_interrupts():
    """A background shell starts its jobs with SIGINT ignored; these tests need Python's own handler."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def test_an_ignored_interrupt_stays_ignored(default_interrupts):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with deferred_interrupt():
        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_signal_waits_for_the_end_of_the_round(default_interrupts):
    reached = []

    def round_with(interrupts: int, then: str) -> None:
        with deferred_interrupt():
            for _ in range(interrupts):
                signal.raise_signal(signal.SIGINT)
            reached.append(then)

    with pytest.raises(KeyboardInterrupt):
        round_with(1, "the rest of the round")
    assert reached == ["the rest of the round"]
    with pytest.raises(KeyboardInterrupt):
        round_with(2, "never: a second one does not wait")
    assert reached == ["the rest of the round"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_failing_step_leaves_the_engine_usable(engine, monkeypatch):
    def broken(*args):
        raise RuntimeError("boom")

    monkeypatch.setattr(type(engine._core), "_deliver", broken)
    with pytest.raises(RuntimeError, match="boom"):
        engine.generate("one", SamplingParams(max_tokens=5))
    monkeypatch.undo()
    assert not engine._core.busy
    assert len(engine.generate("one", SamplingParams(max_tokens=5, ignore_eos=True)).token_ids) == 5


def test_threads_take_turns(engine):
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    words = ["one", "two", "three", "def"]
    expected = [engine.generate(w, params).token_ids for w in words]
    results: dict[str, tuple[int, ...]] = {}

    def work(word: str) -> None:
        results[word] = engine.generate(word, params).token_ids

    threads = [threading.Thread(target=work, args=(w,)) for w in words]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[w] for w in words] == expected


# Prefix reuse


def test_a_prompt_that_extends_a_cached_one_reuses_it(tiny_model_path):
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with Engine.from_pretrained(tiny_model_path, SPEC, dtype="float32", compile=False, max_batch_size=2) as engine:
        first = engine.generate("The steam engine changed", params)
        longer = [*first.prompt_token_ids, *first.token_ids, *engine.tokenizer(" one two")["input_ids"]]
        second = engine.generate(longer, params)
        assert second.metrics.reused_prompt_tokens == len(first.prompt_token_ids) + len(first.token_ids) - 1
        again = engine.generate([*longer[:-1], 7], params)
        assert again.metrics.reused_prompt_tokens == len(longer) - 1
    with Engine.from_pretrained(tiny_model_path, SPEC, dtype="float32", compile=False, prefix_caching=False) as engine:
        fresh = engine.generate(longer, params)
        assert fresh.metrics.reused_prompt_tokens == 0
    assert fresh.token_ids == second.token_ids


def test_exact_reuses_whole_prefill_chunks_only(tiny_model_path):
    with Engine.from_pretrained(tiny_model_path, dtype="float32", compile=False, exact=True) as engine:
        ids = [5 + i % 200 for i in range(700)]
        first = engine.generate(ids, SamplingParams(max_tokens=4, ignore_eos=True))
        second = engine.generate([*ids, 9], SamplingParams(max_tokens=4, ignore_eos=True))
        assert first.metrics.reused_prompt_tokens == 0
        assert second.metrics.reused_prompt_tokens == 512


# NaN


def test_logits_that_are_not_finite_end_their_row_alone(tiny_model_path):
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with Engine.from_pretrained(tiny_model_path, SPEC, dtype="float32", compile=False, max_batch_size=2) as engine:
        poisoned = 17
        good = [p for p in engine.tokenizer("one two three")["input_ids"] if p != poisoned]
        expected = engine.generate(good, params)
        assert poisoned not in expected.token_ids
        engine._target.model.weights.embedding[poisoned] = math.nan
        bad, fine = engine.generate([[poisoned, 20, 21], good], params)
        assert (bad.finish_reason, bad.token_ids) == ("error", ())
        assert "not finite at position 3" in bad.error
        assert fine.token_ids == expected.token_ids
        again = engine.generate([good, [20, 21, poisoned]], params)
        assert again[0].token_ids == expected.token_ids
        assert again[1].finish_reason == "error"


# Log-probabilities and metrics


def test_logprobs_are_the_raw_log_softmax(engine, tiny_model_path):
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny_model_path).eval()
    result = engine.generate("one two three, one two", SamplingParams(max_tokens=20, ignore_eos=True, logprobs=3))
    ids = torch.tensor([[*result.prompt_token_ids, *result.token_ids]])
    with torch.no_grad():
        expected = model(ids).logits[0, len(result.prompt_token_ids) - 1 : -1].log_softmax(-1)
    assert len(result.logprobs) == 20
    for entry, token, row in zip(result.logprobs, result.token_ids, expected, strict=True):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        values, indices = row.topk(3)
        assert [t for t, _ in entry.top] == indices.tolist()
        assert [v for _, v in entry.top] == pytest.approx(values.tolist(), abs=1e-4)
    plain = engine.generate("one two three, one two", SamplingParams(max_tokens=20, ignore_eos=True))
    assert plain.logprobs is None
    assert plain.token_ids == result.token_ids


def test_metrics_add_up(engine):
    result = engine.generate("one two three, one two", SamplingParams(max_tokens=40, ignore_eos=True))
    m = result.metrics
    assert m.output_tokens == 40
    assert len(m.round_pairs) == m.rounds
    assert sum(p for p, _ in m.round_pairs) == m.proposed_tokens
    assert sum(a for _, a in m.round_pairs) == m.accepted_tokens
    assert m.accepted_tokens + m.rounds >= 40
    assert all(a <= p <= 4 for p, a in m.round_pairs)
    assert m.mean_acceptance_length == pytest.approx(1 + m.accepted_tokens / m.rounds)
    assert len(m.inter_token_latencies) == 39
    assert 0 < m.time_to_first_token <= m.total_time


@pytest.mark.parametrize("level", ["none", "summary"])
def test_metrics_can_be_less(tiny_model_path, level):
    with Engine.from_pretrained(tiny_model_path, compile=False, metrics=level) as engine:
        metrics = engine.generate("one", SamplingParams(max_tokens=3)).metrics
    assert (metrics is None) == (level == "none")
    if metrics is not None:
        assert metrics.round_pairs is None


def test_a_round_that_fails_tells_everyone_who_shared_it(engine, monkeypatch):
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    expected = engine.generate("one two", params).token_ids
    other = engine.stream("one two", params)
    seen = [*next(other).token_ids]
    monkeypatch.setattr(type(engine._core), "_round", lambda core: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.generate("three", params)
    monkeypatch.undo()
    last = list(other)[-1]
    assert last.finish_reason == "error"
    assert last.result.error == "a round failed: ZeroDivisionError: division by zero"
    assert last.result.token_ids == expected[: len(seen)]
    assert engine.generate("one two", params).token_ids == expected


def test_a_closed_engine_says_so(tiny_model_path):
    engine = Engine.from_pretrained(tiny_model_path, compile=False)
    stream = engine.stream("one")
    engine.close()
    engine.close()
    for use in (lambda: engine.generate("one"), lambda: engine.stream("one"), engine.warmup):
        with pytest.raises(DraftgraphError, match="the engine is closed"):
            use()
    assert [chunk.finish_reason for chunk in stream] == ["cancelled"]


def test_warmup_reports_progress_and_changes_nothing(tiny_model_path):
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with Engine.from_pretrained(tiny_model_path, SPEC, dtype="float32", compile=False, max_batch_size=2) as engine:
        calls: list[tuple[int, int]] = []
        before = engine.generate("one two three", params).token_ids
        engine.warmup(lambda done, total, what: calls.append((done, total)))
        after = engine.generate("one two three", params)
    assert calls[-1][0] == calls[-1][1] == len(calls) - 1
    assert after.token_ids == before
    assert after.metrics.reused_prompt_tokens > 0


# Continuous batching


def test_a_long_prompt_delays_the_others_by_one_chunk_at_most(tiny_model_path, monkeypatch):
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    with Engine.from_pretrained(tiny_model_path, dtype="float32", compile=False, max_batch_size=2) as engine:
        expected = engine.generate("one two", params).token_ids
        events: list[str] = []
        run, deliver = engine._core._executor.run, type(engine._core)._deliver

        def spied_run(program):
            events.append("chunk")
            run(program)

        def spied_deliver(core, request, now):
            deliver(core, request, now)
            events.append("tokens")

        monkeypatch.setattr(engine._core._executor, "run", spied_run)
        monkeypatch.setattr(type(engine._core), "_deliver", spied_deliver)
        short = engine.stream("one two", params)
        seen = [*next(short).token_ids]
        events.clear()
        long = engine.stream([5 + i % 200 for i in range(1000)], SamplingParams(max_tokens=2))
        for chunk in short:
            seen += chunk.token_ids
        chunks = [i for i, event in enumerate(events) if event == "chunk"]
        assert len(chunks) >= 4
        assert all(events[i + 1] == "tokens" for i in chunks)
        assert tuple(seen) == expected
        assert len(list(long)[-1].result.token_ids) == 2


def test_rows_join_and_leave_a_running_bucket(engine, reference):
    """Requests of different lengths, submitted one after another while others run."""
    prompts = ["one two three, one", "a", "def add(a", "The steam engine", "你好", "two"]
    lengths = [5, 40, 17, 33, 9, 26]
    streams, collected = [], [[] for _ in prompts]
    for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        streams.append(engine.stream(prompt, SamplingParams(max_tokens=length)))
        for i in range(number + 1):  # everyone advances a little before the next arrives
            chunk = next(streams[i], None)
            if chunk is not None:
                collected[i] += chunk.token_ids
    for i, stream in enumerate(streams):
        for chunk in stream:
            collected[i] += chunk.token_ids
    for prompt, length, tokens in zip(prompts, lengths, collected, strict=True):
        assert tokens == reference(engine.tokenizer(prompt)["input_ids"], length)


def test_loading_reports_progress(tiny_model_path):
    calls: list[tuple[int, int, str]] = []
    Engine.from_pretrained(tiny_model_path, compile=False, progress=lambda *call: calls.append(call)).close()
    assert calls[0][0] == 0
    assert calls[-1][0] == calls[-1][1] == len(calls) - 1
    assert {what for *_, what in calls} == {"loading weights"}


@pytest.mark.parametrize("method", ["standard", "coupled"])
@pytest.mark.parametrize("temperature", [1e-5, 1e5])
def test_the_extreme_temperatures_work(tiny_model_path, method, temperature):
    spec = {**SPEC, "rejection_sample_method": method}
    options = {"max_tokens": 24, "ignore_eos": True}
    with Engine.from_pretrained(tiny_model_path, spec, dtype="float32", compile=False) as engine:
        result = engine.generate("one two three", SamplingParams(temperature=temperature, seed=1, **options))
        greedy = engine.generate("one two three", SamplingParams(**options))
    assert result.finish_reason == "length"
    assert (result.token_ids == greedy.token_ids) == (temperature < 1)
