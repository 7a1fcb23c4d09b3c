"""The engine accepts exactly what the training loop counts.

The loop counts acceptance at every place of a text; the engine drafts only where a round begins. So that the two can
be compared exactly, what the loop counts is kept place by place, and the rounds are played over it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from small_training import DRAFTS, answers, make_trainee, save_target

from draftgraph import Engine, SamplingParams
from draftgraph.model_zoo.training.export import export_head
from draftgraph.model_zoo.training.loop import train
from draftgraph.model_zoo.training.losses import prefix_hits
from draftgraph.model_zoo.training.settings import TrainingSettings
from draftgraph.model_zoo.training.source import ExampleSource
from draftgraph.model_zoo.training.target import FrozenTarget

LENGTH, HELD_OUT = 24, 8
SETTINGS = TrainingSettings(epochs=4, learning_rate=0.02, batch_tokens=512, warmup_steps=5, save_every=600.0)


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


def right_places(monkeypatch: pytest.MonkeyPatch, trainee, source: ExampleSource, index: int) -> list[list[bool]]:
    """For every place of a text's answer, which drafts from there on the loop counts as right."""
    found: list[torch.Tensor] = []

    def keep(hits, known):
        found.append(hits & known)
        return prefix_hits(hits, known)

    with monkeypatch.context() as patch, torch.no_grad():
        for name, module in list(sys.modules.items()):
            if name.startswith("draftgraph.model_zoo") and hasattr(module, "prefix_hits"):
                patch.setattr(module, "prefix_hits", keep)
        trainee(source.batch([index]), torch.Generator().manual_seed(0))
    assert len(found[0]) >= LENGTH
    return found[0][:LENGTH].tolist()


def played(right: list[list[bool]]) -> int:
    """Rounds that it takes to write the text."""
    place = rounds = 0
    while place < len(right):
        row = right[place]
        place += (row.index(False) if False in row else len(row)) + 1
        rounds += 1
    return rounds


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
def test_the_engine_takes_the_rounds_that_the_loop_promises(kind, target_path, tmp_path, monkeypatch):
    target = FrozenTarget(target_path, dtype=torch.float32, device=torch.device("cpu"), name="some/target")
    # Every place of a text is an anchor; the draft vocabulary leaves out tokens, which count as wrong.
    options = {} if kind == "eagle3" else {"anchors": LENGTH}
    trainee = make_trainee(kind, target, draft_vocab=True, **options)
    texts = answers(target_path, 80, LENGTH, seed=1)
    learnt, held_out = texts[HELD_OUT:], texts[:HELD_OUT]
    layers = trainee.states_of(target.num_layers)
    sources = [ExampleSource(part, target, layers) for part in (learnt, held_out)]
    seen = []
    ended = train(trainee, *sources, SETTINGS, tmp_path, accelerator=Accelerator(cpu=True), watch=seen.append)
    assert ended.held_out.length > seen[0].held_out.length + 0.3
    # bfloat16 would round what is compared.
    export_head(trainee, tmp_path, torch.float32)
    rounds = [played(right_places(monkeypatch, trainee, sources[1], index)) for index in range(HELD_OUT)]
    spec = {"method": kind, "model": str(tmp_path), "num_speculative_tokens": DRAFTS}
    with Engine.from_pretrained(
        target_path, spec, dtype="float32", compile=False, max_batch_size=1, max_model_len=64
    ) as engine:
        params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
        results = engine.generate([list(example.prompt) for example in held_out], params)
    # The answers were written by transformers, plainly.
    assert [result.token_ids for result in results] == [example.answer_tokens() for example in held_out]
    assert [result.metrics.rounds for result in results] == rounds
    assert sum(rounds) < HELD_OUT * LENGTH
