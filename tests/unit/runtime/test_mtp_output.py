"""Engines with prediction modules that know a toy language: what they accept, and that no output changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import toy_language as toy
from conftest import build_tokenizer
from toy_modules import modules

from draftgraph import Engine, SamplingParams
from draftgraph.runtime.outputs import GenerationResult

KINDS = {
    "deepseek": ("deepseek", 1),
    "qwen": ("qwen", 1),
    "mimo": ("mimo", 1),
    "ernie": ("ernie", 1),
    "3 modules": ("deepseek", 3),
    "2 modules": ("mimo", 2),
}


class Toy:
    """The target and the modules on disk."""

    def __init__(self, path: Path) -> None:
        tokenizer = build_tokenizer()
        self.path = path
        toy.build_target(path / "target", tokenizer)
        for name, (style, count) in KINDS.items():
            modules(len(tokenizer), style, count).save(path / name)
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
            spec = {"method": "mtp", "model": str(self.path / name), "num_speculative_tokens": depth}
        spec |= {key: options.pop(key) for key in list(options) if key.endswith("sample_method")}
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


@pytest.mark.parametrize(
    ("name", "depth", "batch"),
    [
        ("deepseek", 1, 1),
        ("deepseek", 7, 4),
        ("qwen", 4, 2),
        ("mimo", 5, 1),
        ("ernie", 3, 4),
        ("3 modules", 1, 2),
        ("3 modules", 2, 1),
        ("3 modules", 3, 4),
        ("3 modules", 6, 2),
        ("2 modules", 4, 1),
    ],
)
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
def test_greedy_output_is_greedy_under_every_rule(world, plain, rule):
    with world.engine("3 modules", 3, rejection_sample_method=rule) as engine:
        assert tokens(engine.generate(world.prompts, GREEDY)) == tokens(plain[GREEDY])


@pytest.mark.parametrize("name", KINDS)
def test_modules_that_know_are_accepted_and_those_that_err_at_j_stop_there(world, name):
    depth = 6
    with world.engine(name, depth, metrics="detailed") as engine:
        for j, cycle in enumerate(toy.cycles()[:depth]):
            # Every round begins after the token that the modules misjudge.
            result = engine.generate(toy.prompt_of(cycle, 8), SamplingParams(max_tokens=4 * (j + 1), ignore_eos=True))
            assert [accepted for _, accepted in result.metrics.round_pairs] == [j] * 4
        long = toy.cycles()[-1]
        result = engine.generate(long[:9], SamplingParams(max_tokens=4 * (depth + 1), ignore_eos=True))
        assert result.metrics.round_pairs == ((depth, depth),) * 4


@pytest.mark.parametrize(("name", "depth"), [("deepseek", 4), ("3 modules", 3)])
def test_probabilistic_drafts_share_the_noise_under_coupling(world, plain, name, depth):
    counts = {}
    for kind in ("greedy", "probabilistic"):
        with world.engine(name, depth, rejection_sample_method="coupled", draft_sample_method=kind) as engine:
            results = engine.generate(world.prompts, WARM)
            assert tokens(results) == tokens(plain[WARM])
            counts[kind] = sum(r.metrics.accepted_tokens for r in results)
    assert counts["probabilistic"] > counts["greedy"]


def test_a_reused_prefix_is_drafted_from_as_a_new_one(world):
    """A prompt that another left in the slot, the same, a longer and a shorter one: all rounds accept everything."""
    long = toy.cycles()[-1]
    with world.engine("3 modules", 3, metrics="detailed", max_batch_size=1) as engine:
        first = engine.generate(long[:30], SamplingParams(max_tokens=12, ignore_eos=True))
        again = [long[:30], [*long[:30], *first.token_ids], long[:17], [*long[:20], 200, *long[4:6]]]
        results = [engine.generate(prompt, SamplingParams(max_tokens=12, ignore_eos=True)) for prompt in again]
    # Three tokens after a position decide what the last module keeps there.
    assert [r.metrics.reused_prompt_tokens for r in results] == [29 - 3, 41 - 3 - 3, 16 - 3, 20 - 3]
    assert all(r.metrics.round_pairs == ((3, 3),) * 3 for r in results)


def test_modules_after_another_method(world, plain):
    """Where prompt lookup finds nothing they draft, and they read what was accepted of the other's drafts."""
    spec = {"method": ["ngram", "mtp"], "model": str(world.path / "3 modules"), "num_speculative_tokens": 3}
    options = {"dtype": "float32", "compile": False, "max_model_len": 512, "max_batch_size": 2}
    with Engine.from_pretrained(world.path / "target", spec, **options) as engine:
        assert tokens(engine.generate(world.prompts, GREEDY)) == tokens(plain[GREEDY])
        # Tokens that were not there before: lookup has nothing to say.
        long = engine.generate(toy.cycles()[-1][:9], SamplingParams(max_tokens=20, ignore_eos=True))
    assert long.metrics.accepted_tokens == 15
