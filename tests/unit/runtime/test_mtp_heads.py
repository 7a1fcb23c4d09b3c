"""Prediction modules: their drafts equal the plain mathematics and transformers', in every style."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import build_tokenizer
from mtp_heads import Modules
from test_draft_heads import record_proposals

from draftgraph import Engine, SamplingParams

KINDS: dict[str, tuple[str, int, bool, tuple[int, ...]]] = {
    # Style, modules, with tables of their own, and the numbers of drafts.
    "deepseek": ("deepseek", 1, True, (4,)),
    "glm": ("glm", 1, False, (3,)),
    "qwen": ("qwen", 1, False, (4,)),
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
        self._path, self._tokenizer = path, build_tokenizer()
        self._made: dict[str, Modules] = {}
        texts = ["one two three, one two three, one", "The steam engine", "a", "def"]
        self.prompts = [self._tokenizer(text)["input_ids"] for text in texts]
        self.prompts.append(self._tokenizer("The steam engine changed how people worked. " * 14)["input_ids"])
        assert len(self.prompts[-1]) > 256, "longer than a prefill chunk"
        assert [len(prompt) for prompt in self.prompts[2:4]] == [1, 2], "nothing to prefill, and one token"

    def modules(self, kind: str) -> Modules:
        if kind not in self._made:
            style, count, own, _ = KINDS[kind]
            self._made[kind] = Modules(self._path / kind, self._tokenizer, style, count=count, own=own)
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
                ours, theirs, rtol=2e-3, atol=2e-3, msg=lambda text, step=step, n=len(tokens): f"{step}, {n}: {text}"
            )
        assert drafts == [int(values.argmax()) for values in expected]
