"""Heads that come with draftgraph: found for their target alone, and drafting for it without a path."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from shipped import METHODS, TARGET, ship_untrained, trainees
from typer.testing import CliRunner

from draftgraph import Engine, SamplingParams
from draftgraph.model_zoo.errors import CheckpointError
from draftgraph.model_zoo.training.export import export_head
from draftgraph.model_zoo.weights_identity import weights_identity
from draftgraph.runtime import models, shipped_heads
from draftgraph.runtime.cli import app
from draftgraph.runtime.cli_demo import best_head
from draftgraph.runtime.errors import ConfigError, ModelNotFoundError
from draftgraph.runtime.shipped_heads import heads_for, resolve_head, shipped_head, with_shipped_head
from draftgraph.runtime.speculative_config import SpeculativeConfig
from draftgraph.runtime.train.ship_head import held_out_of, ship_head

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
PROMPT = "one two three, one two three"


@pytest.fixture(scope="module")
def heads(tiny_model_path, tmp_path_factory):
    """Where untrained heads for the tiny model lie; no others are found."""
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("heads")
        patch.setattr(shipped_heads, "HEADS_DIRECTORY", root)
        ship_untrained(tiny_model_path, tmp_path_factory.mktemp("trained"))
        yield root


@pytest.fixture
def no_heads(monkeypatch, tmp_path):
    monkeypatch.setattr(shipped_heads, "HEADS_DIRECTORY", tmp_path / "none")


def tuned(path: Path, directory: Path) -> Path:
    """A copy of a model in which some of the weights have other values."""
    shutil.copytree(path, directory)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"] *= 1.001
    save_file(tensors, directory / "model.safetensors")
    return directory


def split(path: Path, directory: Path) -> Path:
    """A copy of a model whose weights lie in two files."""
    shutil.copytree(path, directory)
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    for number in range(2):
        part = {name: tensors[name] for name in sorted(tensors)[number::2]}
        save_file(part, directory / f"{number}.safetensors")
    return directory


def engine(target: Path, spec: object) -> Engine:
    return Engine.from_pretrained(target, spec, dtype="float32", compile=False, max_batch_size=1, max_model_len=128)


class TestIdentity:
    def test_files_do_not_matter_and_weights_do(self, tiny_model_path, tmp_path):
        own = weights_identity(tiny_model_path)
        assert weights_identity(split(tiny_model_path, tmp_path / "same")) == own
        assert weights_identity(tuned(tiny_model_path, tmp_path / "tuned")) != own

    def test_numbers_and_types(self, tmp_path):
        found = set()
        for dtype in (torch.float32, torch.bfloat16):
            for value in (0.0, 1.0):
                save_file({"scale": torch.tensor(value, dtype=dtype)}, tmp_path / "model.safetensors")
                found.add(weights_identity(tmp_path))
        assert len(found) == 4

    def test_no_weights(self, tmp_path):
        with pytest.raises(CheckpointError, match="no safetensors"):
            weights_identity(tmp_path)
        (tmp_path / "model.safetensors").write_bytes(b"nothing")
        with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
            weights_identity(tmp_path)


class TestForATarget:
    def test_by_its_weights(self, heads, tiny_model_path, tmp_path):
        assert tuple(head.method for head in heads_for(tiny_model_path, tiny_model_path)) == METHODS
        copy = split(tiny_model_path, tmp_path / "copy")
        assert len(heads_for(copy, copy)) == 3

    def test_by_its_alias(self, heads, tmp_path, monkeypatch):
        cached = tmp_path / "models" / TARGET
        cached.mkdir(parents=True)
        monkeypatch.setitem(models.ALIASES, TARGET, models.ALIASES["smollm2-135m"])
        monkeypatch.setenv("DRAFTGRAPH_CACHE", str(tmp_path))
        # None of these reads weights: there are none.
        for name in (TARGET, models.ALIASES[TARGET].repository, cached, str(cached)):
            assert len(heads_for(name, cached)) == 3

    def test_a_folder_of_the_alias_s_name_is_not_the_alias(self, heads, tiny_model_path, tmp_path, monkeypatch):
        monkeypatch.setitem(models.ALIASES, TARGET, models.ALIASES["smollm2-135m"])
        monkeypatch.chdir(tmp_path)
        tuned(tiny_model_path, tmp_path / TARGET)
        assert heads_for(TARGET, Path(TARGET)) == ()

    @pytest.mark.parametrize("method", METHODS)
    def test_a_model_of_the_same_sizes_is_refused(self, heads, tiny_model_path, tmp_path, method):
        other = tuned(tiny_model_path, tmp_path / "tuned")
        with pytest.raises(ConfigError) as caught:
            engine(other, {"method": method})
        for part in (f"'{method}' needs model", f"{TARGET} (dflash, dspark, eagle3)", f"{other} is not the model"):
            assert part in str(caught.value)

    def test_a_head_of_another_method(self, heads, tiny_model_path, tmp_path, monkeypatch):
        shutil.copytree(heads / TARGET / "dflash", tmp_path / "few" / TARGET / "dflash")
        monkeypatch.setattr(shipped_heads, "HEADS_DIRECTORY", tmp_path / "few")
        with pytest.raises(ConfigError, match=f"needs model.* there are only 'dflash@{TARGET}'"):
            engine(tiny_model_path, {"method": "eagle3"})

    def test_where_none_are_installed(self, no_heads, tiny_model_path):
        assert heads_for("x", Path("/nowhere")) == ()
        with pytest.raises(ConfigError, match=r"'dspark' needs model.*come with draftgraph for no model"):
            engine(tiny_model_path, {"method": "dspark"})

    def test_a_named_model_is_kept(self, heads, tiny_model_path):
        for config in (
            SpeculativeConfig(method="eagle3", model="mine"),
            SpeculativeConfig(method="ngram", num_speculative_tokens=2),
            SpeculativeConfig(method="mtp", num_speculative_tokens=2),
        ):
            assert with_shipped_head(config, "x", tiny_model_path) is config


@pytest.fixture(scope="module")
def plain(tiny_model_path):
    with engine(tiny_model_path, None) as one:
        return one.generate(PROMPT, PARAMS).token_ids


class TestDrafting:
    @pytest.mark.parametrize("method", METHODS)
    def test_without_a_path(self, heads, tiny_model_path, plain, method):
        with engine(tiny_model_path, {"method": method}) as one:
            speculative = one.config.speculative
            assert (speculative.model, speculative.num_speculative_tokens) == (f"{method}@{TARGET}", 3)
            assert one.generate(PROMPT, PARAMS).token_ids == plain

    def test_by_name_in_a_list_for_a_model_that_it_was_not_trained_for(self, heads, tiny_model_path, tmp_path):
        other = tuned(tiny_model_path, tmp_path / "tuned")
        with engine(other, None) as one:
            expected = one.generate(PROMPT, PARAMS).token_ids
        spec = {"method": ["ngram", "eagle3"], "model": f"eagle3@{TARGET}", "num_speculative_tokens": 2}
        with engine(other, spec) as one:
            assert one.generate(PROMPT, PARAMS).token_ids == expected

    def test_in_a_list_without_a_path(self, heads, tiny_model_path):
        with engine(tiny_model_path, {"method": ["ngram", "eagle3"]}) as one:
            assert one.config.speculative.model == f"eagle3@{TARGET}"


class TestNames:
    def test_resolve(self, heads, tmp_path, monkeypatch):
        assert resolve_head(f"dflash@{TARGET}") == heads / TARGET / "dflash"
        for name in ("medusa@a-small-model", "eagle3@gpt", "eagle3@"):
            with pytest.raises(ModelNotFoundError, match=r"a-small-model|looked for"):
                resolve_head(name)
        monkeypatch.chdir(tmp_path)
        shutil.copytree(heads / TARGET / "eagle3", tmp_path / f"dflash@{TARGET}")
        assert resolve_head(f"dflash@{TARGET}") == Path(f"dflash@{TARGET}"), "a folder comes first"

    def test_inspect(self, heads, tiny_model_path):
        arguments = ["inspect", f"dspark@{TARGET}", "--target", str(tiny_model_path)]
        result = CliRunner().invoke(app, [*arguments, "--json"])
        assert result.exit_code == 0, result.output
        report = json.loads(result.output)
        assert (report["method"], report["num_speculative_tokens"], report["mismatch"]) == ("dspark", 3, None)
        assert report["note"]["target"]["alias"] == TARGET
        shown = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"}).output
        assert "held-out acceptance   3.50 tokens per round (K = 3: 40% 10% by position) on nothing" in shown
        assert "trained by" in shown
        missing = CliRunner().invoke(app, ["inspect", "eagle3@gpt"])
        assert missing.exit_code == 2
        assert f"no draft head 'eagle3@gpt' comes with draftgraph; there are heads for {TARGET}" in missing.output

    def test_the_best(self, heads, tmp_path, monkeypatch):
        found = shipped_heads.shipped_heads()
        assert best_head(found).method == "dspark"
        assert best_head(()) is None
        shutil.copytree(heads, tmp_path / "heads")
        note_file = tmp_path / "heads" / TARGET / "dflash" / "head.json"
        note = json.loads(note_file.read_text())
        note["held_out"]["speed_up"] = 1.1
        note_file.write_text(json.dumps(note))
        monkeypatch.setattr(shipped_heads, "HEADS_DIRECTORY", tmp_path / "heads")
        assert best_head(shipped_heads.shipped_heads()).method == "dflash", "a speed-up that was measured counts first"
        note_file.write_text("[]")
        with pytest.raises(CheckpointError, match=r"head\.json is missing or holds no JSON object"):
            _ = shipped_head(TARGET, "dflash").rank


class TestShipping:
    def test_what_is_refused(self, tiny_model_path, tmp_path, monkeypatch):
        monkeypatch.setattr(shipped_heads, "HEADS_DIRECTORY", tmp_path / "heads")
        with pytest.raises(CheckpointError):
            ship_head(tiny_model_path, TARGET, tiny_model_path, {})
        export_head(trainees(tiny_model_path)[0], tmp_path / "head")
        monkeypatch.setattr("draftgraph.runtime.train.ship_head.LARGEST_BYTES", 1000)
        with pytest.raises(ConfigError, match="MB of weights"):
            ship_head(tmp_path / "head", TARGET, tiny_model_path, {})
        assert not (tmp_path / "heads").exists()

    def test_the_figures_are_those_of_the_head(self, tmp_path):
        figures = {"answers": 80, "tokens_per_round": 2.34567, "acceptance_by_position": [0.71234, 0.5]}
        document = {"methods": [{"config": {"model": str(tmp_path / "head")}, "by_set": {"mtbench": figures}}]}
        found = held_out_of(document, tmp_path / "head", "mtbench")
        assert (found["mean_acceptance_length"], found["num_speculative_tokens"]) == (2.346, 2)
        for source, name in ((tmp_path / "other", "mtbench"), (tmp_path / "head", "humaneval")):
            with pytest.raises(ConfigError, match="nothing about"):
                held_out_of(document, source, name)
