"""The engine's greedy text, with drafts, equals transformers' for one model of each family."""

from __future__ import annotations

import pytest
import torch
from tiny_models import VOCAB, random_tokens, tiny_model

from draftgraph import Engine, SamplingParams
from draftgraph.profiling.checks.random_models import number_tokenizer

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
FAMILIES = [
    "qwen3_moe",
    "glm4_moe",
    "deepseek_v3",
    "deepseek_v2",
    "ernie4_5",
    "ernie4_5_moe",
    "gemma4-small",
    "gemma4-moe",
]
LENGTH = 40


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_text_with_drafts_equals_transformers(name, tmp_path) -> None:
    reference = tiny_model(name)
    reference.save_pretrained(tmp_path)
    number_tokenizer(VOCAB).save_pretrained(tmp_path)
    # One of them repeats itself, so that there are drafts from the start.
    prompts = [random_tokens(17, 1), random_tokens(6, 2) * 5, random_tokens(40, 3)]
    expected = []
    for prompt in prompts:
        with torch.inference_mode():
            tokens = reference.generate(
                torch.tensor([prompt]), max_new_tokens=LENGTH, do_sample=False, eos_token_id=-1, pad_token_id=0
            )
        expected.append(tokens[0, len(prompt) :].tolist())
    options = {"dtype": "float32", "compile": False, "max_batch_size": 2, "max_model_len": 128}
    with Engine.from_pretrained(tmp_path, NGRAM, **options) as engine:
        results = engine.generate(prompts, SamplingParams(max_tokens=LENGTH, ignore_eos=True))
        assert engine.prefill_cost(width=16, tokens=9, context=0).bytes_read > 0, "the floor counts it"
    assert [list(result.token_ids) for result in results] == expected
    assert sum(result.metrics.accepted_tokens for result in results) > 0, "without drafts it would prove nothing"

    layers = reference.config.get_text_config().num_hidden_layers
    for exit_layer in (1, layers):
        early = {"method": "layerskip", "num_speculative_tokens": 3, "exit_layer": exit_layer}
        with Engine.from_pretrained(tmp_path, early, **options) as engine:
            results = engine.generate(prompts, SamplingParams(max_tokens=LENGTH, ignore_eos=True))
        assert [list(result.token_ids) for result in results] == expected
    # Now all layers draft, and only what is drafted past the end is not accepted.
    assert all(result.metrics.accepted_tokens == result.metrics.proposed_tokens for result in results)
