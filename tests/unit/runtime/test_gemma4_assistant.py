"""Gemma 4's assistants draft as the plain mathematics and as transformers do, and change nothing of the output."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import draft_heads
import pytest
import torch
import toy_language as toy
from conftest import build_tokenizer
from gemma4_assistants import (
    LAYERS,
    NAMES,
    ORDERED_NAMES,
    TARGET_TYPES,
    assistant_drafts,
    build_assistant,
    build_target,
    build_toy,
    transformers_drafts,
)
from safetensors.torch import load_file, save_file
from test_draft_heads import ExtraRounds, record_proposals
from test_executor_identity import engine_with, make
from typer.testing import CliRunner

from draftgraph import Engine, SamplingParams
from draftgraph.model_zoo.errors import CheckpointError, UnsupportedModelError
from draftgraph.profiling.floor import RoundShape
from draftgraph.runtime.cli import app
from draftgraph.runtime.errors import ConfigError

KINDS: dict[str, dict[str, Any]] = {"tied": {}, "ordered": {"ordered": True}, "own head": {"tied": False}}


class World:
    """The target and the assistants on disk and in transformers, and engines."""

    def __init__(self, path: Path) -> None:
        tokenizer = build_tokenizer()
        self.path, self.vocab = path, len(tokenizer)
        self.target = build_target(path / "target", tokenizer)
        self.assistants = {kind: build_assistant(path / kind, self.vocab, **KINDS[kind]) for kind in KINDS}
        texts = ["one two three, one two three, one", "The steam engine", "a", "def add(a, b):\n    return"]
        self.prompts = [tokenizer(text)["input_ids"] for text in texts]
        self.prompts.append(tokenizer("The steam engine changed how people worked. " * 14)["input_ids"])
        assert len(self.prompts[-1]) > 256, "longer than a prefill chunk"

    def engine(self, kind: str | None, depth: int | None = None, path: Path | None = None, **options: Any) -> Engine:
        spec: dict[str, Any] = {"method": "none"}
        if kind is not None:
            spec = {"method": "mtp", "model": str(path or self.path / kind), "num_speculative_tokens": depth}
        names = ("rejection_sample_method", "draft_sample_method", "synthetic_acceptance_rates", "parallel_drafting")
        spec |= {key: options.pop(key) for key in names if key in options}
        options = {"dtype": "float32", "compile": False, "max_model_len": 512, "max_batch_size": 2, **options}
        return Engine.from_pretrained(self.path / "target", spec, **options)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("gemma4"))


def test_checkpoints_have_the_published_names(world):
    stored = {kind: set(load_file(world.path / kind / "model.safetensors")) for kind in KINDS}
    assert stored == {"tied": NAMES, "ordered": NAMES | ORDERED_NAMES, "own head": NAMES | {"lm_head.weight"}}


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_equal_the_plain_mathematics_and_transformers(world, kind):
    """Synthetic acceptance leaves 0 to K drafts standing, so that the cache holds rejected keys in every place."""
    depth = 4
    rates = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.8, 0.6, 0.5, 0.4]}
    with world.engine(kind, depth, metrics="detailed", **rates) as engine:
        found = record_proposals(engine)
        params = SamplingParams(max_tokens=14, ignore_eos=True, seed=5)
        results = engine.generate(world.prompts, params)
        again = [*world.prompts[0], *engine.generate(world.prompts[0], params).token_ids, 5, 6]
        reusing = engine.generate(again, SamplingParams(max_tokens=4, ignore_eos=True))
    assert reusing.metrics.reused_prompt_tokens > 0
    assert {pair[1] for r in results for pair in r.metrics.round_pairs} >= {0, 1, depth}, "every kind of round"
    compared = [entry for entry in found if len(entry[0]) > 1]  # before it there is no hidden state
    assert len(compared) > 20
    assistant = world.assistants[kind]
    for tokens, drafts, logits in compared:
        plain, known = assistant_drafts(assistant, world.target, tokens, len(drafts))
        theirs, scores = transformers_drafts(assistant, world.target, tokens, len(drafts))
        for step, (ours, expected, some) in enumerate(zip(logits, plain, known, strict=True)):
            where = f"draft {step} after {len(tokens)} tokens"
            torch.testing.assert_close(ours, expected, rtol=2e-3, atol=2e-3, msg=where)
            torch.testing.assert_close(ours[some], scores[step][some], rtol=2e-3, atol=2e-3, msg=where)
        assert drafts == [int(values.argmax()) for values in plain] == theirs


GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
WARM = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.8, seed=4)


@pytest.fixture(scope="module")
def plain(world: World) -> dict[SamplingParams, list[tuple[int, ...]]]:
    """Plain decoding's tokens; the last parameters stop at a token in the middle of the first answer."""
    with world.engine(None, rejection_sample_method="coupled", max_batch_size=1) as engine:
        found = {params: [r.token_ids for r in engine.generate(world.prompts, params)] for params in (GREEDY, WARM)}
        stopped = SamplingParams(max_tokens=16, stop_token_ids=[found[GREEDY][0][8]], ignore_eos=True)
        found[stopped] = [r.token_ids for r in engine.generate(world.prompts, stopped)]
    assert len(found[stopped][0]) <= 9
    return found


@pytest.mark.parametrize(
    ("depth", "batch", "kind"),
    [
        (1, 1, "tied"),
        (2, 2, "ordered"),
        (3, 4, "tied"),
        (4, 2, "own head"),
        (5, 1, "ordered"),
        (6, 4, "tied"),
        (7, 2, "tied"),
    ],
)
def test_coupled_output_is_plain_decodings(world, plain, depth, batch, kind):
    sampling = "probabilistic" if depth % 2 else "greedy"
    options = {"rejection_sample_method": "coupled", "draft_sample_method": sampling, "max_batch_size": batch}
    with world.engine(kind, depth, **options) as engine:
        for params, expected in plain.items():
            results = engine.generate(world.prompts, params)
            assert [r.token_ids for r in results] == expected
            assert sum(r.metrics.proposed_tokens for r in results) > 0


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_greedy_output_is_greedy_under_every_rule(world, plain, rule):
    with world.engine("ordered", 3, rejection_sample_method=rule, draft_sample_method="probabilistic") as engine:
        assert [r.token_ids for r in engine.generate(world.prompts, GREEDY)] == plain[GREEDY]


def test_one_that_knows_is_accepted_and_one_that_errs_at_j_stops_there(tmp_path):
    build_toy(tmp_path, build_tokenizer())
    depth = 6
    spec = {"method": "mtp", "model": str(tmp_path / "assistant"), "num_speculative_tokens": depth}
    options = {"dtype": "float32", "compile": False, "max_model_len": 128, "max_batch_size": 1, "metrics": "detailed"}
    with Engine.from_pretrained(tmp_path / "target", spec, **options) as engine:
        for j, cycle in enumerate(toy.cycles()[:depth]):
            # Every round begins after the token that the assistant misjudges.
            params = SamplingParams(max_tokens=4 * (j + 1), ignore_eos=True)
            result = engine.generate(toy.prompt_of(cycle, 8), params)
            assert [accepted for _, accepted in result.metrics.round_pairs] == [j] * 4
        params = SamplingParams(max_tokens=4 * (depth + 1), ignore_eos=True)
        result = engine.generate(toy.cycles()[-1][:9], params)
        assert result.metrics.round_pairs == ((depth, depth),) * 4


def test_it_allocates_no_cache_and_leaves_the_targets_alone(world):
    with world.engine("tied", 3) as engine:
        core = engine._core
        assert core._speculator._cache is core._builder._cache
        assert core._speculator.target_states == (LAYERS,)
        assert core._speculator.unseen == 0
        head = core._speculator._head
        assert head._sources == (2, 2, 1), "the last of each type that has keys and values"
        assert TARGET_TYPES[3:] == ["full_attention"] * 2, "which the last two have not"
        with pytest.raises(TypeError, match="has none of its own"):
            head.allocate_cache(1, 64)


def test_the_floor_of_a_step_counts_its_weights(world):
    """Two sliding layers with heads of 8, a full one of 16; the projections, the centroids, 40 of 320 logits."""
    layer, vectors = {8: 2 * 24 * 4 * 8, 16: 2 * 24 * 4 * 16}, 4 * 24 + 1
    weights = 2 * layer[8] + layer[16] + 3 * (3 * 24 * 40 + vectors) + 2 * 8 + 16 + 24
    weights += 3 * 32 * 24 + 32 * 24 + 40 * 24
    with world.engine("ordered", 4) as engine:
        cost = engine._core.propose_cost(RoundShape(rows=1, width=8, window=5, context=100, num_drafts=4))
        cache = (
            2 * 2 * 2 * 8 * 9 + 2 * 2 * 16 * 99
        )  # of two sliding layers what a window of 10 lets see, of the full one all
        embeddings = 24
        assert cost.bytes_read == 4 * 4 * (weights + cache + embeddings)
        assert cost.bytes_written == 4 * 4 * 320, "no keys and values"
        assert engine.prefill_cost(width=16, tokens=9, context=0).bytes_read > 0


def changed(world: World, path: Path, kind: str = "tied", text: dict[str, Any] | None = None, **fields: Any) -> Path:
    """A copy of an assistant with another config.json; None removes a field."""
    shutil.copytree(world.path / kind, path)
    config = json.loads((path / "config.json").read_text())
    config["text_config"].update(text or {})
    config.update(fields)
    (path / "config.json").write_text(json.dumps({name: v for name, v in config.items() if v is not None}))
    return path


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"text": {"num_kv_shared_layers": 2}}, CheckpointError, "is 2, but all of its 3 layers must share"),
        ({"text": {"enable_moe_block": True}}, UnsupportedModelError, "enable_moe_block True in an assistant"),
        ({"text": {"layer_types": ["rwkv"] * 3}}, UnsupportedModelError, r"layer types \['rwkv'\]; supported"),
        ({"text_config": None}, CheckpointError, "lacks text_config"),
        ({"model_type": "gemma4_unified_assistant"}, UnsupportedModelError, "supported: gemma4_assistant"),
        ({"kind": "ordered", "num_centroids": 33}, CheckpointError, "320 tokens do not form 33 groups of equal size"),
        (
            {"kind": "ordered", "use_ordered_embeddings": False},
            CheckpointError,
            "tensors without use: masked_embedding.centroids.weight",
        ),
        ({"use_ordered_embeddings": True, "num_centroids": 32}, CheckpointError, "lacks tensors: masked_embedding"),
        ({"tie_word_embeddings": False}, CheckpointError, "lacks tensors: lm_head.weight"),
    ],
)
def test_what_does_not_fit_is_refused_before_weights_are_read(world, tmp_path, monkeypatch, change, error, message):
    monkeypatch.setattr("draftgraph.runtime.loading.load_model", None)
    with pytest.raises(error, match=message):
        world.engine("tied", 3, path=changed(world, tmp_path / "a", **change))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone": 48}, "hidden size of 48, but this one's is 32"),
        ({"vocab": 330}, "vocabulary of 330, but this one's is 320"),
        ({"head_dim": 16}, "for sliding_attention layers with a head size of 16, but the target's is 8"),
        ({"global_head_dim": 32}, "for full_attention layers with a head size of 32, but the target's is 16"),
        ({"num_key_value_heads": 4}, "with a number of key heads of 4, but the target's is 2"),
    ],
)
def test_an_assistant_of_another_target_is_refused(world, tmp_path, monkeypatch, changes, message):
    monkeypatch.setattr("draftgraph.runtime.loading.load_model", None)
    build_assistant(tmp_path, **{"vocab": world.vocab, **changes})
    with pytest.raises(CheckpointError, match=message):
        world.engine("tied", 3, path=tmp_path)


def test_an_ordering_that_is_none_is_refused(world, tmp_path):
    path = tmp_path / "a"
    shutil.copytree(world.path / "ordered", path)
    tensors = load_file(path / "model.safetensors")
    tensors["masked_embedding.token_ordering"][0] = 7
    tensors["masked_embedding.token_ordering"][1] = 7
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="token_ordering must hold each of the 320 tokens once"):
        world.engine("ordered", 3, path=path)


def test_what_the_configuration_asks_for_must_be_there(world):
    with pytest.raises(ConfigError, match="needs num_speculative_tokens"):
        world.engine("tied")
    with pytest.raises(CheckpointError, match="target holds no draft head of method 'mtp'"):
        Engine.from_pretrained(world.path / "target", {"method": "mtp", "num_speculative_tokens": 2}, dtype="float32")
    spec = {"method": "eagle", "model": str(world.path / "tied"), "num_speculative_tokens": 2}
    with pytest.raises(
        CheckpointError, match="holds no draft head of method 'eagle': it looks like one of method 'mtp'"
    ):
        Engine.from_pretrained(world.path / "target", spec, dtype="float32", compile=False)


def test_a_target_of_another_kind_is_refused(world, tiny_model_path, tmp_path):
    spec = {"method": "gemma4_mtp", "model": str(world.path / "tied"), "num_speculative_tokens": 2}
    draft_heads.build_target(tmp_path, build_tokenizer())
    with pytest.raises(CheckpointError, match="for models of type 'gemma4_text', but this one's is 'llama'"):
        Engine.from_pretrained(tmp_path, spec, dtype="float32", compile=False)
    with pytest.raises(CheckpointError, match="hidden size of 32, but this one's is 48"):
        Engine.from_pretrained(tiny_model_path, spec, dtype="float32", compile=False)


def test_inspect_knows_it(world, tmp_path, monkeypatch):
    monkeypatch.setattr("draftgraph.model_zoo.checkpoint.safe_open", None)

    def inspect(path: Path) -> tuple[int, dict[str, Any]]:
        result = CliRunner().invoke(app, ["inspect", str(path), "--target", str(world.path / "target"), "--json"])
        return result.exit_code, json.loads(result.stdout)

    code, report = inspect(world.path / "ordered")
    assert code == 0
    assert {key: report[key] for key in ("method", "format", "num_speculative_tokens", "target_hidden_size")} == {
        "method": "mtp",
        "format": "Gemma 4 assistant",
        "num_speculative_tokens": None,
        "target_hidden_size": 32,
    }
    assert report["hidden_states"] == (
        "the last, after the final norm, and the target's keys and values (sliding_attention: of layer 2; "
        "full_attention: of layer 1)"
    )
    assert report["vocabulary"] == "all 320 tokens, 40 of them at a time, in 4 of 32 groups"
    assert report["missing"] == report["unexpected"] == []
    build_assistant(tmp_path / "a", world.vocab, head_dim=16)
    code, report = inspect(tmp_path / "a")
    assert code == 1
    assert "head size of 16" in report["mismatch"]
    assert report["problem"] is None


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["extra rounds", "loop worker", "round worker"])
def test_drafts_do_not_depend_on_the_executor(world, executor):
    """Synthetic acceptance emits drafts, so the text tells them all."""
    spec = {"method": "mtp", "model": str(world.path / "ordered"), "num_speculative_tokens": 4}
    spec |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.8, 0.6, 0.5, 0.4]}
    params = SamplingParams(max_tokens=14, ignore_eos=True, seed=5)
    texts = []
    for kind, limits in (("host", {}), (executor, {"ring": 11, "rounds_per_launch": 3})):
        made = ExtraRounds() if kind == "extra rounds" else make(kind)
        with engine_with(world.path / "target", made, spec, max_batch_size=2, max_model_len=512, **limits) as engine:
            texts.append([r.token_ids for r in engine.generate(world.prompts, params)])
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tied", "ordered"])
def test_compiled_assistants_draft_as_eager_ones(world, plain, kind):
    with world.engine(kind, 3, compile=True, max_batch_size=1) as engine:
        results = engine.generate(world.prompts[1:3], GREEDY)
    assert [r.token_ids for r in results] == plain[GREEDY][1:3]
