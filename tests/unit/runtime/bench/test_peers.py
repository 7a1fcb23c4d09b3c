"""transformers beside our engine, on a tiny model."""

import pytest
import torch

from draftgraph.runtime.bench.options import BenchOptions, Load
from draftgraph.runtime.bench.peers import transformers_contenders
from draftgraph.runtime.bench.records import Case, Job

from .conftest import NGRAM

CPU = torch.device("cpu")


def contenders(path, assistant=None, **options):
    options = BenchOptions(**{"speculative": (NGRAM,), "peers": ("transformers",), "max_tokens": 12, **options})
    return transformers_contenders(path, assistant, options, torch.float32, CPU, lambda *_: None)


def job(ids=(5, 6, 7, 5, 6), error=None):
    return Job(case=Case(prompt_set="s", name="p", prompt=list(ids)), prompt_ids=ids, error=error, repeat=0, seed=0)


def test_side_by_side(run_bench):
    report = run_bench(peers=("transformers",), limit=1, max_tokens=60, ignore_eos=True)
    plain, _, peer, lookup = report.methods
    assert [one.method.name for one in report.methods[2:]] == ["transformers plain", "transformers lookup K=4"]
    for one in (peer, lookup):
        assert one.overall.failed == 0
        (answer,) = one.answers
        # Greedy, in float32, on the same prompt ids.
        assert answer.token_ids == plain.answers[0].token_ids
        assert one.overall.different_prompts == 0
        assert one.steps is None
        assert sum(count for _, count in answer.bursts) == len(answer.token_ids)
        assert [when for when, _ in answer.bursts] == sorted(when for when, _ in answer.bursts)
        assert 0 < answer.bursts[-1][0] <= answer.latency
        assert one.overall.speed_up > 0
    assert peer.overall.tokens_per_round == 1.0
    assert lookup.overall.tokens_per_round > 1.0


def test_an_assistant(tiny_model_path):
    *_, assisted = contenders(tiny_model_path, tiny_model_path)
    assert assisted.method.name == "transformers assistant"
    (answer,) = assisted.answer([job()], Load())
    (plain,) = contenders(tiny_model_path)[0].answer([job()], Load())
    assert answer.status == "ok"
    assert answer.token_ids == plain.token_ids
    assert answer.rounds < plain.rounds


def test_a_prompt_that_cannot_be_asked_and_one_that_fails(tiny_model_path, monkeypatch):
    plain = contenders(tiny_model_path)[0]
    jobs = [job(error="the prompt is too long"), job()]

    def fail(*args, **options):
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(plain.target.model, "generate", fail)
    first, second = plain.answer(jobs, Load())
    assert (first.status, first.error) == ("failed", "the prompt is too long")
    assert (second.status, second.error) == ("failed", "RuntimeError: out of memory")


def test_timeout(tiny_model_path):
    plain = contenders(tiny_model_path, timeout=1e-6, ignore_eos=True)[0]
    (answer,) = plain.answer([job()], Load())
    assert answer.status == "timeout"
    assert len(answer.token_ids) == 1
    assert "cut off after" in answer.error


def test_sampling_repeats_with_the_seed(tiny_model_path):
    plain = contenders(tiny_model_path, temperature=1.0)[0]
    first, second = (next(plain.answer([job()], Load())) for _ in range(2))
    assert first.token_ids == second.token_ids
    assert len(first.token_ids) == 12


def test_what_transformers_cannot_load_is_told_in_every_answer(tmp_path):
    absent = contenders(tmp_path, tmp_path)
    assert [one.method.name for one in absent] == [
        "transformers plain",
        "transformers lookup K=4",
        "transformers assistant",
    ]
    for one in absent:
        assert one.replay([[job()]], Load()) is None
        (answer,) = one.answer([job()], Load())
        assert answer.status == "failed"
        assert answer.error.startswith(("OSError:", "ValueError:"))


def test_an_interrupt_is_not_a_failed_prompt(tiny_model_path, monkeypatch):
    plain = contenders(tiny_model_path)[0]

    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(plain.target.model, "generate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(plain.answer([job()], Load()))
