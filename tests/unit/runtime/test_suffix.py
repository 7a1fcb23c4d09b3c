"""Suffix decoding: lossless, better than prompt lookup where tool output repeats, and of bounded memory."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from late_executors import LateExecutor

from draftgraph import Engine, SamplingParams
from draftgraph.graphs import DecodeState, StateShape
from draftgraph.runtime.errors import ConfigError
from draftgraph.runtime.speculative_config import SpeculativeConfig
from draftgraph.runtime.speculators import create_speculator
from draftgraph.runtime.speculators.ngram import NgramSpeculator
from draftgraph.runtime.speculators.suffix import SuffixSpeculator
from draftgraph.runtime.speculators.suffix_store import SuffixStore

TEXTS = [
    "a",
    "one two three, one two three, one",
    "def add(a, b):\n    return",
    "The steam engine changed how people worked. " * 12,
]
OPTIONS = {"dtype": "float32", "compile": False, "max_model_len": 512}


def suffix(k: int | None, **extra: object) -> dict[str, object]:
    depth = {} if k is None else {"num_speculative_tokens": k}
    return {"method": "suffix", **depth, **extra}


# Lossless


@pytest.mark.parametrize(("k", "batch"), [(1, 1), (3, 2), (5, 4), (8, 1), (None, 2)])
def test_greedy_equals_transformers(tiny_model_path, reference, k, batch):
    with Engine.from_pretrained(tiny_model_path, suffix(k), max_batch_size=batch, **OPTIONS) as engine:
        ids = [engine.tokenizer(text)["input_ids"] for text in TEXTS]
        results = engine.generate(ids, SamplingParams(max_tokens=40))
        again = engine.generate(ids, SamplingParams(max_tokens=40))
    for prompt, result, repeated in zip(ids, results, again, strict=True):
        assert list(result.token_ids) == list(repeated.token_ids) == reference(prompt, 40)
    accepted = [sum(r.metrics.accepted_tokens for r in some) for some in (results, again)]
    assert 0 < accepted[0] <= accepted[1], "finished requests should have helped the second time"


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_coupled_text_is_that_of_plain_decoding(tiny_model_path, temperature):
    params = SamplingParams(temperature=temperature, top_p=0.9, seed=11, max_tokens=32, ignore_eos=True)
    texts = []
    for spec, batch in (({"method": "none"}, 1), (suffix(1), 2), (suffix(4), 1), (suffix(8), 4)):
        rule = {"rejection_sample_method": "coupled"}
        with Engine.from_pretrained(tiny_model_path, spec | rule, max_batch_size=batch, **OPTIONS) as engine:
            texts += [[r.token_ids for r in engine.generate(TEXTS, params)] for _ in range(2)]
    assert all(text == texts[0] for text in texts[1:])


def test_without_the_global_tree_other_requests_do_not_matter(tiny_model_path):
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True)
    spec = suffix(4, suffix_decoding_max_cached_requests=0)
    with Engine.from_pretrained(tiny_model_path, spec, max_batch_size=2, **OPTIONS) as engine:
        together = [r.token_ids for r in engine.generate(TEXTS, params)]
        alone = [engine.generate(text, params).token_ids for text in TEXTS]
        assert engine._core._speculator._store.requests == 0
    assert together == alone


def test_what_the_global_tree_takes_in_and_when(tiny_model_path):
    """Prompt and output of what ended well, at the next admission, and nothing that the device reads before."""
    with Engine.from_pretrained(tiny_model_path, suffix(4), max_batch_size=2, **OPTIONS) as engine:
        speculator = engine._core._speculator
        late = LateExecutor(most=2)
        late.watched += [value for value in vars(speculator).values() if isinstance(value, torch.Tensor)]
        engine._core._executor = late
        results = engine.generate(TEXTS[:3], SamplingParams(max_tokens=12, ignore_eos=True))
        prompts = [engine.tokenizer(text)["input_ids"] for text in TEXTS[:3]]
        assert speculator._store.requests < 3
        engine.generate("b", SamplingParams(max_tokens=2))
        store = speculator._store
        assert store.requests == 3
        held = speculator._global_tokens[: store.used].tolist()
    finished = [[*p, *r.token_ids] for p, r in zip(prompts, results, strict=True)]
    assert len(held) == sum(map(len, finished))
    for sequence in finished:
        assert any(held[at : at + len(sequence)] == sequence for at in range(len(held)))


# Transcripts


def transcripts(seed: int, count: int) -> list[list[int]]:
    """An agent's sessions in one repository: thoughts that differ, a few commands, and their output.

    A command's output recurs with small edits, and begins and ends with lines that all commands share, so that what
    follows the last few tokens is not certain.
    """
    rng = np.random.default_rng(seed)
    outputs = [rng.integers(100, 4000, rng.integers(15, 50)).tolist() for _ in range(4)]

    def session() -> list[int]:
        tokens: list[int] = []
        for _ in range(14):
            tool = int(rng.integers(0, 4))
            tokens += [1, 2, *rng.integers(100, 4000, rng.integers(3, 9)).tolist(), 3]
            output = list(outputs[tool])
            for place in rng.integers(0, len(output), rng.integers(0, 3)):
                output[place] = int(rng.integers(100, 4000))
            tokens += [10 + tool, 20, 21, 22, *output, 30, 31, 32, 33, 34 + tool]
        return tokens

    return [session() for _ in range(count)]


def make_state(context: int, num_drafts: int) -> DecodeState:
    shape = StateShape(slots=1, context=context, num_drafts=num_drafts, vocab_size=8, max_bucket=1, max_width=64)
    state = DecodeState.allocate(shape, dtype=torch.float32, device="cpu")
    state.slot_of_row[0] = 0
    state.finished[0] = False
    return state


@dataclasses.dataclass
class Tally:
    """What drafting came to."""

    rounds: int = 0
    generated: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def length(self) -> float:
        return self.generated / self.rounds

    @property
    def rate(self) -> float:
        return self.accepted / self.drafted


def write(speculator, state: DecodeState, tokens: list[int], prompt: int, tally: Tally) -> None:
    """The rounds of a target whose text is `tokens`: a draft is accepted while it agrees."""
    state.tokens[0, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    speculator.admit(0)
    length = prompt
    while length < len(tokens):
        state.length[0] = length
        speculator.propose(state, 1)
        drafts = state.draft_tokens[0, : state.draft_count[0]].tolist()
        accepted = 0
        while accepted < min(len(drafts), len(tokens) - length - 1) and drafts[accepted] == tokens[length + accepted]:
            accepted += 1
        tally.rounds, tally.generated = tally.rounds + 1, tally.generated + accepted + 1
        tally.drafted, tally.accepted = tally.drafted + len(drafts), tally.accepted + accepted
        length += accepted + 1
    speculator.finish(0, tokens)


@pytest.mark.parametrize("k", [4, 16])
def test_beats_ngram_on_agent_transcripts(k):
    """Ten sessions one after another: longer runs of accepted drafts, and fewer rejected ones.

    The second also holds without the finished sessions.
    """
    state = make_state(2048, k)
    found = {}
    for name, speculator in (
        ("ngram", NgramSpeculator(k, min_n=2, max_n=4)),
        ("alone", SuffixSpeculator(k, max_cached_requests=0)),
        ("suffix", SuffixSpeculator(k)),
    ):
        speculator.allocate(state)
        found[name] = Tally()
        for tokens in transcripts(7, 10):
            write(speculator, state, tokens, 30, found[name])
    print({name: (round(tally.length, 2), round(tally.rate, 2)) for name, tally in found.items()})
    assert found["suffix"].length > found["ngram"].length
    assert found["suffix"].rate > found["ngram"].rate
    assert found["alone"].rate > found["ngram"].rate


@pytest.mark.parametrize("k", [4, 8, 24])
def test_the_defaults_beat_ngram_of_any_depth(k):
    """As a user gets them: suffix decoding without options, over ten sessions one after another."""
    config = SpeculativeConfig(method="suffix")
    depth = config.num_speculative_tokens
    assert depth is not None
    suffix, ngram = Tally(), Tally()
    for drafts, speculator, tally in (
        (depth, create_speculator(config), suffix),
        (k, create_speculator(SpeculativeConfig(method="ngram", num_speculative_tokens=k)), ngram),
    ):
        state = make_state(2048, drafts)
        speculator.allocate(state)
        for tokens in transcripts(8, 10):
            write(speculator, state, tokens, 30, tally)
    print(f"suffix {suffix.length:.2f}, ngram of {k} {ngram.length:.2f}")
    assert suffix.length > 1.2 * ngram.length


def test_finished_requests_help():
    tokens = transcripts(9, 1)[0]
    state = make_state(2048, 8)
    speculator = SuffixSpeculator(8)
    speculator.allocate(state)
    first, again = Tally(), Tally()
    write(speculator, state, tokens, 10, first)
    write(speculator, state, tokens, 10, again)
    assert again.rounds < 0.5 * first.rounds


# Memory


def test_memory_bound():
    """What the docstring states, for the slots and for the global tree, and nothing more whatever comes."""
    state = make_state(1000, 4)
    speculator = SuffixSpeculator(4, max_tree_depth=6, global_tokens=3000)
    speculator.allocate(state)
    own = {name: value for name, value in vars(speculator).items() if isinstance(value, torch.Tensor)}
    sizes = {name: value.numel() * value.element_size() for name, value in own.items()}
    assert sizes["_heads"] + sizes["_tree"] == 2 * 4 * 6 * (4 * 1000 + 1024)
    assert sizes["_global_heads"] + sizes["_global_tree"] == 4 * 6 * (4 * 3000 + 4096)
    rng = np.random.default_rng(0)
    for _ in range(12):
        speculator.finish(0, rng.integers(0, 50, 700).tolist())
        speculator.admit(0)
        assert speculator._store.used <= 3000
    assert all(value is getattr(speculator, name) for name, value in own.items())


@pytest.mark.parametrize(("max_requests", "capacity"), [(1, 100), (3, 1000), (20, 150), (16, 90), (1000, 300)])
def test_first_in_first_out(max_requests, capacity):
    """The index is the one of the youngest requests, in both ways of building it, and within both limits."""
    rng = np.random.default_rng(max_requests)
    store = SuffixStore(depth=4, max_requests=max_requests, capacity=capacity)
    added: list[list[int]] = []
    for _ in range(60):
        for _ in range(int(rng.integers(1, 3))):
            added.append(rng.integers(0, 5, rng.choice([1, 5, 30, 120])).tolist())
            store.add(added[-1])
        assert store.refresh()
        assert not store.refresh()
        assert 1 <= store.requests <= max_requests
        kept = [sequence[-capacity:] for sequence in added[-store.requests :]]
        assert store.used == sum(map(len, kept)) <= capacity
        fresh = SuffixStore(depth=4, max_requests=1000, capacity=capacity)
        for sequence in kept:
            fresh.add(sequence)
        fresh.refresh()
        assert np.array_equal(fresh.index.tokens[: store.used], store.index.tokens[: store.used])
        assert np.array_equal(fresh.index.heads, store.index.heads)
        for lane in range(4):
            nodes = np.unique(fresh.index.tree[1, lane, : store.used])
            assert np.array_equal(fresh.index.tree[2:, lane, nodes], store.index.tree[2:, lane, nodes])
        # Room for another request costs the old ones an eighth at most beyond what it needs.
        if len(added) > max_requests and capacity >= 1000:
            assert store.requests >= max_requests - max_requests // 8


# Options


def test_options_reach_the_drafter():
    config = SpeculativeConfig(
        method="suffix",
        suffix_decoding_max_tree_depth=10,
        suffix_decoding_max_cached_requests=5,
        suffix_decoding_max_spec_factor=0.5,
        suffix_decoding_min_token_prob=0.25,
    )
    assert config.num_speculative_tokens == 10
    speculator = create_speculator(dataclasses.replace(config, num_speculative_tokens=3))
    assert isinstance(speculator, SuffixSpeculator)
    speculator.allocate(make_state(64, 3))
    assert speculator._budget.tolist() == [0, 1, 1, 2, 2, 3, 3, 2, 1, 0]
    assert (speculator.max_cached_requests, speculator.min_token_prob) == (5, 0.25)


def test_too_deep_a_tree_is_refused():
    with pytest.raises(ConfigError, match=r"suffix_decoding_max_tree_depth.*64.*got 65"):
        SpeculativeConfig(method="suffix", suffix_decoding_max_tree_depth=65)
