"""Prediction modules: their drafts equal the plain mathematics and transformers', in every style."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import build_tokenizer
from mtp_heads import LAYERS, Modules
from test_draft_heads import ExtraRounds, record_proposals

from draftgraph import Engine, SamplingParams
from draftgraph.profiling.floor import RoundShape

KINDS: dict[str, tuple[str, int, bool, tuple[int, ...]]] = {
    # Style, modules, with tables of their own, and the numbers of drafts.
    "deepseek": ("deepseek", 1, True, (4,)),
    "glm": ("glm", 1, False, (3,)),
    "qwen": ("qwen", 1, False, (4,)),
    "qwen3_next": ("qwen3_next", 1, False, (3,)),
    "mimo": ("mimo", 1, False, (3,)),
    "ernie": ("ernie", 1, False, (3,)),
    "deepseek, 2 modules": ("deepseek", 2, False, (2, 6)),
    "glm, 3 modules with tables": ("glm", 3, True, (3, 2, 6)),
    "qwen, 2 layers": ("qwen", 2, False, (4,)),
    "mimo, 3 modules": ("mimo", 3, False, (3, 1)),
    "ernie, 2 modules": ("ernie", 2, False, (2,)),
}


class Lab:
    """Targets with their modules, made when they are needed."""

    def __init__(self, path: Path) -> None:
        self._path, self.tokenizer = path, build_tokenizer()
        self._made: dict[str, Modules] = {}
        texts = ["one two three, one two three, one", "The steam engine", "a", "def"]
        self.prompts = [self.tokenizer(text)["input_ids"] for text in texts]
        self.prompts.append(self.tokenizer("The steam engine changed how people worked. " * 14)["input_ids"])
        assert len(self.prompts[-1]) > 256, "longer than a prefill chunk"
        assert [len(prompt) for prompt in self.prompts[2:4]] == [1, 2], "nothing to prefill, and one token"

    def modules(self, kind: str) -> Modules:
        if kind not in self._made:
            style, count, own, _ = KINDS[kind]
            self._made[kind] = Modules(self._path / kind, self.tokenizer, style, count=count, own=own)
        return self._made[kind]

    def engine(self, kind: str, depth: int | None, **options: Any) -> Engine:
        spec = {"method": "mtp", "num_speculative_tokens": depth, **options.pop("spec", {})}
        options = {"dtype": "float32", "compile": False, "max_model_len": 512, "max_batch_size": 2, **options}
        return Engine.from_pretrained(self.modules(kind).path, spec, **options)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("modules"))


@pytest.mark.parametrize(
    ("kind", "depth"), [(kind, depth) for kind, (*_, depths) in KINDS.items() for depth in depths], ids=str
)
def test_drafts_equal_the_plain_mathematics_after_any_acceptance(lab, kind, depth):
    """Synthetic acceptance leaves 0 to K drafts standing, so that KV, positions and shifts meet every case."""
    modules = lab.modules(kind)
    rates = [0.8, 0.6, 0.5, 0.4, 0.3, 0.25][:depth]
    spec = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    with lab.engine(kind, depth, spec=spec, metrics="detailed") as engine:
        found = record_proposals(engine)
        params = SamplingParams(max_tokens=14, ignore_eos=True, seed=5)
        results = engine.generate(lab.prompts, params)
        # A prompt that shares its beginning with what a slot still holds, the answer included.
        first = engine.generate(lab.prompts[0], params)
        again = [*lab.prompts[0], *first.token_ids, 5, 6]
        reusing = engine.generate(again, SamplingParams(max_tokens=4, ignore_eos=True))
    assert reusing.metrics.reused_prompt_tokens > 0
    accepted = {pair[1] for r in results for pair in r.metrics.round_pairs}
    assert accepted >= {0, 1, depth}, "the test needs every kind of round"
    assert len(found) > 12
    for tokens, drafts, logits in found:
        expected = modules.drafts(tokens, depth)[: len(drafts)]
        for step, (ours, theirs) in enumerate(zip(logits, expected, strict=True)):
            torch.testing.assert_close(
                ours, theirs, rtol=2e-3, atol=2e-3, msg=f"draft {step} after {len(tokens)} tokens"
            )
        assert drafts == [int(values.argmax()) for values in expected]


def test_a_qwen3_next_head_drafts_for_another_target(lab, tmp_path):
    """Its layer, with gated heads and a gated shared expert, does not ask for a target of its family."""
    head, target = lab.modules("qwen3_next"), lab.modules("mimo")
    spec = {"model": str(head.split(tmp_path))}
    with lab.engine("mimo", 3, spec=spec) as engine:
        found = record_proposals(engine)
        engine.generate(lab.prompts[:2], SamplingParams(max_tokens=8, ignore_eos=True))
    assert len(found) > 8
    for tokens, drafts, _ in found:
        assert drafts == greedy(head.drafts(tokens, 3, target))[: len(drafts)]


def greedy(tokens: list[torch.Tensor]) -> list[int]:
    return [int(values.argmax()) for values in tokens]


@pytest.mark.parametrize(("style", "count"), [("glm", 1), ("glm", 3), ("deepseek", 2)])
def test_drafts_equal_transformers(lab, tmp_path, monkeypatch, style, count):
    """Its generator does not zero the embeddings at position 0: tokens without one stand there."""
    from transformers import AutoModelForCausalLM
    from transformers.generation.candidate_generator import MTPCandidateGenerator

    silent = 3
    modules = Modules(tmp_path, lab.tokenizer, style, count=count, silent=silent)
    # It looks for modules at the numbers of layers that published checkpoints have them at.
    patterns = [rf"model\.layers\.{LAYERS + i}\..*" for i in range(count)]
    monkeypatch.setattr(type(modules.model), "_keys_to_ignore_on_load_unexpected", patterns)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    prompt, asked = [20, *[silent] * count, 21, 22, 11, 12, 10, 13, 24], 40
    theirs: dict[tuple[int, ...], list[int]] = {}
    get_candidates = MTPCandidateGenerator.get_candidates

    def recorded(self, input_ids, *rest, **options):
        ids, logits = get_candidates(self, input_ids, *rest, **options)
        if logits is not None:
            theirs[tuple(input_ids[0].tolist())] = ids[0, input_ids.shape[1] :].tolist()
        return ids, logits

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", recorded)
    tokens = model.generate(torch.tensor([prompt]), use_mtp=True, max_new_tokens=asked, do_sample=False)[0].tolist()
    kept = {n - len(prompt) for n in map(len, theirs)}
    assert len(theirs) < asked - 5, "some drafts are accepted"
    assert count == 1 or len({b - a for a, b in zip(sorted(kept), sorted(kept)[1:], strict=False)}) > 2
    for prefix, drafts in theirs.items():
        assert greedy(modules.drafts(list(prefix), count)) == drafts

    spec = {"method": "mtp", "num_speculative_tokens": count}
    options = {"dtype": "float32", "compile": False, "max_model_len": 128, "max_batch_size": 1}
    with Engine.from_pretrained(tmp_path, spec, **options) as engine:
        found = record_proposals(engine)
        result = engine.generate(prompt, SamplingParams(max_tokens=asked, ignore_eos=True))
    assert list(result.token_ids) == tokens[len(prompt) :]
    common = [(drafts, theirs[tuple(prefix)]) for prefix, drafts, _ in found if tuple(prefix) in theirs]
    assert len(common) > 8
    assert all(ours == other[: len(ours)] for ours, other in common)


PAIRS = list(
    zip(
        ["deepseek", "glm", "qwen", "mimo", "ernie", "deepseek, 2 modules", "glm, 3 modules with tables"],
        [5, 7, 1, 6, 2, 4, 3],
        [1, 2, 4, 1, 2, 4, 2],
        strict=True,
    )
)


@pytest.mark.parametrize(("kind", "depth", "batch"), PAIRS)
def test_coupled_output_is_plain_decodings(lab, kind, depth, batch):
    """With modules that lie in the target's own checkpoint, and that mostly err."""
    modules, prompts = lab.modules(kind), [lab.prompts[place] for place in (0, 2, 4)]
    with torch.no_grad():
        free = modules.model.generate(
            torch.tensor(prompts[:1]), max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0
        )[0, len(prompts[0]) :].tolist()
    cases = [
        SamplingParams(max_tokens=12, ignore_eos=True),
        SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.8, seed=4),
        SamplingParams(max_tokens=12, stop_token_ids=[free[8]]),
    ]
    plain = {"method": "none", "num_speculative_tokens": None, "rejection_sample_method": "coupled"}
    with lab.engine(kind, None, spec=plain, max_batch_size=4) as engine:
        wanted = [[r.token_ids for r in engine.generate(prompts, params)] for params in cases]
    assert list(wanted[0][0]) == free
    spec = {"rejection_sample_method": "coupled"}
    with lab.engine(kind, depth, spec=spec, max_batch_size=batch) as engine:
        assert [[r.token_ids for r in engine.generate(prompts, params)] for params in cases] == wanted


def test_a_round_that_is_dropped_leaves_what_is_kept(lab):
    """Verify runs once more after the loop has ended, with rows that are not finished."""
    with lab.engine("glm, 3 modules with tables", 3) as engine:
        list(zip(range(2), engine.stream(lab.prompts[0], SamplingParams(max_tokens=30, ignore_eos=True)), strict=False))
        core = engine._core
        history, state = core._speculator._history, core.state
        window = core._speculator._history._window
        before = [history.values.clone(), history._seen.clone()]
        assert before[0].any()
        state.running.fill_(False)
        history.keep(state, window, torch.randn(len(window.tokens), history.values.shape[1]))
        assert all(torch.equal(a, b) for a, b in zip(before, (history.values, history._seen), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["extra rounds", "loop", "loop worker", "round worker"])
@pytest.mark.parametrize(("kind", "depth"), [("deepseek", 4), ("glm, 3 modules with tables", 6)])
def test_drafts_do_not_depend_on_the_executor(lab, kind, depth, executor):
    """Synthetic acceptance emits drafts, so the text tells them all; graphs are captured in the middle of requests."""
    from test_executor_identity import engine_with, make

    rates = [0.8, 0.6, 0.5, 0.4, 0.3, 0.2][:depth]
    spec = {"method": "mtp", "num_speculative_tokens": depth, "rejection_sample_method": "synthetic"}
    spec["synthetic_acceptance_rates"] = rates
    params = SamplingParams(max_tokens=14, ignore_eos=True, seed=5)
    texts = []
    for name, limits in (("host", {}), (executor, {"ring": 11, "rounds_per_launch": 3})):
        options = {"max_batch_size": 2, "max_model_len": 512, **limits}
        made = ExtraRounds() if name == "extra rounds" else make(name)
        with engine_with(lab.modules(kind).path, made, spec, **options) as engine:
            texts.append([r.token_ids for r in engine.generate(lab.prompts, params)])
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "depth"), [("glm", 2), ("mimo, 3 modules", 3)])
def test_compiled_modules_draft_as_eager_ones(lab, kind, depth):
    texts = []
    rates = [0.8, 0.6, 0.5][:depth]
    spec = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    for compiled in (False, True):
        with lab.engine(kind, depth, spec=spec, compile=compiled, max_batch_size=1) as engine:
            params = SamplingParams(max_tokens=14, ignore_eos=True, seed=5)
            texts.append([r.token_ids for r in engine.generate(lab.prompts[:2], params)])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("kind", "depth"), [("mimo", 4), ("mimo, 3 modules", 3)])
def test_the_floor_of_a_step_counts_its_weights(lab, kind, depth):
    layer = (32 + 2 * 16 + 32) * 32 + 3 * 32 * 48
    with lab.engine(kind, depth) as engine:
        cost = engine._core.propose_cost(RoundShape(rows=1, width=8, window=5, context=100, num_drafts=depth))
    least = 4 * depth * (layer + 2 * 32 * 32 + 32 * 320)
    assert least <= cost.bytes_read <= least + 4 * depth * (2 * 2 * 16 * 100 + 1000)
    assert cost.operations >= least / 2
