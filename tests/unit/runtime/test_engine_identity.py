"""Speculation does not change the output: token for token against transformers and against plain decoding."""

from __future__ import annotations

import pytest

from draftgraph import Engine, SamplingParams

NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def prompts(tokenizer) -> list[list[int]]:
    texts = [
        "a",
        "The steam engine",
        "one two three, one two three, one",
        "def add(a, b):\n    return",
        "你好，世界。" * 3,
        "The steam engine changed how people worked. " * 30,  # past one prefill chunk
    ]
    return [tokenizer(t)["input_ids"] for t in texts]


def ngram(k: int, **extra: object) -> dict[str, object]:
    return {**NGRAM, "num_speculative_tokens": k, **extra}


@pytest.mark.parametrize("spec", [None, ngram(1), ngram(4), ngram(8)], ids=["none", "K1", "K4", "K8"])
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_greedy_equals_transformers_in_every_bucket(tiny_model_path, reference, spec, batch):
    with Engine.from_pretrained(
        tiny_model_path, spec, dtype="float32", max_batch_size=batch, compile=False, max_model_len=1024
    ) as engine:
        ids = prompts(engine.tokenizer)
        results = engine.generate(ids, SamplingParams(max_tokens=48))
    for prompt, result in zip(ids, results, strict=True):
        assert list(result.token_ids) == reference(prompt, 48)
    if spec is not None:
        assert sum(r.metrics.accepted_tokens for r in results) > 0, "the test would prove nothing without drafts"


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_greedy_is_greedy_under_every_rule(tiny_model_path, reference, rule):
    spec = ngram(5, rejection_sample_method=rule)
    with Engine.from_pretrained(
        tiny_model_path, spec, dtype="float32", max_batch_size=2, compile=False, max_model_len=1024
    ) as engine:
        ids = prompts(engine.tokenizer)
        results = engine.generate(ids, SamplingParams(max_tokens=32))
    for prompt, result in zip(ids, results, strict=True):
        assert list(result.token_ids) == reference(prompt, 32)


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.5])
def test_coupled_text_depends_on_the_seed_alone(tiny_model_path, temperature):
    params = SamplingParams(temperature=temperature, top_p=0.9, seed=11, max_tokens=40, ignore_eos=True)
    texts = {}
    for name, spec, batch in [
        ("plain", {"method": "none", "rejection_sample_method": "coupled"}, 1),
        ("K4", ngram(4, rejection_sample_method="coupled"), 1),
        ("K8 in a bucket of 4", ngram(8, rejection_sample_method="coupled"), 4),
    ]:
        with Engine.from_pretrained(
            tiny_model_path, spec, dtype="float32", max_batch_size=batch, compile=False, max_model_len=1024
        ) as engine:
            ids = prompts(engine.tokenizer)
            texts[name] = [r.token_ids for r in engine.generate(ids, params)]
    assert texts["K4"] == texts["plain"]
    assert texts["K8 in a bucket of 4"] == texts["plain"]


def test_another_seed_gives_another_text(tiny_model_path):
    with Engine.from_pretrained(tiny_model_path, dtype="float32", compile=False) as engine:
        params = [SamplingParams(temperature=1.0, seed=s, max_tokens=20, ignore_eos=True) for s in (1, 1, 2)]
        first, again, other = (engine.generate("one two", p).token_ids for p in params)
    assert first == again
    assert first != other


@pytest.mark.parametrize("method", ["standard", "block", "coupled"])
def test_rows_do_not_disturb_each_other(tiny_model_path, method):
    """A prompt alone, and the same among others that come and go, give the same tokens."""
    spec = ngram(4, rejection_sample_method=method)
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=30, ignore_eos=True)
    with Engine.from_pretrained(tiny_model_path, spec, dtype="float32", compile=False, max_batch_size=4) as engine:
        ids = prompts(engine.tokenizer)[:5]
        together = [r.token_ids for r in engine.generate(ids, params)]
        alone = [engine.generate(i, params).token_ids for i in ids]
    assert together == alone


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_plain_and_ngram_agree_token_for_token(tiny_model_path, dtype):
    outputs = []
    for spec in (None, ngram(8), ngram(15)):
        with Engine.from_pretrained(
            tiny_model_path, spec, dtype=dtype, exact=True, max_batch_size=2, compile=False
        ) as engine:
            results = engine.generate(prompts(engine.tokenizer), SamplingParams(max_tokens=48, ignore_eos=True))
            outputs.append([r.token_ids for r in results])
    assert outputs[1] == outputs[0]
    assert outputs[2] == outputs[0]


def test_compiled_equals_eager(tiny_model_path):
    outputs = []
    for compiled in (False, True):
        with Engine.from_pretrained(
            tiny_model_path, ngram(3), dtype="float32", compile=compiled, max_batch_size=1
        ) as engine:
            outputs.append(engine.generate("one two three, one two", SamplingParams(max_tokens=24)).token_ids)
    assert outputs[0] == outputs[1]


def test_dynamic_speculation_changes_nothing_but_the_drafts(tiny_model_path, reference):
    spec = ngram(6, num_speculative_tokens_per_batch_size=[[1, 1, 6], [2, 2, 2], [3, 4, 0]])
    with Engine.from_pretrained(tiny_model_path, spec, dtype="float32", compile=False, max_batch_size=4) as engine:
        ids = prompts(engine.tokenizer)[:4]
        results = engine.generate(ids, SamplingParams(max_tokens=40))
        alone = engine.generate(ids[2], SamplingParams(max_tokens=40))
    for prompt, result in zip(ids, results, strict=True):
        assert list(result.token_ids) == reference(prompt, 40)
    assert max(len(row) - 1 for row in alone.metrics.acceptance_histogram) == 6
