"""Draft heads on targets with mixtures of experts and latent attention: only the hidden states matter to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from draft_heads import HIDDEN, drafted, eagle, eagle3, medusa
from test_draft_heads import record_proposals
from tiny_models import VOCAB, random_tokens, tiny_model

from draftgraph import Engine, SamplingParams
from draftgraph.profiling.checks.random_models import number_tokenizer

PAIRS = {
    "qwen3_moe": ("qwen3_moe", eagle),
    "deepseek_v3": ("deepseek_v3", eagle3),
    "glm4_moe": ("glm4_moe", medusa),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_head_drafts_by_its_mathematics_and_changes_nothing(name, tmp_path):
    kind, make = PAIRS[name]
    target = tiny_model(kind, hidden_size=HIDDEN, num_hidden_layers=6)
    target.save_pretrained(tmp_path / "target")
    number_tokenizer(VOCAB).save_pretrained(tmp_path / "target")
    head = make(VOCAB)
    path, depth = head.save(tmp_path / "head"), 3
    prompts = [random_tokens(17, 1), random_tokens(300, 3), random_tokens(5, 2)]

    def generate(spec: dict[str, Any], params: SamplingParams) -> tuple[list[Any], list[Any]]:
        options = {"dtype": "float32", "compile": False, "max_batch_size": 2, "max_model_len": 512}
        with Engine.from_pretrained(tmp_path / "target", spec, **options) as engine:
            found = record_proposals(engine) if "model" in spec else []
            return engine.generate(prompts, params), found

    spec = {**head.spec, "model": str(path), "num_speculative_tokens": depth}
    for params in (
        SamplingParams(max_tokens=10, ignore_eos=True),
        SamplingParams(max_tokens=10, ignore_eos=True, temperature=0.8, seed=2),
    ):
        plain, _ = generate({"method": "none", "rejection_sample_method": "coupled"}, params)
        with_head, _ = generate({**spec, "rejection_sample_method": "coupled"}, params)
        assert [r.token_ids for r in with_head] == [r.token_ids for r in plain]

    rates = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.7, 0.5, 0.4]}
    _, found = generate({**spec, **rates}, SamplingParams(max_tokens=10, ignore_eos=True, seed=5))
    assert len(found) > 8
    tensors = {key: value.data for key, value in target.named_parameters()}
    layers = (2, 3, 3) if make is eagle3 else (6,)
    for tokens, drafts, logits in found:
        with torch.no_grad():
            states = target(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        expected = head.drafts(head, tensors, tokens, [states[layer][0] for layer in layers], depth)[: len(drafts)]
        torch.testing.assert_close(torch.stack(logits), torch.stack(expected), rtol=2e-3, atol=2e-3)
        assert drafts == [drafted(head, values) for values in expected]
