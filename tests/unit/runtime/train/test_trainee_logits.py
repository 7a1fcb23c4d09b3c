"""What learns is what drafts: a head's logits in training are those of the engine that loads it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny_training import frozen, scramble, trainee_of

from draftgraph import Engine, SamplingParams
from draftgraph.model_zoo.dflash.model import DFlashModel
from draftgraph.model_zoo.dspark.model import DSparkModel
from draftgraph.model_zoo.eagle3.model import Eagle3Model
from draftgraph.model_zoo.training.examples import Example
from draftgraph.model_zoo.training.export import export_head
from draftgraph.model_zoo.training.source import ExampleSource
from draftgraph.model_zoo.training.trainee import Trainee

DRAFTS = 3
PROMPT = (17, 45, 201, 9, 88, 17, 46, 130, 131, 132, 60, 61, 62, 5, 7, 250, 33)
CASES = {
    "eagle3": ("eagle3", {}),
    "eagle3, other states": ("eagle3", {"aux_layers": (1,), "train_head": True}),
    "dflash": ("dflash", {}),
    "dflash, all see all": ("dflash", {"causal": False, "num_layers": 1, "mask_token": 11}),
    "dflash, from the anchor": ("dflash", {"from_anchor": True}),
    "dspark": ("dspark", {}),
    "dspark, one layer": ("dspark", {"num_layers": 1, "from_anchor": False, "causal": False}),
}


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch, method: str) -> Iterator[list[torch.Tensor]]:
    """The logits of the drafts that an engine makes, one tensor per call."""
    kind, name, place = {
        "eagle3": (Eagle3Model, "read_out", 1),
        "dflash": (DFlashModel, "read_out", 1),
        "dspark": (DSparkModel, "correct", 0),
    }[method]
    found: list[torch.Tensor] = []
    original = getattr(kind, name)

    def call(self: Any, *args: Any) -> Any:
        result = original(self, *args)
        found.append(result[place].detach().clone())
        return result

    with monkeypatch.context() as patch:
        patch.setattr(kind, name, call)
        yield found


def learnt_logits(trainee: Trainee, source: ExampleSource) -> list[torch.Tensor]:
    """What the head to the vocabulary gave in training, per call, [N, Vd]."""
    base: list[torch.Tensor] = []
    corrections: list[torch.Tensor] = []
    hooks = [trainee.lm_head.register_forward_hook(lambda *call: base.append(call[2].detach()))]
    if hasattr(trainee, "markov_head"):
        head = trainee.markov_head.markov_w2
        hooks.append(head.register_forward_hook(lambda *call: corrections.append(call[2].detach())))
    trainee(source.batch([0]), torch.Generator().manual_seed(0))
    for hook in hooks:
        hook.remove()
    return [one + two for one, two in zip(base, corrections, strict=True)] if corrections else base


@pytest.mark.parametrize("case", CASES)
def test_a_head_drafts_with_the_logits_that_it_learnt_with(case, tiny_model_path, tmp_path, monkeypatch):
    method, options = CASES[case]
    target = frozen(tiny_model_path)
    vocabulary = torch.arange(3, 300, 2)
    trainee = trainee_of(method, target, vocabulary, num_drafts=DRAFTS, **options)
    scramble(trainee)
    export_head(trainee, tmp_path, torch.float32)
    spec = {"method": method, "model": str(tmp_path), "num_speculative_tokens": DRAFTS}
    with (
        Engine.from_pretrained(
            tiny_model_path, spec, dtype="float32", compile=False, max_batch_size=1, max_model_len=64
        ) as engine,
        recorded(monkeypatch, method) as calls,
    ):
        engine.generate(PROMPT, SamplingParams(max_tokens=8, ignore_eos=True))
    # The first round drafts after the prompt: DFlash all drafts at once, the others one per call.
    engine_logits = calls[0][:DRAFTS] if method == "dflash" else torch.cat([call[:1] for call in calls[:DRAFTS]])
    drafts = vocabulary[engine_logits.argmax(-1)].tolist()
    # The text that goes on as the engine drafted; its drafts are the answer, and what is drafted first is row 0.
    source = ExampleSource(
        [Example.answered(PROMPT, drafts)], target, trainee.states_of(target.num_layers), dtype=torch.float32
    )
    logits = learnt_logits(trainee, source)
    ours = torch.stack([step[0] for step in logits]) if method == "eagle3" else logits[0][:DRAFTS]
    assert engine_logits.shape == ours.shape == (DRAFTS, len(vocabulary))
    torch.testing.assert_close(ours, engine_logits, rtol=0, atol=1e-4)
    assert float(ours.std()) > 0.5, "logits that say something"
