"""Heads that were trained: they accept more than when they began, and the engine drafts with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from small_training import DRAFTS, KINDS, answers, make_trainee, save_target

from draftgraph import Engine, SamplingParams
from draftgraph.model_zoo.errors import CheckpointError
from draftgraph.model_zoo.training.examples import Example
from draftgraph.model_zoo.training.export import export_head, import_head
from draftgraph.model_zoo.training.loop import evaluate, train
from draftgraph.model_zoo.training.settings import TrainingSettings
from draftgraph.model_zoo.training.source import ExampleSource
from draftgraph.model_zoo.training.target import FrozenTarget
from draftgraph.runtime.draft_report import describe

TRAINED = ["eagle3", "dflash", "dspark", "p-eagle", "medusa", "mtp"]
REDUCED = {"eagle3", "dspark", "p-eagle", "medusa"}
SETTINGS = TrainingSettings(
    epochs=8, learning_rate=0.02, warmup_steps=5, batch_tokens=512, patience=8, save_every=600.0
)
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(target_path: Path) -> FrozenTarget:
    return FrozenTarget(target_path, dtype=torch.float32, device=torch.device("cpu"), name="some/target")


@pytest.fixture(scope="module")
def texts(target_path: Path) -> tuple[list[Example], list[Example]]:
    """To train on, and held out."""
    return answers(target_path, 160, 20, seed=1), answers(target_path, 12, 20, seed=2)


def engine(target_path: Path, spec: dict[str, Any]) -> Engine:
    return Engine.from_pretrained(target_path, spec, dtype="float32", compile=False, max_model_len=64, max_batch_size=4)


@pytest.fixture(scope="module")
def plain(target_path: Path, texts: tuple[list[Example], list[Example]]) -> list[tuple[int, ...]]:
    with engine(target_path, {"method": "none"}) as made:
        results = made.generate([list(text.prompt) for text in texts[1]], PARAMS)
    return [result.token_ids for result in results]


def source(examples: Sequence[Example], target: FrozenTarget, trainee: Any) -> ExampleSource:
    return ExampleSource(examples, target, trainee.states_of(target.num_layers))


@pytest.mark.parametrize("kind", TRAINED)
def test_a_trained_head_drafts_what_the_target_writes(tmp_path, target_path, target, texts, plain, kind):
    trainee = make_trainee(kind, target, draft_vocab=kind in REDUCED)
    given, held_out = (source(examples, target, trainee) for examples in texts)
    before = evaluate(trainee, held_out, SETTINGS)
    trained = train(trainee, given, held_out, SETTINGS, tmp_path, accelerator=Accelerator(cpu=True))
    assert trained.position.best > before.length + 1.5
    assert trained.position.best > 2.8

    report = describe(str(tmp_path), str(target_path), None)
    assert (report["problem"], report["mismatch"], report["missing"], report["unexpected"]) == (None, None, [], [])
    assert report["method"] == KINDS[kind][0].method
    spec = {"method": report["method"], "model": str(tmp_path), "num_speculative_tokens": DRAFTS}
    with engine(target_path, spec) as made:
        results = made.generate([list(text.prompt) for text in texts[1]], PARAMS)
    assert [result.token_ids for result in results] == plain
    rounds, accepted = (sum(getattr(r.metrics, name) for r in results) for name in ("rounds", "accepted_tokens"))
    # Answers end within a round, most of them, so that a few drafts fewer are accepted than could be.
    assert 1 + accepted / rounds > trained.position.best - 0.6


@pytest.mark.parametrize("kind", TRAINED)
def test_a_head_that_begins_at_an_exported_one_is_that_head(tmp_path, target, kind):
    reduced = kind in REDUCED
    given = make_trainee(kind, target, draft_vocab=reduced, noise=0.1)
    export_head(given, tmp_path / "once", torch.float32)
    again = make_trainee(kind, target, draft_vocab=reduced)
    import_head(again, tmp_path / "once")
    for name, tensor in given.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    # In bfloat16 what is exported again is what was exported.
    export_head(given, tmp_path / "twice")
    import_head(again, tmp_path / "twice")
    export_head(again, tmp_path / "thrice")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "twice" / name).read_bytes() == (tmp_path / "thrice" / name).read_bytes()


@pytest.mark.parametrize(
    ("kind", "other", "options", "message"),
    [
        ("eagle3", "p-eagle", {}, "ptd_token_id is None there and 5 here"),
        ("eagle3", "eagle3", {"aux_layers": (1,)}, r"eagle_aux_hidden_state_layer_ids is \[0, 1, 2\] there and \[1\]"),
        ("dspark", "dspark", {"markov_rank": 5}, "markov_rank is 6 there and 5 here"),
        ("medusa", "medusa", {"num_blocks": 1}, "num_hidden_layers is 2 there and 1 here"),
    ],
)
def test_beginning_at_another_kind_of_head(tmp_path, target, kind, other, options, message):
    export_head(make_trainee(kind, target, draft_vocab=True), tmp_path)
    with pytest.raises(CheckpointError, match=message):
        import_head(make_trainee(other, target, draft_vocab=True, **options), tmp_path)


def test_beginning_at_a_head_with_another_draft_vocabulary(tmp_path, target):
    given = make_trainee("eagle3", target, draft_vocab=True)
    tensors = given.export_tensors()
    tensors["d2t"] = tensors["d2t"] + 1
    with pytest.raises(CheckpointError, match="d2t is of another draft vocabulary"):
        given.import_tensors(tensors)


def test_a_prediction_module_drafts_all_tokens(target):
    with pytest.raises(ValueError, match="all 90 tokens: it cannot have a draft vocabulary of 60"):
        make_trainee("mtp", target, draft_vocab=True)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("p-eagle", {"num_drafts": 1}, "at least 2 drafts, got num_drafts 1"),
        ("p-eagle", {"mask_token": 90}, "one of the target's tokens, 0 to 89, got 90"),
        ("medusa", {"num_blocks": 0}, "num_blocks must be at least 1, got 0"),
        ("medusa", {"step_decay": 1.5}, r"step_decay must lie in \(0, 1\], got 1.5"),
        ("mtp", {"num_drafts": 0}, "num_drafts must be at least 1, got 0"),
    ],
)
def test_options_out_of_range(target, kind, options, message):
    with pytest.raises(ValueError, match=message):
        make_trainee(kind, target, draft_vocab=False, **options)
