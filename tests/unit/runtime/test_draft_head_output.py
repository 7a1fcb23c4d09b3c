"""Engines with draft heads that know a toy language: what they accept, and that the output is plain decoding's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import toy_language as toy
from conftest import build_tokenizer
from draft_heads import Draft

from draftgraph import Engine, SamplingParams
from draftgraph.runtime.outputs import GenerationResult

HEADS = {
    "eagle": toy.eagle,
    "eagle3": toy.eagle3,
    "p-eagle": toy.peagle,
    "medusa": toy.medusa,
}


class Toy:
    """The target and the heads on disk."""

    def __init__(self, path: Path, makers: dict[str, Callable[[int], Draft]] = HEADS) -> None:
        tokenizer = build_tokenizer()
        self.path, vocab = path, len(tokenizer)
        assert vocab >= toy.LAST
        toy.build_target(path / "target", tokenizer)
        self.heads = {name: make(vocab) for name, make in makers.items()}
        for name, head in self.heads.items():
            head.save(path / name)
        long = toy.cycles()[-1]
        self.prompts = [
            long[:1],
            [*long[40:60], *long[:7]],
            toy.prompt_of(toy.cycles()[3], 9),
            toy.prompt_of(toy.cycles()[0], 5),
            [*(long * 2)[:300], 12, 13],
        ]

    def engine(self, name: str | None, depth: int | None = None, **options: Any) -> Engine:
        spec: dict[str, Any] = {"method": "none"}
        if name is not None:
            spec = {**self.heads[name].spec, "model": str(self.path / name), "num_speculative_tokens": depth}
        names = ("rejection_sample_method", "draft_sample_method")
        spec |= {key: options.pop(key) for key in names if key in options}
        options = {"dtype": "float32", "compile": False, "max_model_len": 512, "max_batch_size": 2, **options}
        return Engine.from_pretrained(self.path / "target", spec, **options)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return Toy(tmp_path_factory.mktemp("toy"))


GREEDY = SamplingParams(max_tokens=30, ignore_eos=True)
WARM = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.8, seed=4)
# A token in the middle of the long cycle, which windows run past.
STOPPED = SamplingParams(max_tokens=30, stop_token_ids=[toy.cycles()[-1][11]])


@pytest.fixture(scope="module")
def plain(world: Toy) -> dict[SamplingParams, list[GenerationResult]]:
    with world.engine(None, rejection_sample_method="coupled", max_batch_size=1) as engine:
        return {params: engine.generate(world.prompts, params) for params in (GREEDY, WARM, STOPPED)}


def tokens(results: list[GenerationResult]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in results]


def test_the_target_speaks_the_language(world, plain):
    for prompt, result in zip(world.prompts[:4], plain[GREEDY], strict=False):
        expected = [*prompt[-1:], *result.token_ids]
        assert [toy.successor(token) for token in expected[:-1]] == expected[1:]
    sampled, wanted = plain[WARM][1].token_ids, plain[GREEDY][1].token_ids
    assert sampled != wanted, "at a temperature of 0.8 it must now and then say something else"
    assert [r.finish_reason for r in plain[STOPPED][:2]] == ["stop", "stop"]


@pytest.mark.parametrize(("depth", "batch"), [(1, 1), (4, 2), (7, 4)])
@pytest.mark.parametrize("name", HEADS)
def test_coupled_output_is_plain_decodings(world, plain, name, depth, batch):
    with world.engine(name, depth, rejection_sample_method="coupled", max_batch_size=batch) as engine:
        for params, expected in plain.items():
            results = engine.generate(world.prompts, params)
            assert tokens(results) == tokens(expected)
            assert [r.finish_reason for r in results] == [r.finish_reason for r in expected]
            accepted, proposed = (
                sum(getattr(r.metrics, what) for r in results) for what in ("accepted_tokens", "proposed_tokens")
            )
            assert 0 < accepted < proposed


@pytest.mark.parametrize("rule", ["standard", "block"])
@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_greedy_output_is_greedy_under_every_rule(world, plain, name, rule):
    with world.engine(name, 3, rejection_sample_method=rule) as engine:
        assert tokens(engine.generate(world.prompts, GREEDY)) == tokens(plain[GREEDY])


@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_knows_is_accepted_and_one_that_errs_at_j_stops_there(world, name):
    depth = 6
    with world.engine(name, depth, metrics="detailed") as engine:
        for j, cycle in enumerate(toy.cycles()[:depth]):
            # Every round begins after the token that the head misjudges.
            result = engine.generate(toy.prompt_of(cycle, 8), SamplingParams(max_tokens=4 * (j + 1), ignore_eos=True))
            assert [accepted for _, accepted in result.metrics.round_pairs] == [j] * 4
        long = toy.cycles()[-1]
        result = engine.generate(long[:9], SamplingParams(max_tokens=4 * (depth + 1), ignore_eos=True))
        assert result.metrics.round_pairs == ((depth, depth),) * 4


@pytest.mark.parametrize("name", HEADS)
def test_probabilistic_drafts_share_the_noise_under_coupling(world, plain, name):
    counts = {}
    for kind in ("greedy", "probabilistic"):
        with world.engine(name, 4, rejection_sample_method="coupled", draft_sample_method=kind) as engine:
            results = engine.generate(world.prompts, WARM)
            assert tokens(results) == tokens(plain[WARM])
            counts[kind] = sum(r.metrics.accepted_tokens for r in results)
    if name != "p-eagle":  # whose logits are far from the target's, the later the draft the more
        assert counts["probabilistic"] > counts["greedy"]


@pytest.mark.parametrize("name", ["eagle3", "medusa"])
def test_without_num_speculative_tokens(world, name):
    from draftgraph.runtime.errors import ConfigError

    if name == "eagle3":
        with pytest.raises(ConfigError, match="needs num_speculative_tokens"), world.engine(name):
            pass
    else:
        with world.engine(name) as engine:
            assert engine.config.speculative.num_speculative_tokens == 7


def test_a_reused_prefix_is_drafted_from_as_a_new_one(world):
    """A prompt that another left in the slot, the same, a longer and a shorter one: all rounds accept everything."""
    long = toy.cycles()[-1]
    with world.engine("eagle3", 5, metrics="detailed", max_batch_size=1) as engine:
        first = engine.generate(long[:30], SamplingParams(max_tokens=12, ignore_eos=True))
        again = [long[:30], [*long[:30], *first.token_ids], long[:17], [*long[:20], 200, *long[4:6]]]
        results = [engine.generate(prompt, SamplingParams(max_tokens=12, ignore_eos=True)) for prompt in again]
    assert [r.metrics.reused_prompt_tokens for r in results] == [28, 40 - 1 - 5 + 1, 15, 19]
    assert all(r.metrics.round_pairs == ((5, 5), (5, 5)) for r in results)


def test_a_head_after_another_method(world, plain):
    """Where prompt lookup finds nothing the head drafts, and it reads what was accepted of the other's drafts."""
    head = world.heads["eagle3"]
    spec = {"method": ["ngram", "eagle3"], "model": str(world.path / "eagle3"), "num_speculative_tokens": 4}
    assert head.spec["method"] == "eagle3"
    options = {"dtype": "float32", "compile": False, "max_model_len": 512, "max_batch_size": 2}
    with Engine.from_pretrained(world.path / "target", spec, **options) as engine:
        results = engine.generate(world.prompts, GREEDY)
        assert tokens(results) == tokens(plain[GREEDY])
        # Tokens that were not there before: lookup has nothing to say.
        long = engine.generate(toy.cycles()[-1][:9], SamplingParams(max_tokens=20, ignore_eos=True))
    assert long.metrics.accepted_tokens == 16


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle", "eagle3", "medusa"])
def test_compiled_heads_draft_as_eager_ones(world, plain, name):
    with world.engine(name, 3, compile=True, max_batch_size=1, metrics="detailed") as engine:
        results = engine.generate(world.prompts[1:3], GREEDY)
    assert tokens(results) == tokens(plain[GREEDY][1:3])
    assert results[0].metrics.round_pairs[:5] == ((3, 3),) * 5
