"""Several methods draft, and the first that has drafts for a row wins; none of them is the worse for it."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from draft_models import save_noisy_copy
from small_speculators import Oracle

from draftgraph import Engine, SamplingParams
from draftgraph.runtime.errors import ConfigError, NotAvailableError
from draftgraph.runtime.speculative_config import METHODS, SpeculativeConfig
from draftgraph.runtime.speculators import BaseSpeculator
from draftgraph.runtime.speculators.draft_model import DraftModelSpeculator
from draftgraph.runtime.speculators.ensemble import EnsembleSpeculator

TEXTS = ["a", "The steam engine", "one two three, one two three, one", "The steam engine changed " * 40]


def load(path, spec=None, batch: int = 2, **options: object) -> Engine:
    settings: dict = {"dtype": "float32", "compile": False, "max_batch_size": batch, "max_model_len": 640}
    return Engine.from_pretrained(path, spec, **{**settings, **options})


@pytest.fixture(scope="module")
def draft_path(tiny_model_path, tmp_path_factory):
    return save_noisy_copy(tiny_model_path, tmp_path_factory.mktemp("tiny") / "draft", 0.25)


@pytest.fixture(scope="module")
def options(draft_path):
    """What members need; each takes its own."""
    return {
        "draft_model": {"model": str(draft_path)},
        "ngram": {"prompt_lookup_min": 1},
        "suffix": {},
        "layerskip": {"exit_layer": 1},
        "custom": {"speculator": "small_speculators:Successor"},
    }


def line_up(options, names, depth, **more):
    spec = {"method": names, "num_speculative_tokens": depth, **more}
    for name in names:
        spec |= options[name]
    return spec


@pytest.fixture(scope="module")
def wanted(tiny_model_path):
    """Plain decoding's token ids, greedy and of a seed."""
    sampled = SamplingParams(temperature=0.8, top_p=0.95, seed=5, max_tokens=40, ignore_eos=True)
    with load(tiny_model_path, {"method": "none", "rejection_sample_method": "coupled"}) as engine:
        return {
            params: [r.token_ids for r in engine.generate(TEXTS, params)]
            for params in (SamplingParams(max_tokens=40, ignore_eos=True), sampled)
        }


@pytest.mark.parametrize(
    ("names", "depth", "batch"),
    [
        (["ngram", "draft_model"], 1, 4),
        (["ngram", "draft_model"], 4, 1),
        (["ngram", "draft_model"], 8, 2),
        (["draft_model", "ngram"], 3, 2),
        (["ngram", "layerskip"], 5, 4),
        (["suffix", "ngram"], 4, 2),
        (["custom", "ngram"], 6, 2),
        (["custom", "ngram", "layerskip", "draft_model"], 7, 4),
    ],
    ids=str,
)
def test_the_text_is_plain_decodings(tiny_model_path, options, wanted, names, depth, batch):
    spec = line_up(options, names, depth, rejection_sample_method="coupled")
    with load(tiny_model_path, spec, batch) as engine:
        for params, tokens in wanted.items():
            results = engine.generate(TEXTS, params)
            assert [r.token_ids for r in results] == tokens
            accepted = sum(r.metrics.accepted_tokens for r in results)
            assert 0 < accepted < sum(r.metrics.proposed_tokens for r in results), "some must stand and some must fall"


def test_rows_that_the_first_cannot_serve_fall_to_the_second(tiny_model_path, options):
    """ngram has no drafts for text that never repeats; a draft model always has."""
    idle = {}
    for names in (["ngram"], ["ngram", "draft_model"]):
        with load(tiny_model_path, line_up(options, names, 3), metrics="detailed") as engine:
            results = engine.generate(TEXTS, SamplingParams(max_tokens=40, ignore_eos=True))
        pairs = [pair for r in results for pair in r.metrics.round_pairs[:-1]]
        idle[len(names)] = sum(proposed == 0 for proposed, _ in pairs)
    assert idle[1] > 0
    assert idle[2] == 0


@pytest.mark.parametrize("told", [True, False])
def test_a_drafter_that_did_not_win_keeps_its_cache_right(tiny_model_path, monkeypatch, told):
    """The target drafts for itself, greedily, beside one that knows a sampled text: where the latter wins, the
    former has drafted other tokens in vain, and must have overwritten their KV with that of the text.

    Without being told so, it would not: the control.
    """
    if not told:
        monkeypatch.setattr(DraftModelSpeculator, "expect_other_drafts", lambda self: None)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True)
    prompt = [5, 6, 7, 8]
    with load(tiny_model_path, {"method": "none", "rejection_sample_method": "coupled"}, 1) as engine:
        text = [*prompt, *engine.generate(prompt, params).token_ids]
    monkeypatch.setattr(Oracle, "text", text)
    spec = {
        "method": ["custom", "draft_model"],
        "speculator": "small_speculators:Oracle",
        "model": str(tiny_model_path),
        "num_speculative_tokens": 4,
        "rejection_sample_method": "coupled",
    }
    with load(tiny_model_path, spec, 1, metrics="detailed") as engine:
        result = engine.generate(prompt, params)
        speculator, target = engine._core._speculator, engine._core._builder._cache
        drafter = speculator.members[1]
        seen = len(text) - 1 - drafter.unseen
        own, right = drafter._cache.key[:, 0, :, :seen], target.key[:, 0, :, :seen]
        assert torch.allclose(own, right, atol=1e-4) == told
        assert speculator.unseen == drafter.unseen == (4 if told else 1)
    assert [*prompt, *result.token_ids] == text
    assert (4, 4) in result.metrics.round_pairs, "the oracle must have won"


def test_a_later_prompt_reuses_what_every_drafter_has_seen(tiny_model_path, options, wanted):
    spec = line_up(options, ["ngram", "draft_model"], 3)
    tokens = next(iter(wanted.values()))[1]
    with load(tiny_model_path, spec, 1) as engine:
        ids = engine.tokenizer(TEXTS[1])["input_ids"]
        first = engine.generate(ids, SamplingParams(max_tokens=20, ignore_eos=True))
        assert first.token_ids == tokens[:20]
        again = engine.generate([*ids, *tokens[:20]], SamplingParams(max_tokens=20, ignore_eos=True))
    assert again.token_ids == tokens[20:]
    assert again.metrics.reused_prompt_tokens == len(ids) + 19 - 3


def test_every_event_reaches_every_method():
    """What `BaseSpeculator` tells a method, the members of a list must hear too."""
    own = {"first_layer", "unseen", "lookahead", "target_states", "name", "verify_hidden", "expect_other_drafts"}
    own.add("confidence_reads_drafts")  # a fact about each, of which the list makes one
    hooks = {name for name in vars(BaseSpeculator) if not name.startswith("_")} - own
    assert {"propose", "commit", "prefill", "observe", "observe_prompt", "admit", "finish", "clear"} <= hooks
    assert hooks - set(vars(EnsembleSpeculator)) == set()


def test_suffix_learns_from_finished_requests_in_a_list(tiny_model_path, options):
    """The same prompt again is drafted from its last answer, whoever else drafts."""
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.9, seed=2)
    with load(tiny_model_path, line_up(options, ["suffix", "ngram"], 4, rejection_sample_method="coupled")) as engine:
        first, again = (engine.generate(TEXTS[1], params) for _ in range(2))
    assert first.token_ids == again.token_ids
    assert again.metrics.mean_acceptance_length > first.metrics.mean_acceptance_length


def test_propose_is_charged_for_every_method(tiny_model_path, options):
    from draftgraph.profiling.floor import RoundShape

    shape = RoundShape(rows=1, width=4, window=4, context=100, num_drafts=3, dtype=torch.float32)
    costs = []
    for names in (["ngram"], ["layerskip"], ["ngram", "layerskip"]):
        with load(tiny_model_path, line_up(options, names, 3)) as engine:
            costs.append(engine.round_costs(shape))
    assert costs[2]["propose"].bytes_read > costs[0]["propose"].bytes_read + costs[1]["propose"].bytes_read
    assert costs[2]["verify"] == costs[0]["verify"], "all layers verify drafts that may be another's"


class TestConfig:
    def test_round_trips(self):
        config = SpeculativeConfig.parse(
            '{"method": ["ngram_gpu", "layerskip"], "num_speculative_tokens": 4, "exit_layer": 2}'
        )
        assert config.method == ("ngram", "layerskip")
        assert (config.prompt_lookup_min, config.prompt_lookup_max) == (2, 4)
        assert json.loads(json.dumps(config.to_dict()))["method"] == ["ngram", "layerskip"]
        assert SpeculativeConfig.parse(config.to_dict()) == config
        assert SpeculativeConfig.parse(json.dumps(config.to_dict())) == config
        assert hash(config) == hash(SpeculativeConfig.parse(config.to_dict()))

    def test_a_list_of_one_is_that_one(self):
        assert SpeculativeConfig(method=["ngram"], num_speculative_tokens=2).method == "ngram"
        assert SpeculativeConfig(method=["none"]).method == "none"

    def test_the_tree_gives_the_depth_for_all(self):
        assert SpeculativeConfig(method=("suffix", "ngram")).num_speculative_tokens == 24

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"method": []}, "method is an empty list; name one or more of none, ngram"),
            ({"method": ["ngram", "ngrm"]}, r"unknown method 'ngrm' \(did you mean 'ngram'\?\)"),
            ({"method": ["ngram", "ngram_gpu"]}, "method names 'ngram' twice"),
            ({"method": ["ngram", "none"]}, "method 'none' drafts nothing, so it has no place in a list"),
            ({"method": ["ngram", 3]}, r"method must be one of none, .*or a list of these, got \['ngram', 3\]"),
            ({"method": ["ngram", ["draft_model"]]}, "or a list of these"),
            ({"method": ["ngram", "draft_model"]}, "needs model"),
            ({"method": ["eagle", "draft_model"], "model": "x"}, "'eagle' and 'draft_model', which each need a model"),
            ({"method": ["ngram", "layerskip"]}, "needs exit_layer"),
            ({"method": ["ngram", "custom"]}, "needs speculator"),
        ],
    )
    def test_bad_input(self, options, message):
        with pytest.raises(ConfigError, match=message):
            SpeculativeConfig.parse({"num_speculative_tokens": 3, **options})

    def test_not_available(self, monkeypatch):
        absent = dataclasses.replace(METHODS["dspark"], available=False)
        monkeypatch.setattr("draftgraph.runtime.speculative_config.METHODS", {**METHODS, "dspark": absent})
        with pytest.raises(NotAvailableError, match=r"method 'dspark' .* is not available"):
            SpeculativeConfig(method=("ngram", "dspark"), model="x", num_speculative_tokens=2).require_available()
        config = SpeculativeConfig(
            method=("ngram", "draft_model"), model="x", num_speculative_tokens=2, draft_sample_method="probabilistic"
        )
        with pytest.raises(NotAvailableError, match="does not sample its drafts; available: 'greedy'"):
            config.require_available()
