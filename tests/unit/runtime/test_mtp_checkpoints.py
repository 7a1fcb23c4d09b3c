"""Checkpoints of prediction modules: where they lie, what they share, what does not fit, and what inspect says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import build_tokenizer
from mtp_heads import HIDDEN, Modules
from safetensors.torch import load_file, save_file
from toy_modules import modules as toy_modules
from typer.testing import CliRunner

from draftgraph import Engine, SamplingParams
from draftgraph.model_zoo.errors import CheckpointError, UnsupportedModelError
from draftgraph.model_zoo.mtp.layout import LAYOUTS
from draftgraph.runtime.cli import app
from draftgraph.runtime.errors import ConfigError
from draftgraph.runtime.speculative_config import SpeculativeConfig

TOKENIZER = build_tokenizer()
VOCAB = len(TOKENIZER)
OPTIONS: dict[str, Any] = {"dtype": "float32", "compile": False, "max_model_len": 128}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Modules]:
    found: dict[tuple[str, int, bool], Modules] = {}

    def make(style: str, count: int = 1, own: bool = False) -> Modules:
        key = (style, count, own)
        if key not in found:
            found[key] = Modules(tmp_path_factory.mktemp(style), TOKENIZER, style, count=count, own=own)
        return found[key]

    return make


def engine(target: Path, depth: int | None = 2, **options: Any) -> Engine:
    return Engine.from_pretrained(target, {"method": "mtp", "num_speculative_tokens": depth, **options}, **OPTIONS)


def rewritten(
    source: Path,
    path: Path,
    config: dict[str, Any] | None = None,
    tensors: Callable[[dict[str, torch.Tensor]], Any] | None = None,
) -> Path:
    """A copy of a checkpoint with other fields or tensors."""
    path.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    stored = load_file(path / "model.safetensors")
    if tensors is not None:
        tensors(stored)
        save_file(stored, path / "model.safetensors")
    if config is not None:
        hf = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**hf, **config}))
    return path


@pytest.mark.parametrize("style", ["qwen", "glm"])
@pytest.mark.parametrize("tables", [False, True])
def test_modules_of_a_separate_checkpoint_draft_as_those_inside(made, tmp_path, style, tables):
    modules = made(style, 2 if style == "glm" else 1)
    path = modules.split(tmp_path, tables=tables)
    rates = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.7, 0.5]}
    texts = []
    for options in ({}, {"model": str(path)}):
        with engine(modules.path, **rates, **options) as running:
            result = running.generate([5, 6, 7, 8], SamplingParams(max_tokens=12, ignore_eos=True, seed=1))
            texts.append(result.token_ids)
            head = running._core._speculator._head
            target = running._target.model
            assert all(module.embedding is target.weights.embedding for module in head._modules)
            assert all(module.head is None for module in head._modules)
    assert texts[0] == texts[1]


def test_tables_are_shared_unless_they_differ(made):
    with engine(made("deepseek", 2, True).path) as running:
        head, target = running._core._speculator._head, running._target.model
        first, second = head._modules
        assert first.embedding is target.weights.embedding
        assert first.head is None
        assert second.embedding is not target.weights.embedding
        assert second.head is not None


@pytest.mark.parametrize(("style", "count"), [("qwen", 2), ("glm", 3), ("mimo", 1)])
def test_without_num_speculative_tokens_there_are_as_many_as_modules(made, style, count):
    with engine(made(style, count).path, None) as running:
        assert running.config.speculative.num_speculative_tokens == count


def test_depth_and_modules_must_go_together(made):
    with pytest.raises(ConfigError, match=r"num_speculative_tokens is 5, but .* n_predict = 2 tokens in one turn"):
        engine(made("qwen", 2).path, 5)


def test_a_target_without_modules(tiny_model_path):
    with pytest.raises(CheckpointError, match=r"tiny.* holds no draft head of method 'mtp': it is none that"):
        engine(tiny_model_path)


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.update({name: tensor})


MISFITS: dict[str, tuple[str, dict[str, Any], Callable[[dict[str, torch.Tensor]], Any] | None, str]] = {
    "a part": ("glm", {}, drop("model.layers.2.hnorm.weight"), r"lacks tensors: model\.layers\.2\.hnorm\.weight"),
    "a weight of the layer": (
        "mimo",
        {},
        drop("model.mtp_layers.0.mlp.up_proj.weight"),
        r"lacks tensors: model\.mtp_layers\.0\.mlp\.up_proj\.weight",
    ),
    "an expert": (
        "deepseek",
        {},
        drop("model.layers.2.mlp.experts.3.up_proj.weight"),
        r"lacks tensors: model\.layers\.2\.mlp\.experts\.3\.up_proj\.weight",
    ),
    "a module": ("ernie", {"num_nextn_predict_layers": 2}, None, r"lacks tensors: model\.mtp_block\.1\."),
    "a shape": (
        "ernie",
        {},
        put("model.mtp_linear_proj.0.weight", torch.zeros(HIDDEN, HIDDEN)),
        r"model\.mtp_linear_proj\.0\.weight in .* has shape \[32, 32\], but its configuration makes it \[32, 64\]",
    ),
    "without use": (
        "qwen",
        {},
        put("mtp.layers.0.mlp.extra.weight", torch.zeros(1)),
        r"has tensors without use: mtp\.layers\.0\.mlp\.extra\.weight",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_refused_before_weights_are_read(made, tmp_path, monkeypatch, case):
    style, config, tensors, message = MISFITS[case]
    path = rewritten(made(style).path, tmp_path, config, tensors)
    monkeypatch.setattr("draftgraph.runtime.loading.load_model", None)
    with pytest.raises(CheckpointError, match=message):
        engine(path)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"vocab_size": VOCAB + 3}, CheckpointError, rf"vocabulary of {VOCAB + 3}, but this one's is {VOCAB}"),
        ({"model_type": "rwkv"}, UnsupportedModelError, "model type 'rwkv'; supported"),
        ({"layer_types": ["linear_attention"] * 2}, UnsupportedModelError, "linear_attention"),
    ],
)
def test_a_separate_checkpoint_that_does_not_fit(made, tmp_path, config, error, message):
    modules = made("mimo")
    path = rewritten(modules.split(tmp_path / "a"), tmp_path / "b", config)
    with pytest.raises(error, match=message):
        engine(modules.path, model=str(path))


def test_modules_of_another_size(made, tmp_path):
    path = toy_modules(VOCAB, "mimo").save(tmp_path)
    with pytest.raises(CheckpointError, match=f"hidden size of 64, but this one's is {HIDDEN}"):
        engine(made("mimo").path, model=str(path))


def test_one_set_of_weights_drafts():
    for other in ("eagle3", "draft_model"):
        with pytest.raises(ConfigError, match=f"'{other}' and 'mtp', which each need a model; accepted: one such"):
            SpeculativeConfig(method=(other, "mtp"), model="x", num_speculative_tokens=2)


def test_plain_decoding_leaves_modules_alone(made):
    for style in ("qwen", "qwen3_next", "glm", "mimo", "ernie"):
        with Engine.from_pretrained(made(style).path, **OPTIONS) as running:
            assert len(running.generate([5, 6], SamplingParams(max_tokens=2, ignore_eos=True)).token_ids) == 2


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["inspect", *arguments])
    return result.exit_code, result.stdout


@pytest.mark.parametrize(("style", "count"), [("deepseek", 2), ("qwen", 1), ("mimo", 1), ("ernie", 1)])
def test_inspect_tells_of_modules_inside_a_target_and_apart(made, tmp_path, style, count):
    modules = made(style, count)
    apart = modules.split(tmp_path)
    plural = "1 module" if count == 1 else f"{count} modules"
    for path, inside in ((modules.path, True), (apart, False)):
        code, out = run(str(path), "--target", str(modules.path), "--json")
        report = json.loads(out)
        assert code == 0
        assert {key: report[key] for key in report if key not in ("checkpoint", "target")} == {
            "method": "mtp",
            "format": f"MTP, {LAYOUTS[style].title}, {plural}",
            "inside_target": inside,
            "num_speculative_tokens": count,
            "block": None,
            "target_hidden_size": HIDDEN,
            "hidden_states": "the last, after the final norm",
            "vocabulary": f"all {VOCAB} tokens",
            "parallel": False,
            "missing": [],
            "unexpected": [],
            "problem": None,
            "mismatch": None,
            "note": None,
        }
    code, out = run(str(modules.path))
    words = " ".join(out.split())
    assert "method mtp" in words
    assert "place inside a target's checkpoint" in words


def test_inspect_tells_what_is_wrong(made, tmp_path):
    path = rewritten(made("glm").path, tmp_path, None, drop("model.layers.2.eh_proj.weight"))
    code, out = run(str(path), "--json")
    report = json.loads(out)
    assert code == 1
    assert report["missing"] == ["model.layers.2.eh_proj.weight"]
    assert "lacks tensors" in report["problem"]
