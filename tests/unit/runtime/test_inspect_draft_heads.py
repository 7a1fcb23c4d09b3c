"""What `draftgraph inspect` says of a draft head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import build_tokenizer
from draft_blocks import dflash, dspark
from draft_heads import HIDDEN, LAYERS, build_target, eagle, eagle3, medusa
from typer.testing import CliRunner

from draftgraph.runtime.cli import app

VOCAB = len(build_tokenizer())


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    build_target(path, build_tokenizer())
    return path


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["inspect", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_inspect_says_what_a_head_is_and_that_it_fits(target, tmp_path, monkeypatch):
    monkeypatch.setattr("draftgraph.model_zoo.checkpoint.safe_open", None)
    path = eagle3(VOCAB, speculators=True, draft_vocab=50, ids=[1, 4, 6]).save(tmp_path)
    code, out, _ = run(str(path), "--target", str(target), "--json")
    report = json.loads(out)
    assert code == 0
    assert {key: report[key] for key in report if key not in ("checkpoint", "target")} == {
        "method": "eagle3",
        "format": "EAGLE-3, speculators",
        "inside_target": False,
        "num_speculative_tokens": 3,
        "target_hidden_size": HIDDEN,
        "hidden_states": "hidden states 1, 4, 6 (layers 1, 4, 6, read as hidden_states (the speculators format))",
        "vocabulary": f"50 of {VOCAB} tokens, by d2t (offsets)",
        "parallel": False,
        "block": None,
        "missing": [],
        "unexpected": [],
        "problem": None,
        "mismatch": None,
        "note": None,
    }
    code, out, _ = run(str(path), "--target", str(target), "--aux-layer-numbering", "layer_outputs")
    assert code == 0
    joined = " ".join(out.split())
    assert "hidden states 2, 5, 7" in joined
    assert "drafts per round 3" in joined
    assert joined.endswith("fits")


def test_inspect_says_what_a_drafter_of_blocks_is(target, tmp_path):
    draft = dspark(VOCAB, "rnn", speculators=True, draft_vocab=50, sliding=10, ids=[1, 4])
    report = json.loads(run(str(draft.save(tmp_path / "a")), "--target", str(target), "--json")[1])
    assert {key: report[key] for key in ("method", "format", "num_speculative_tokens", "parallel", "mismatch")} == {
        "method": "dspark",
        "format": "dspark, speculators",
        "num_speculative_tokens": 5,
        "parallel": True,
        "mismatch": None,
    }
    assert report["hidden_states"] == "hidden states 1, 4 (layers 1, 4, read as hidden_states (the speculators format))"
    assert report["vocabulary"] == f"50 of {VOCAB} tokens, by d2t (offsets)"
    assert report["block"] == (
        "block_size 6; an anchor and masks; mask token 7; 1 of 2 layers causal; 1 of 2 layers over 10 positions; "
        "rnn Markov head of rank 6; confidence head"
    )
    path = dflash(VOCAB, ids=[1, 12], mask_embedding=True, from_anchor=True).save(tmp_path / "b")
    code, out, _ = run(str(path), "--target", str(target))
    words = " ".join(out.split())
    assert code == 1
    assert "block_size 6; the anchor drafts too; mask token 7, with an embedding of its own; bidirectional" in words
    assert "target_layer_ids [1, 12] of the dflash head" in words


def test_inspect_tells_what_is_wrong(target, tmp_path):
    draft = eagle(VOCAB + 1)
    draft.tensors["more.weight"] = torch.zeros(1)
    del draft.tensors["layers.0.mlp.up_proj.weight"]
    code, out, _ = run(str(draft.save(tmp_path / "a")), "--target", str(target), "--json")
    report = json.loads(out)
    assert code == 1
    assert report["missing"] == ["model.layers.0.mlp.up_proj.weight"]
    assert report["unexpected"] == ["more.weight"]
    assert "lacks tensors" in report["problem"]
    assert f"vocabulary of {VOCAB + 1}, but this one's is {VOCAB}" in report["mismatch"]
    code, out, _ = run(str(medusa(VOCAB, heads=4).save(tmp_path / "b")))
    assert code == 0
    words = " ".join(out.split())
    assert "method medusa" in words
    assert "drafts per round 4" in words, "the heads are counted, whatever config.json says"
    assert "reads the last, after the final norm" in words


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name one thing to inspect"),
        (("x", "--vocab", "a", "b"), "name one thing to inspect"),
        (
            ("{target}",),
            "holds no draft head of a known layout; known methods: medusa, dspark, dflash, eagle3, eagle, mtp",
        ),
        (("/nowhere",), "there is no model '/nowhere'"),
        (("x", "--aux-layer-numbering", "y"), "aux-layer-numbering must be one of 'hidden_states', 'layer_outputs'"),
    ],
)
def test_inspect_of_something_else(target, arguments, message):
    code, _, err = run(*(argument.format(target=target) for argument in arguments))
    assert code == 2
    assert message in " ".join(err.split())
    assert LAYERS == 8


def test_a_head_without_weights(tmp_path):
    path = eagle(VOCAB).save(tmp_path)
    (path / "model.safetensors").unlink()
    (path / "model.gguf").touch()
    code, _, err = run(str(path))
    assert code == 2
    words = " ".join(err.split())
    assert "has no weights, only .gguf files; those of draft heads are read from safetensors, .bin or" in words
