"""Standard, block and coupled verification give the target's own distribution, measured through the whole engine."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from draft_heads import Draft, eagle, eagle3
from draft_models import save_noisy_copy

from draftgraph import Engine, SamplingParams

VOCABULARY = 6
SAMPLES = 3000
PROMPT = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
FILTERS = [{"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.3, "top_k": 4, "min_p": 0.05}]


@pytest.fixture(scope="module")
def small_vocabulary_path(tmp_path_factory, tiny_model_path):
    """A random Llama over 6 tokens; its tokenizer knows more, which does no harm."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("tiny") / "six"
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        eos_token_id=0,
        bos_token_id=None,
        initializer_range=0.4,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(tiny_model_path).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def small_draft_path(tmp_path_factory, small_vocabulary_path):
    """A disturbed copy: its distributions are near the model's, and not the same."""
    return save_noisy_copy(small_vocabulary_path, tmp_path_factory.mktemp("tiny") / "draft", 0.7)


def exact_distribution(path, length: int, options: dict[str, float]) -> np.ndarray:
    """The probability of each continuation of PROMPT by `length` tokens, from transformers' logits."""
    from transformers import LlamaForCausalLM
    from transformers.generation import LogitsProcessorList
    from transformers.generation.logits_process import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    model = LlamaForCausalLM.from_pretrained(path).eval()
    warpers = LogitsProcessorList([TemperatureLogitsWarper(options["temperature"])])
    if "top_k" in options:
        warpers.append(TopKLogitsWarper(int(options["top_k"])))
    if "top_p" in options:
        warpers.append(TopPLogitsWarper(options["top_p"]))
    if "min_p" in options:
        warpers.append(MinPLogitsWarper(options["min_p"]))
    continuations = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=length)))
    ids = torch.cat((torch.tensor(PROMPT).expand(len(continuations), -1), continuations), dim=1)
    with torch.no_grad():
        logits = model(ids).logits
    total = torch.ones(len(continuations), dtype=torch.float64)
    for i in range(length):
        place = len(PROMPT) + i - 1
        p = warpers(ids[:, : place + 1], logits[:, place]).double().softmax(-1)
        total *= p.gather(1, continuations[:, i : i + 1])[:, 0]
    assert float(total.sum()) == pytest.approx(1.0)
    return total.numpy()


NGRAM = {"method": "ngram", "prompt_lookup_min": 1}
SAMPLED = {"method": "draft_model", "draft_sample_method": "probabilistic"}
HEADS: dict[str, Draft] = {"eagle": eagle(VOCABULARY), "eagle3": eagle3(VOCABULARY, draft_vocab=3, ids=[0, 0])}
"""Random heads; the second knows every other token and has no strong opinion, and reads all there is in one layer."""
HEADS["eagle3"].tensors["lm_head.weight"] *= 0.1


@pytest.mark.parametrize(
    ("drafts", "method", "options"),
    [
        *((NGRAM, "standard", f) for f in FILTERS),
        (NGRAM, "block", FILTERS[1]),
        (NGRAM, "coupled", FILTERS[1]),
        (SAMPLED, "standard", FILTERS[1]),
        *(pytest.param(SAMPLED, "standard", f, marks=pytest.mark.slow) for f in (FILTERS[0], FILTERS[2])),
        pytest.param(SAMPLED, "block", FILTERS[1], marks=pytest.mark.slow),
        pytest.param({**SAMPLED, "method": "eagle"}, "block", FILTERS[1], marks=pytest.mark.slow),
        pytest.param({**SAMPLED, "method": "eagle3"}, "standard", FILTERS[1], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_three_tokens_follow_the_exact_distribution(
    small_vocabulary_path, small_draft_path, tmp_path, drafts, options, method
):
    spec = {**drafts, "num_speculative_tokens": 3, "rejection_sample_method": method}
    if drafts["method"] in HEADS:
        spec["model"] = str(HEADS[drafts["method"]].save(tmp_path))
    if drafts is SAMPLED:
        spec["model"] = str(small_draft_path)
    params = SamplingParams(max_tokens=3, ignore_eos=True, seed=1000, n=SAMPLES, **options)
    with Engine.from_pretrained(
        small_vocabulary_path, spec, dtype="float32", compile=False, max_batch_size=16
    ) as engine:
        results = engine.generate(PROMPT, params)
    accepted = sum(r.metrics.accepted_tokens for r in results)
    rejected = sum(r.metrics.proposed_tokens for r in results) - accepted
    assert min(accepted, rejected) > SAMPLES // 20, "both branches must have been taken"

    exact = exact_distribution(small_vocabulary_path, 3, options)
    observed = np.zeros_like(exact)
    for result in results:
        a, b, c = result.token_ids
        observed[(a * VOCABULARY + b) * VOCABULARY + c] += 1 / SAMPLES
    assert (observed[exact == 0] == 0).all()
    distance = 0.5 * np.abs(observed - exact).sum()
    # Under the null hypothesis E|observed - exact| <= sqrt(exact (1 - exact) / N) per cell, and the sum
    # concentrates: changing one sample moves the distance by 1 / N at most (McDiarmid).
    bound = 0.5 * np.sqrt(exact * (1 - exact) / SAMPLES).sum() + np.sqrt(np.log(1e6) / (2 * SAMPLES))
    assert distance < bound
