"""Synthetic acceptance meets its rates, whatever the model says."""

from __future__ import annotations

import pytest

from draftgraph import Engine, SamplingParams
from draftgraph.runtime.verification.synthetic import conditional_rates, rates_of_length

SPEC = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "rejection_sample_method": "synthetic",
}


@pytest.mark.parametrize(
    ("length", "drafts", "rates"),
    [
        (1.0, 3, (0.0, 0.0, 0.0)),
        (2.5, 3, (1.0, 0.5, 0.0)),
        (4.0, 3, (1.0, 1.0, 1.0)),
        (1.0, 0, ()),
    ],
)
def test_rates_of_a_length(length, drafts, rates):
    assert rates_of_length(length, drafts) == rates
    assert 1 + sum(rates) == length


def test_conditional_rates():
    assert conditional_rates((0.8, 0.4, 0.0, 0.0)) == (0.8, 0.5, 0.0, 0.0)


@pytest.mark.parametrize(
    ("option", "value", "temperature", "rates"),
    [
        ("synthetic_acceptance_length", 3.5, 0.0, (1.0, 1.0, 0.5, 0.0)),
        ("synthetic_acceptance_rates", [0.9, 0.6, 0.3, 0.1], 1.0, (0.9, 0.6, 0.3, 0.1)),
    ],
)
def test_the_engine_accepts_at_the_rates(tiny_model_path, option, value, temperature, rates):
    with Engine.from_pretrained(
        tiny_model_path, SPEC | {option: value}, dtype="float32", compile=False, max_batch_size=4
    ) as engine:
        params = SamplingParams(max_tokens=200, ignore_eos=True, temperature=temperature, seed=5, n=4)
        results = engine.generate("one two three, one two three, one two three, one", params)
    full = [0] * 5
    for result in results:
        assert result.synthetic
        for accepted, count in enumerate(result.metrics.acceptance_histogram[4]):
            full[accepted] += count
    rounds = sum(full)
    assert rounds > 60
    for drafts, rate in enumerate(rates, 1):
        share = sum(full[drafts:]) / rounds
        assert abs(share - rate) <= 4.5 * (rate * (1 - rate) / rounds) ** 0.5


def test_an_honest_result_does_not_say_synthetic(engine):
    assert not engine.generate("one", SamplingParams(max_tokens=2)).synthetic
