"""Engines with drafters of blocks: the output is plain decoding's, or follows the target's own distribution."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import toy_language as toy
from conftest import build_tokenizer
from draft_blocks import dflash, dspark
from test_distribution import FILTERS, PROMPT, VOCABULARY, exact_distribution
from test_draft_head_output import GREEDY, STOPPED, WARM, Toy, tokens

from draftgraph import Engine, SamplingParams

HEADS = {"dflash": toy.dflash, "dspark": toy.dspark}
SAMPLES = 1200


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return Toy(tmp_path_factory.mktemp("blocks"), HEADS)


@pytest.fixture(scope="module")
def plain(world):
    with world.engine(None, rejection_sample_method="coupled", max_batch_size=1) as engine:
        return {params: engine.generate(world.prompts, params) for params in (GREEDY, WARM, STOPPED)}


@pytest.mark.parametrize(("depth", "batch"), [(1, 1), (6, 4), (15, 2)])
@pytest.mark.parametrize("name", HEADS)
def test_coupled_output_is_plain_decodings(world, plain, name, depth, batch):
    with world.engine(name, depth, rejection_sample_method="coupled", max_batch_size=batch) as engine:
        for params, expected in plain.items():
            results = engine.generate(world.prompts, params)
            assert tokens(results) == tokens(expected)
            assert [r.finish_reason for r in results] == [r.finish_reason for r in expected]
            if (name, depth) != ("dflash", 1):  # whose one mask is right in one cycle only
                assert sum(r.metrics.accepted_tokens for r in results) > 0


@pytest.mark.parametrize("rule", ["standard", "block"])
@pytest.mark.parametrize("name", HEADS)
def test_greedy_output_is_greedy_under_every_rule(world, plain, name, rule):
    with world.engine(name, 5, rejection_sample_method=rule) as engine:
        assert tokens(engine.generate(world.prompts, GREEDY)) == tokens(plain[GREEDY])


def test_the_markov_head_reads_each_draft_before_the_next(world):
    """It knows successors, so a whole block is right; in a cycle of which it misjudges a token, up to there."""
    depth = 6
    with world.engine("dspark", depth, metrics="detailed") as engine:
        long = engine.generate(toy.cycles()[-1][:9], SamplingParams(max_tokens=4 * (depth + 1), ignore_eos=True))
        assert long.metrics.round_pairs == ((depth, depth),) * 4
        for j, cycle in enumerate(toy.cycles()[:depth]):
            result = engine.generate(toy.prompt_of(cycle, 8), SamplingParams(max_tokens=4 * (j + 1), ignore_eos=True))
            assert [accepted for _, accepted in result.metrics.round_pairs] == [j] * 4


def test_a_block_whose_masks_are_right_is_accepted(world):
    with world.engine("dflash", 15, metrics="detailed") as engine:
        result = engine.generate([toy.FIRST] * 5, SamplingParams(max_tokens=48, ignore_eos=True))
        assert result.metrics.round_pairs == ((15, 15),) * 3


@pytest.mark.parametrize("name", HEADS)
def test_probabilistic_drafts_share_the_noise_under_coupling(world, plain, name):
    counts = {}
    for kind in ("greedy", "probabilistic"):
        with world.engine(name, 4, rejection_sample_method="coupled", draft_sample_method=kind) as engine:
            results = engine.generate(world.prompts, WARM)
            assert tokens(results) == tokens(plain[WARM])
            counts[kind] = sum(r.metrics.accepted_tokens for r in results)
    if name == "dspark":
        assert counts["probabilistic"] > counts["greedy"]


def test_a_drafter_of_blocks_after_another_method(world, plain):
    """Where prompt lookup finds nothing it drafts, and it reads what was accepted of the other's drafts."""
    spec = {"method": ["ngram", "dspark"], "model": str(world.path / "dspark"), "num_speculative_tokens": 4}
    options = {"dtype": "float32", "compile": False, "max_model_len": 512, "max_batch_size": 2}
    with Engine.from_pretrained(world.path / "target", spec, **options) as engine:
        assert tokens(engine.generate(world.prompts, GREEDY)) == tokens(plain[GREEDY])
        long = engine.generate(toy.cycles()[-1][:9], SamplingParams(max_tokens=20, ignore_eos=True))
    assert long.metrics.accepted_tokens == 16


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_compiled_drafters_draft_as_eager_ones(world, plain, name):
    counts = []
    for compiled in (False, True):
        with world.engine(name, 5, compile=compiled, max_batch_size=1) as engine:
            results = engine.generate(world.prompts[1:4], GREEDY)
        assert tokens(results) == tokens(plain[GREEDY][1:4])
        counts.append([r.metrics.accepted_tokens for r in results])
    assert counts[0] == counts[1]


# The distribution under standard, over a vocabulary of six


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    """A random Llama over 6 tokens whose hidden size is that of the drafters' checkpoints."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("tiny") / "six"
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        eos_token_id=0,
        bos_token_id=None,
        initializer_range=0.25,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return path


def small(draft, path):
    """The checkpoint with a mask token that six tokens hold, for a target of two layers."""
    part = draft.config.get("dflash_config", draft.config)
    part["mask_token_id"] = 5
    draft.config["num_target_layers"] = 2
    draft.save(path)
    assert json.loads((path / "config.json").read_text())["vocab_size"] == VOCABULARY
    return {**draft.spec, "model": str(path)}


def plain_block():
    return dflash(VOCABULARY, ids=[-1, 0])


def reduced_vocabulary():
    return dspark(VOCABULARY, "gated", ids=[-1, 0], strength=1.0, sharpness=0.5, draft_vocab=5)


def top_of_the_base():
    return dspark(VOCABULARY, ids=[-1, 0], strength=1.0, sharpness=0.5, competing=4)


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (plain_block, "standard"),
        (top_of_the_base, "standard"),
        pytest.param(reduced_vocabulary, "block", marks=pytest.mark.slow),
    ],
)
def test_three_tokens_follow_the_exact_distribution(six, tmp_path, make, rule):
    """Sampled drafts; see `test_distribution` for the bound."""
    spec = {**small(make(), tmp_path), "num_speculative_tokens": 3, "draft_sample_method": "probabilistic"}
    options = FILTERS[1]
    params = SamplingParams(max_tokens=3, ignore_eos=True, seed=1000, n=SAMPLES, **options)
    spec["rejection_sample_method"] = rule
    with Engine.from_pretrained(six, spec, dtype="float32", compile=False, max_batch_size=16) as engine:
        results = engine.generate(PROMPT, params)
    accepted = sum(r.metrics.accepted_tokens for r in results)
    rejected = sum(r.metrics.proposed_tokens for r in results) - accepted
    assert min(accepted, rejected) > SAMPLES // 20, "both branches must have been taken"
    exact = exact_distribution(six, 3, options)
    observed = np.zeros_like(exact)
    for result in results:
        a, b, c = result.token_ids
        observed[(a * VOCABULARY + b) * VOCABULARY + c] += 1 / SAMPLES
    assert (observed[exact == 0] == 0).all()
    bound = 0.5 * np.sqrt(exact * (1 - exact) / SAMPLES).sum() + np.sqrt(np.log(1e6) / (2 * SAMPLES))
    assert 0.5 * np.abs(observed - exact).sum() < bound
