"""Whole benches on a tiny model: what is measured, what fails, what an interrupt leaves."""

import dataclasses
import json
import re

import pytest

from draftgraph import Engine
from draftgraph.runtime.bench import session
from draftgraph.runtime.bench.html_page import render
from draftgraph.runtime.bench.options import BenchOptions
from draftgraph.runtime.bench.session import Bench
from draftgraph.runtime.bench.tables import failures, identity, rows
from draftgraph.runtime.errors import ConfigError, DraftgraphError
from draftgraph.runtime.speculative_config import SpeculativeConfig

from .conftest import ENGINE_OPTIONS, NGRAM


def cells(report):
    return dict(rows(report.methods, rounding_may_differ=report.rounding_may_differ))


def interrupt():
    raise KeyboardInterrupt


def test_plain_and_ngram(run_bench):
    report = run_bench(repeats=2, prompt_sets=("echo", "chat"), max_tokens=24)
    plain, ngram = report.methods
    assert not report.partial
    assert (plain.method.name, ngram.method.name) == ("plain", "ngram K=4 prompt_lookup_min=1")
    for one in report.methods:
        assert one.overall.answers == 8
        assert one.overall.failed == one.overall.timeouts == 0
        assert {name: figures.answers for name, figures in one.by_set.items()} == {"echo": 4, "chat": 4}
        assert one.overall.output_tokens == sum(len(answer.token_ids) for answer in one.answers) > 8
        assert one.overall.tokens_per_second > 0
        assert 0 < one.overall.time_to_first_token.median <= one.overall.latency.median
        assert one.overall.burst_latency.median > 0
        assert 0 < one.overall.share_of_limit < 1
        assert one.overall.gigabytes_per_second > 0
        assert list(one.steps.phase_seconds)[-4:] == ["budget", "verify", "accept", "commit"]
        assert 0.5 < one.steps.accounted <= 1.0
        assert sum(one.steps.round_tokens) <= 24
        assert one.peak_memory is None or one.peak_memory > 0
        for answer in one.answers:
            assert sum(count for _, count in answer.bursts) == len(answer.token_ids)
            assert len(answer.bursts) == answer.rounds
    assert plain.overall.speed_up == 1.0
    assert plain.overall.tokens_per_round == 1.0
    assert plain.overall.acceptance_rate is None
    assert "propose" in ngram.steps.phase_seconds
    assert "propose" not in plain.steps.phase_seconds
    assert ngram.overall.tokens_per_round > 1.0
    assert len(ngram.overall.acceptance_by_position) == 4
    assert ngram.overall.speed_up > 0
    # In float32 greedy texts are the same, whatever the drafts.
    assert (ngram.overall.compared_prompts, ngram.overall.different_prompts) == (4, 0)
    assert report.broken_promises() == []
    assert [a.token_ids for a in plain.answers] == [a.token_ids for a in sorted(ngram.answers, key=plain_order(plain))]


def plain_order(plain):
    keys = [answer.key for answer in plain.answers]
    return lambda answer: keys.index(answer.key)


def test_the_limit_is_the_one_that_profile_keeps(run_bench, monkeypatch, tmp_path):
    monkeypatch.setenv("DRAFTGRAPH_CACHE", str(tmp_path))
    asked = []
    known = session.load_rates

    def load_rates(directory, *rest):
        asked.append(directory)
        return known(directory, *rest)

    monkeypatch.setattr(session, "load_rates", load_rates)
    run_bench(limit=1, max_tokens=2)
    assert asked == [tmp_path / "device-rates"]


def test_methods_take_turns_and_the_first_changes(run_bench, monkeypatch):
    from draftgraph.runtime.bench import runner

    seen = []
    original = runner._pass

    def noting(contender, jobs, load):
        seen.append((contender.method.depth, jobs[0].case.name, jobs[0].repeat))
        return original(contender, jobs, load)

    monkeypatch.setattr(runner, "_pass", noting)
    run_bench(repeats=2, max_tokens=2)
    first, second = ("recipe", "letter")
    expected = [(0, first, 0), (4, first, 0), (4, second, 0), (0, second, 0), (0, first, 1), (4, first, 1)]
    assert seen[:6] == expected
    assert len(seen) == 8


def test_several_at_once(run_bench):
    report = run_bench(prompt_sets=("chat",), limit=None, concurrency=2)
    for one in report.methods:
        assert one.overall.answers == 4
        assert one.overall.failed == 0
        assert one.steps.round_tokens == ()  # rows shared the rounds
        assert one.overall.share_of_limit > 0
    assert report.methods[1].overall.different_prompts == 0


def test_requests_at_a_rate_count_from_when_they_are_due(run_bench):
    report = run_bench(prompt_sets=("chat",), limit=None, arrival_rate=500.0, max_tokens=16)
    for one in report.methods:
        assert one.overall.answers == 4
        # All are due within milliseconds, and those that wait for their turn are told apart.
        last = max(one.answers, key=lambda answer: answer.latency)
        assert last.bursts[0][0] <= last.latency
        assert one.overall.latency.p95 >= one.overall.latency.median > 0


def test_sampled_texts_have_equal_lengths_and_seeds_of_their_own(run_bench):
    coupled = dataclasses.replace(NGRAM, rejection_sample_method="coupled")
    report = run_bench(speculative=(NGRAM, coupled), temperature=0.9, max_tokens=10, repeats=2, limit=1)
    plain, standard, same = report.methods
    assert all(len(answer.token_ids) == 10 for one in report.methods for answer in one.answers)
    assert plain.answers[0].token_ids != plain.answers[1].token_ids
    assert [a.token_ids for a in same.answers] == [a.token_ids for a in plain.answers]
    assert (same.overall.compared_prompts, same.overall.different_prompts) == (1, 0)
    assert not standard.method.repeats_plain_text
    assert report.broken_promises() == []


def test_synthetic_acceptance_is_told(run_bench):
    synthetic = dataclasses.replace(
        NGRAM, rejection_sample_method="synthetic", synthetic_acceptance_rates=(1.0, 1.0, 1.0, 1.0)
    )
    report = run_bench(speculative=(synthetic,), limit=1, max_tokens=20)
    (plain, made_up) = report.methods
    assert [len(answer.token_ids) for one in report.methods for answer in one.answers] == [20, 20]
    assert made_up.overall.tokens_per_round > plain.overall.tokens_per_round
    assert report.broken_promises() == []
    assert f"SYNTHETIC: {made_up.method.name} accepts drafts at given rates" in render(report)


def test_prompts_that_fail_are_kept_and_counted(run_bench, tmp_path):
    file = tmp_path / "mine.jsonl"
    lines = [{"name": "good", "prompt": "one two three"}, {"name": "long", "prompt": "one two three " * 400}]
    file.write_text("\n".join(map(json.dumps, lines)))
    report = run_bench(prompt_sets=(str(file),), limit=None)
    for one in report.methods:
        assert (one.overall.answers, one.overall.failed) == (2, 1)
        (bad,) = (answer for answer in one.answers if answer.status == "failed")
        assert (bad.prompt, bad.token_ids) == ("long", ())
        assert "max_model_len is 512" in bad.error
        assert one.overall.compared_prompts == 1
    assert len(failures(report.methods)) == 2
    assert cells(report)["failed"] == ["1", "1"]
    page = render(report)
    assert "Failed and timed out: 2" in page
    assert "max_model_len is 512" in page


def test_a_round_that_fails_is_that_answers_failure(run_bench, failing_engine):
    failed = []

    def fail_once():
        if not failed:
            failed.append(1)
            raise RuntimeError("out of\nmemory")

    # The replay takes its rounds first; the failure comes in a measured one.
    report = run_bench(failing_engine(fail_once, after=40), max_tokens=12)
    plain, ngram = report.methods
    assert failed
    assert plain.overall.failed == 0
    assert ngram.overall.answers == 2
    assert ngram.overall.failed == 1
    (bad,) = (answer for answer in ngram.answers if answer.status == "failed")
    assert bad.error == "a round failed: RuntimeError: out of\nmemory"
    assert ngram.overall.compared_prompts == 1
    assert not report.partial


def test_an_engine_that_cannot_be_loaded_fails_all_of_its_answers(run_bench):
    def load(model, config, **options):
        if config is not None:
            raise MemoryError("no room for the drafter")
        return Engine.from_pretrained(model, config, **options)

    plain, ngram = run_bench(load).methods
    assert plain.overall.failed == 0
    assert ngram.overall.failed == ngram.overall.answers == 2
    assert ngram.answers[0].error == "it could not be loaded: MemoryError: no room for the drafter"
    assert ngram.overall.speed_up is None
    assert ngram.overall.tokens_per_second is None


def test_timeouts(run_bench, monkeypatch):
    from draftgraph.runtime.bench import load_driver

    now = [0.0]

    def clock():
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr(load_driver.time, "perf_counter", clock)
    report = run_bench(timeout=5.0, max_tokens=200, ignore_eos=True)
    for one in report.methods:
        assert (one.overall.answers, one.overall.timeouts, one.overall.failed) == (2, 2, 0)
        assert one.answers[0].status == "timeout"
        assert 0 < len(one.answers[0].token_ids) < 200
        assert re.match(r"cut off after \d+\.0 s with \d+ tokens", one.answers[0].error)
        assert one.overall.compared_prompts == 0
        assert one.overall.latency.median is None
    assert cells(report)["timed out"] == ["2", "2"]
    assert cells(report)["same text as plain"] == ["-", "-"]


class TestInterrupt:
    def test_what_was_measured_is_kept(self, run_bench, failing_engine):
        # Rounds of the replay: 3 answers of at most 12 rounds; the interrupt comes in a measured answer.
        report = run_bench(failing_engine(interrupt, after=40), repeats=3)
        plain, ngram = report.methods
        assert report.partial
        assert plain.overall.answers >= 1
        assert plain.overall.tokens_per_second > 0
        assert plain.overall.answers + ngram.overall.answers < 12
        assert set(report.to_dict()) >= {"schema", "schema_version", "partial"}
        assert report.to_dict()["partial"] is True
        page = render(report)
        assert '<p class="alert" role="alert">PARTIAL: it was interrupted' in page

    def test_before_anything_was_measured(self, run_bench, failing_engine):
        report = run_bench(failing_engine(interrupt))
        plain, ngram = report.methods
        assert report.partial
        assert plain.overall.answers == ngram.overall.answers == 0
        assert plain.steps is not None
        assert ngram.steps is None
        assert ngram.overall.tokens_per_second is None
        json.dumps(report.to_dict(), allow_nan=False)
        assert "PARTIAL" in render(report)


class TestRefusedBeforeLoading:
    @pytest.mark.parametrize(
        ("options", "engine_options", "message"),
        [
            ({}, {"dtype": "int8"}, "dtype must be one of"),
            ({}, {"device": "tpu"}, "device"),
            ({}, {"executor": "fast"}, "executor must be one of"),
            ({}, {"max_model_len": 9999}, "the model was made for at most 1024 tokens"),
            ({}, {"max_model_len": 4}, "num_speculative_tokens is 4, but a sequence has at most 4 tokens"),
            ({"prompt_sets": ("nothing.jsonl",)}, {}, "no file of prompts"),
        ],
    )
    def test_bad_settings(self, tiny_model_path, options, engine_options, message):
        with pytest.raises(DraftgraphError, match=message):
            Bench.prepare(
                str(tiny_model_path),
                BenchOptions(speculative=(NGRAM,), **options),
                {**ENGINE_OPTIONS, **engine_options},
                lambda *_: None,
            )

    def test_every_config_is_checked_against_exact(self, tiny_model_path):
        wide = SpeculativeConfig(method="ngram", num_speculative_tokens=20)
        with pytest.raises(ConfigError, match="20"):
            Bench.prepare(
                str(tiny_model_path),
                BenchOptions(speculative=(NGRAM, wide)),
                {**ENGINE_OPTIONS, "exact": True},
                lambda *_: None,
            )


def test_a_broken_promise_is_told(run_bench):
    report = run_bench()
    plain, ngram = report.methods
    changed = dataclasses.replace(ngram, overall=dataclasses.replace(ngram.overall, different_prompts=1))
    broken = dataclasses.replace(report, methods=(plain, changed))
    name = changed.method.name
    assert broken.broken_promises() == [name]
    assert identity(changed, rounding_may_differ=False) == "NO: 1 of 2 differ"
    assert f"WRONG TEXT: {name}" in render(broken)
    rounded = dataclasses.replace(broken, rounding_may_differ=True)
    assert rounded.broken_promises() == []
    assert identity(changed, rounding_may_differ=True) == "1 of 2 differ: rounding"


def test_the_document(run_bench):
    report = run_bench()
    document = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert (document["schema"], document["schema_version"], document["partial"]) == ("draftgraph-bench", 1, False)
    assert document["settings"]["dtype"] == "float32"
    assert document["machine"]["device_name"] == "a test's device"
    plain, ngram = document["methods"]
    assert plain["config"] == {"method": "none"}
    assert ngram["num_speculative_tokens"] == 4
    assert ngram["must_repeat_plain_text"]
    assert ngram["overall"]["burst_latency"].keys() == {"median", "p95"}
    assert ngram["steps"]["phase_seconds"].keys() == {"propose", "budget", "verify", "accept", "commit"}
    assert len(ngram["answers"]) == 2
    assert ngram["answers"][0]["bursts"]
