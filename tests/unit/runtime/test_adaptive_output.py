"""Engines with budgets: the text is plain decoding's whatever the costs, and what was learned outlives an engine."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_language as toy
from draft_models import save_noisy_copy
from small_speculators import Successor
from test_draft_head_output import Toy

from draftgraph import Engine, SamplingParams
from draftgraph.graphs import verify_widths
from draftgraph.model_zoo.decoder import DecoderModel
from draftgraph.runtime.adaptive import BucketCosts, CostTable
from draftgraph.runtime.adaptive import loading as adaptive_loading
from draftgraph.runtime.engine_config import EngineConfig
from draftgraph.runtime.errors import ConfigError
from draftgraph.runtime.loading import build_core, load_target
from draftgraph.runtime.speculative_config import SpeculativeConfig
from draftgraph.runtime.speculative_methods import Evidence

COUPLED = {"rejection_sample_method": "coupled"}
ADAPTIVE = {"enable_adaptive_verification": True}
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
WARM = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.8, seed=4)
PROMPTS = ["one two three, one two three, one", "The steam engine", "def add(a, b):\n    return"]
COSTS = {
    "verifying is free": (1.0, 0.0, 0.01),
    "verifying is dear": (1.0, 0.4, 0.01),
    "drafting is dear": (1.0, 0.02, 0.6),
}
"""Milliseconds of a pass, of a token more, and of a draft."""


def table_of(config: EngineConfig, costs: str) -> CostTable:
    depth = config.speculative.num_speculative_tokens
    one, token, step = COSTS[costs]
    return CostTable.of(
        {
            bucket: BucketCosts.of(
                [one + token * width for width in verify_widths(bucket, depth)],
                [0.05 + step * drafts for drafts in range(depth + 1)],
            )
            for bucket in config.buckets
        }
    )


@contextlib.contextmanager
def engine_of(path: Path, spec: dict[str, Any], costs: str = "verifying is dear", **options: Any) -> Iterator[Engine]:
    options = {"dtype": "float32", "compile": False, "max_model_len": 256, "max_batch_size": 3, **options}
    config = EngineConfig(speculative=SpeculativeConfig.parse(spec), **options)
    target = load_target(path, config, None)
    table = table_of(config, costs) if config.speculative.enable_adaptive_verification else None
    with Engine(target, build_core(target, config, costs=table), config) as engine:
        yield engine


@pytest.fixture(scope="module")
def places(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """The target and the spec of each method."""
    world = Toy(tmp_path_factory.mktemp("toy"))
    noisy, same = world.path / "noisy", world.path / "same"
    save_noisy_copy(tiny_model_path, noisy, 0.25)
    save_noisy_copy(tiny_model_path, same, 0.0)
    blocks = Toy(tmp_path_factory.mktemp("blocks"), {"dflash": toy.dflash, "dspark": toy.dspark})
    head = world.heads["eagle3"].spec
    depth = {"num_speculative_tokens": 4}
    return {
        "ngram": (tiny_model_path, {"method": "ngram", "prompt_lookup_min": 1, **depth}),
        "draft_model": (tiny_model_path, {"method": "draft_model", "model": str(noisy), **depth}),
        "list": (tiny_model_path, {"method": ["ngram", "draft_model"], "model": str(noisy), **depth}),
        "itself": (tiny_model_path, {"method": "draft_model", "model": str(same), **depth}),
        "eagle3": (world.path / "target", {**head, "model": str(world.path / "eagle3"), **depth}),
        **{
            name: (blocks.path / "target", {**of.spec, "model": str(blocks.path / name), **depth})
            for name, of in blocks.heads.items()
        },
    }


@pytest.fixture(scope="module")
def plain(places: dict[str, tuple[Path, dict[str, Any]]]) -> dict[tuple[Path, SamplingParams], list[tuple[int, ...]]]:
    found = {}
    for path in {path for path, _ in places.values()}:
        with engine_of(path, {"method": "none", **COUPLED}) as engine:
            for params in (GREEDY, WARM):
                found[path, params] = [result.token_ids for result in engine.generate(PROMPTS, params)]
    return found


@pytest.mark.parametrize("method", ["ngram", "draft_model", "list", "eagle3", "dflash", "dspark"])
@pytest.mark.parametrize("costs", COSTS)
def test_the_text_is_plain_decodings_whatever_rounds_cost(places, plain, method, costs):
    path, spec = places[method]
    with engine_of(path, {**spec, **ADAPTIVE, **COUPLED}, costs) as engine:
        for params in (GREEDY, WARM):
            results = engine.generate(PROMPTS, params)
            assert [result.token_ids for result in results] == plain[path, params]
            assert {result.metrics.budget_rule for result in results} == {"current round"}


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_what_costs_more_is_done_less(places, method):
    path, spec = places[method]
    verified = {}
    for costs in COSTS:
        with engine_of(path, {**spec, **ADAPTIVE}, costs) as engine:
            results = engine.generate(PROMPTS, GREEDY)
            verified[costs] = sum(result.metrics.proposed_tokens for result in results)
    assert verified["verifying is dear"] < verified["verifying is free"]
    assert verified["drafting is dear"] < verified["verifying is free"]


def test_fewer_tokens_are_verified_for_the_same_text(places):
    """A drafter that is seldom right, after it has been found out."""
    path, spec = places["draft_model"]
    counts, texts = [], []
    for options in ({}, ADAPTIVE):
        with engine_of(path, {**spec, **options}) as engine:
            engine.generate(PROMPTS, SamplingParams(max_tokens=120, ignore_eos=True))
            results = engine.generate(PROMPTS, GREEDY)
            counts.append(sum(r.metrics.proposed_tokens + r.metrics.rounds for r in results))
            texts.append([r.token_ids for r in results])
    assert texts[0] == texts[1]
    assert counts[1] < 0.7 * counts[0]


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({}, "current round"),
        ({"draft_sample_method": "probabilistic"}, "previous rounds"),
        ({"draft_sample_method": "probabilistic", "rejection_sample_method": "block"}, "previous rounds"),
        ({"draft_sample_method": "probabilistic", **COUPLED}, "current round"),
    ],
)
def test_metrics_show_the_rule(places, options, rule):
    path, spec = places["draft_model"]
    with engine_of(path, {**spec, **ADAPTIVE, **options}, max_batch_size=1) as engine:
        metrics = engine.generate(PROMPTS[0], SamplingParams(max_tokens=5, temperature=0.9, seed=1)).metrics
    assert metrics.budget_rule == rule
    assert metrics.to_dict()["budget_rule"] == rule


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_logprobs_of_every_token_though_rows_verify_different_numbers(places, method):
    path, spec = places[method]
    params = SamplingParams(max_tokens=30, ignore_eos=True, logprobs=3)
    with engine_of(path, {"method": "none"}) as engine:
        wanted = engine.generate(PROMPTS, params)
    with engine_of(path, {**spec, **ADAPTIVE}, metrics="detailed") as engine:
        found = engine.generate(PROMPTS, params)
    assert len({pair for result in found for pair in result.metrics.round_pairs}) > 3
    for one, other in zip(found, wanted, strict=True):
        assert one.token_ids == other.token_ids
        assert len(one.logprobs) == 30
        for ours, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert ours.token_id == theirs.token_id
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
            assert [p for _, p in ours.top] == pytest.approx([p for _, p in theirs.top], abs=1e-4)


# Depth by the number of rows


def test_a_depth_of_zero_costs_one_pass_of_the_drafter(places, monkeypatch):
    """Which keeps its cache in step."""
    path, spec = places["itself"]
    passes = []
    forward = DecoderModel.forward

    def counted(self: DecoderModel, *args: Any) -> Any:
        passes.append(self)
        return forward(self, *args)

    with engine_of(path, {**spec, "num_speculative_tokens_per_batch_size": [[1, 3, 0]]}) as engine:
        drafter = engine._target.draft.model
        monkeypatch.setattr(DecoderModel, "forward", counted)
        metrics = engine.generate(PROMPTS[0], GREEDY).metrics
    prefills = 1
    assert passes.count(drafter) == metrics.rounds + prefills
    assert metrics.proposed_tokens == 0
    assert metrics.rounds == 40


def test_a_drafter_that_was_not_asked_for_a_while_is_still_right(places):
    """Two rows draft nothing; the one that goes on alone drafts again, and a drafter that is the target is right."""
    path, spec = places["itself"]
    spec = {**spec, "num_speculative_tokens_per_batch_size": [[1, 1, 4], [2, 3, 0]]}
    with engine_of(path, spec, metrics="detailed") as engine:
        lengths = (60, 20)
        streams = [
            engine.stream(prompt, SamplingParams(max_tokens=length, ignore_eos=True))
            for prompt, length in zip(PROMPTS, lengths, strict=False)
        ]
        first, second = ([*stream][-1].result for stream in streams)
    pairs = first.metrics.round_pairs
    assert pairs.count((0, 0)) >= 15
    assert (4, 4) in pairs[pairs.index((0, 0)) :]
    assert all(accepted == verified for verified, accepted in pairs)
    assert [len(result.token_ids) for result in (first, second)] == [60, 20]


# What an engine begins with


def test_costs_are_measured_once_and_kept(places, tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTGRAPH_CACHE", str(tmp_path))
    path, spec = places["ngram"]
    options: dict[str, Any] = {"dtype": "float32", "compile": False, "max_model_len": 64, "max_batch_size": 1}
    measured = []
    measure = adaptive_loading.measure_costs
    monkeypatch.setattr(
        adaptive_loading,
        "measure_costs",
        lambda *args, **more: measured.append(more["context"]) or measure(*args, **more),
    )
    with Engine.from_pretrained(path, {**spec, **ADAPTIVE}, **options) as engine:
        first = engine.generate(PROMPTS[0], GREEDY).token_ids
    with Engine.from_pretrained(path, {**spec, **ADAPTIVE}, **options) as engine:
        assert engine.generate(PROMPTS[0], GREEDY).token_ids == first
    assert measured == [8192]
    with Engine.from_pretrained(path, {**spec, **ADAPTIVE, "adaptive_profile_context_len": 32}, **options):
        assert measured == [8192, 32]
    assert len(list((tmp_path / "costs").glob("*.json"))) == 2


def test_costs_of_a_bucket_of_more_rows_than_the_narrowest_width_holds(places, tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTGRAPH_CACHE", str(tmp_path))
    path, spec = places["ngram"]
    options: dict[str, Any] = {"dtype": "float32", "compile": False, "max_model_len": 64, "max_batch_size": 5}
    with Engine.from_pretrained(path, {**spec, **ADAPTIVE}, **options) as engine:
        assert len(engine.generate(PROMPTS[0], GREEDY).token_ids) > 0
    (kept,) = (tmp_path / "costs").glob("*.json")
    assert set(json.loads(kept.read_text())["costs"]) == {"1", "2", "4", "8"}


def test_what_was_learned_outlives_the_engine(places):
    path, spec = places["draft_model"]
    with engine_of(path, {**spec, **ADAPTIVE}, "verifying is free") as engine:
        fresh = engine.export_acceptance()
        engine.generate(PROMPTS, SamplingParams(max_tokens=200, ignore_eos=True))
        learned = json.loads(json.dumps(engine.export_acceptance()))
    assert fresh["omega"] == 0.5
    assert fresh["beta"] == pytest.approx([-0.2] * 4)
    assert learned["beta"] != fresh["beta"]
    assert learned["rounds"] > fresh["rounds"] == 0
    with engine_of(path, {**spec, **ADAPTIVE}) as engine:
        engine.import_acceptance(learned)
        assert engine.export_acceptance() == learned
        engine.import_acceptance({"omega": 1.0, "beta": [0.5], "rounds": 700})
        unfolded = {"omega": 1.0, "beta": [0.5] * 4, "rounds": 0}
        assert engine.export_acceptance() == unfolded
        for wrong in ({}, {"omega": -1.0, "beta": [0.0]}, {"omega": 1.0, "beta": []}, {"omega": 1, "beta": [99.0]}):
            with pytest.raises(ConfigError, match="what was learned must be omega"):
                engine.import_acceptance(wrong)
        strange = ({"omega": float("nan"), "beta": [0.0]}, {"omega": 1.0, "beta": ["x"]}, {"omega": 1, "beta": [True]})
        for wrong in strange:
            with pytest.raises(ConfigError, match="what was learned must be omega"):
                engine.import_acceptance(wrong)
        for wrong in (None, [1.0], json.dumps(learned), {**learned, "rounds": -1}, {**learned, "rounds": 2.5}):
            with pytest.raises(ConfigError, match="as export_acceptance gives them, got"):
                engine.import_acceptance(wrong)
        assert engine.export_acceptance() == unfolded
    with engine_of(path, spec) as engine:
        assert engine.export_acceptance() is None
        with pytest.raises(ConfigError, match="set enable_adaptive_verification"):
            engine.import_acceptance(learned)


@pytest.mark.parametrize(
    ("method", "rule", "evidence"),
    [("dflash", "current round", Evidence.PROBABILITY), ("dspark", "previous rounds", Evidence.SURVIVAL)],
)
def test_drafts_of_one_pass_may_be_seen_and_a_confidence_head_is_believed(places, method, rule, evidence):
    path, spec = places[method]
    with engine_of(path, {**spec, **ADAPTIVE, "draft_sample_method": "probabilistic"}) as engine:
        budget, speculator = engine._core.budget, engine._core.speculator
        assert budget.rule.name == rule
        has_head = speculator.draft_confidence is not None
        assert budget.evidence is (evidence if has_head else Evidence.PROBABILITY)
        assert (engine.export_acceptance() is None) == (budget.evidence is Evidence.SURVIVAL)
        engine.generate(PROMPTS, WARM)


def test_a_list_keeps_the_confidences_of_every_method(places):
    """Of looked-up drafts nothing is known, which is not that they are unlikely; what lies by row gets to its slot."""
    path, spec = places["list"]
    with engine_of(path, {**spec, **ADAPTIVE}) as engine:
        core = engine._core
        model = core.speculator.members[1]
        assert core.budget.evidence is Evidence.PROBABILITY
        assert bool((core.speculator._confidence[0] == 0.5).all())
        model.draft_confidence = torch.full((4, 4), 0.25)
        with torch.inference_mode(), core._builder.workspaces:
            core.state.slot_of_row[0] = 2
            core.speculator.propose(core.state, 1)
        assert core.speculator._confidence[1, 2].tolist() == [0.25] * 4


class Sure(Successor):
    """Says how likely its drafts are to stand."""

    evidence = Evidence.SURVIVAL

    def propose(self, state: Any, bucket: int) -> None:
        super().propose(state, bucket)
        state.confidence.fill_(0.7)


def test_a_users_class_must_say_what_its_confidences_are(tiny_model_path, plain):
    spec = {"method": "custom", "num_speculative_tokens": 3, **ADAPTIVE}
    with pytest.raises(ConfigError, match=r"'small_speculators:Successor' gives neither.*Evidence\.SURVIVAL"):
        Engine.from_pretrained(tiny_model_path, {**spec, "speculator": "small_speculators:Successor"})
    with engine_of(tiny_model_path, {**spec, "speculator": f"{__name__}:Sure"}) as engine:
        results = engine.generate(PROMPTS, GREEDY)
        assert engine.export_acceptance() is None
    assert [result.token_ids for result in results] == plain[tiny_model_path, GREEDY]


def test_too_many_drafts_to_compare_are_refused(tiny_model_path):
    spec = {"method": "ngram", "num_speculative_tokens": 100, **ADAPTIVE}
    with pytest.raises(ConfigError, match=r"32 rows of 100 drafts; accepted: at most 2048"):
        Engine.from_pretrained(tiny_model_path, spec, max_batch_size=32, dtype="float32")
