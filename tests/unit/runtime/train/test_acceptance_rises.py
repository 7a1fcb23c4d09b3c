"""Training makes the engine accept more, and as much as the loop says.

The loop counts acceptance at every place of a text; the engine drafts only where a round begins. So that the two can
be compared exactly, what the loop counts is kept place by place, and the rounds are played over it.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from tiny_training import MAKERS, frozen, trainee_of

from draftgraph import Engine, SamplingParams
from draftgraph.model_zoo.dflash import training as dflash_training
from draftgraph.model_zoo.eagle3 import training as eagle3_training
from draftgraph.model_zoo.training.examples import Example
from draftgraph.model_zoo.training.export import export_head
from draftgraph.model_zoo.training.loop import train
from draftgraph.model_zoo.training.losses import prefix_hits
from draftgraph.model_zoo.training.settings import TrainingSettings
from draftgraph.model_zoo.training.source import ExampleSource

DRAFTS, LENGTH, HELD_OUT = 3, 28, 12
SETTINGS = TrainingSettings(epochs=10, learning_rate=4e-3, batch_tokens=512, warmup_steps=10, patience=10)
OPTIONS = {"eagle3": {}, "dflash": {"num_layers": 1}, "dspark": {"num_layers": 1, "markov_rank": 16}}


@pytest.fixture(scope="module")
def answered(tiny_model_path) -> list[Example]:
    """Random prompts and the target's own greedy answers to them."""
    draw = random.Random(1)
    prompts = [[draw.randrange(4, 310) for _ in range(draw.randrange(3, 8))] for _ in range(140)]
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    with Engine.from_pretrained(
        tiny_model_path, dtype="float32", compile=False, max_batch_size=16, max_model_len=64
    ) as engine:
        return [
            Example.answered(prompt, result.token_ids)
            for prompt, result in zip(prompts, engine.generate(prompts, params), strict=True)
        ]


def right_places(monkeypatch: pytest.MonkeyPatch, trainee, source: ExampleSource, index: int) -> list[list[bool]]:
    """For every place of a text's answer, which drafts from there on the loop counts as right."""
    found: list[torch.Tensor] = []

    def keep(hits, known):
        found.append(hits & known)
        return prefix_hits(hits, known)

    with monkeypatch.context() as patch, torch.no_grad():
        for module in (eagle3_training, dflash_training):
            patch.setattr(module, "prefix_hits", keep)
        trainee(source.batch([index]), torch.Generator().manual_seed(0))
    used = found[0].flatten(0, -2)
    return used[:LENGTH].tolist()


def played(right: list[list[bool]]) -> int:
    """Rounds that it takes to write the text."""
    place = rounds = 0
    while place < len(right):
        row = right[place]
        place += (row.index(False) if False in row else len(row)) + 1
        rounds += 1
    return rounds


@pytest.mark.parametrize("method", MAKERS)
def test_the_engine_accepts_what_the_loop_promised(method, answered, tiny_model_path, tmp_path: Path, monkeypatch):
    target = frozen(tiny_model_path)
    options = {"num_drafts": DRAFTS, **OPTIONS[method]}
    if method != "eagle3":
        options["anchors"] = LENGTH  # every place of a text
    trainee = trainee_of(method, target, torch.arange(target.facts().embedding.shape[0]), **options)
    layers = trainee.states_of(target.num_layers)
    learnt, held_out = answered[HELD_OUT:], answered[:HELD_OUT]
    sources = [ExampleSource(part, target, layers) for part in (learnt, held_out)]
    seen = []
    ended = train(trainee, *sources, SETTINGS, tmp_path, accelerator=Accelerator(cpu=True), watch=seen.append)
    before, after = seen[0].held_out, ended.held_out
    assert after.length > before.length + 0.4, (before, after)
    # bfloat16 would round what the comparison is about.
    export_head(trainee, tmp_path, torch.float32)
    rounds = [played(right_places(monkeypatch, trainee, sources[1], index)) for index in range(HELD_OUT)]
    spec = {"method": method, "model": str(tmp_path), "num_speculative_tokens": DRAFTS}
    with Engine.from_pretrained(
        tiny_model_path, spec, dtype="float32", compile=False, max_batch_size=1, max_model_len=64
    ) as engine:
        results = engine.generate(
            [list(example.prompt) for example in held_out], SamplingParams(max_tokens=LENGTH, ignore_eos=True)
        )
    # The answers were written by plain decoding.
    assert [result.token_ids for result in results] == [example.answer_tokens() for example in held_out]
    assert [result.metrics.rounds for result in results] == rounds
    # Places where rounds begin are not all places, so that the loop's length is only about the engine's: texts of 28
    # tokens in some 15 rounds each have a standard error of about 1 / sqrt(12 * 15) drafts.
    measured = HELD_OUT * LENGTH / sum(rounds)
    assert measured == pytest.approx(after.length, abs=0.5)


def test_a_smaller_vocabulary_still_tells_the_same(answered, tiny_model_path, tmp_path, monkeypatch):
    """Tokens that the head cannot draft count as wrong, in the loop as in the engine."""
    target = frozen(tiny_model_path)
    ids = torch.tensor(sorted({token for example in answered for token in example.answer_tokens()[::3]}))
    trainee = trainee_of("eagle3", target, ids, num_drafts=DRAFTS)
    source = ExampleSource(answered[:4], target, trainee.states_of(target.num_layers))
    settings = dataclasses.replace(SETTINGS, epochs=20)
    train(trainee, source, source, settings, tmp_path, accelerator=Accelerator(cpu=True))
    export_head(trainee, tmp_path, torch.float32)
    rounds = [played(right_places(monkeypatch, trainee, source, index)) for index in range(4)]
    spec = {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": DRAFTS}
    with Engine.from_pretrained(
        tiny_model_path, spec, dtype="float32", compile=False, max_batch_size=1, max_model_len=64
    ) as engine:
        params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
        results = engine.generate([list(example.prompt) for example in answered[:4]], params)
    assert [result.metrics.rounds for result in results] == rounds
    assert sum(rounds) < 4 * LENGTH
