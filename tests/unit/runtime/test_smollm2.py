"""The promises of the README on a real model, SmolLM2-135M-Instruct: token for token against transformers."""

from __future__ import annotations

import json

import pytest
import torch

from draftgraph import Engine, SamplingParams

pytestmark = pytest.mark.models

TOKENS = 64
ECHO = (
    "The steam engine was invented in the 18th century. It changed how people lived and worked. Factories grew near "
    "rivers and coal fields, and railways carried goods across the country in hours rather than days."
)
LONG = " ".join(f"Item {i} is painted {c}." for i in range(40) for c in ("red", "blue"))


def ngram(k: int, **extra: object) -> dict[str, object]:
    return {"method": "ngram", "num_speculative_tokens": k, **extra}


def chat(tokenizer, text: str) -> list[int]:
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer(rendered, add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="module")
def prompts(smollm2_path) -> dict[str, list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    found = {
        "chat": chat(tokenizer, "Give me three tips for learning to cook."),
        "code": tokenizer("def fibonacci(n):\n    if n < 2:\n        return n\n    return")["input_ids"],
        "echo": chat(tokenizer, f"Repeat the following text exactly, word for word:\n\n{ECHO}"),
        "long": chat(tokenizer, f"{LONG}\n\nWhat colour is item 3?"),
        "non-English": tokenizer("La capitale de la France est Paris. La capitale de l'Espagne est")["input_ids"],
        "one token": tokenizer("The")["input_ids"],
        "open-ended": tokenizer("The history of the steam engine begins with")["input_ids"],
        "numbers": tokenizer("1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,")["input_ids"],
    }
    assert len(found["one token"]) == 1
    assert len(found["long"]) > 256
    return found


@pytest.fixture(scope="module")
def expected(smollm2_path, prompts) -> dict[str, list[int]]:
    """transformers' greedy tokens in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32).eval()
    found = {}
    for name, ids in prompts.items():
        with torch.no_grad():
            out = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=TOKENS,
                do_sample=False,
            )
        found[name] = out[0, len(ids) :].tolist()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("spec", [None, ngram(1), ngram(4), ngram(8)], ids=["none", "K1", "K4", "K8"])
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_greedy_in_float32_equals_transformers(smollm2_path, prompts, expected, spec, batch):
    with Engine.from_pretrained(
        smollm2_path, spec, dtype="float32", max_batch_size=batch, max_model_len=2048
    ) as engine:
        results = engine.generate(list(prompts.values()), SamplingParams(max_tokens=TOKENS))
    for (name, tokens), result in zip(expected.items(), results, strict=True):
        assert list(result.token_ids) == tokens, name
    if spec is not None:
        echo = results[list(prompts).index("echo")]
        assert echo.metrics.accepted_tokens > len(echo.token_ids) // 3


def test_the_known_continuation(smollm2_path):
    with Engine.from_pretrained(smollm2_path, dtype="float32", max_batch_size=1, max_model_len=256) as engine:
        result = engine.generate("The history of the steam engine begins with", SamplingParams(max_tokens=38))
    assert result.text.startswith(
        " the invention of the steam engine in the 18th century. The steam engine was first used in the 18th century "
        "to power the steam engines of the time."
    )


@pytest.mark.slow
def test_coupled_text_depends_on_the_seed_alone(smollm2_path, prompts):
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=1234, max_tokens=TOKENS)
    texts = []
    for spec, batch in [
        ({"method": "none", "rejection_sample_method": "coupled"}, 1),
        (ngram(8, rejection_sample_method="coupled"), 1),
        (ngram(4, rejection_sample_method="coupled"), 2),
        (ngram(8, rejection_sample_method="coupled"), 4),
    ]:
        with Engine.from_pretrained(
            smollm2_path, spec, dtype="float32", max_batch_size=batch, max_model_len=2048
        ) as engine:
            texts.append([r.text for r in engine.generate(list(prompts.values()), params)])
    assert texts[1:] == texts[:1] * 3


@pytest.mark.slow
def test_exact_bfloat16_plain_and_ngram_agree(smollm2_path, prompts):
    outputs = []
    for spec in (None, ngram(4), ngram(8)):
        with Engine.from_pretrained(
            smollm2_path, spec, dtype="bfloat16", exact=True, max_batch_size=1, max_model_len=2048
        ) as engine:
            results = engine.generate(list(prompts.values()), SamplingParams(max_tokens=TOKENS))
            outputs.append([r.token_ids for r in results])
    assert outputs[1:] == outputs[:1] * 2


def test_a_stream_gives_text_as_it_comes(smollm2_path, prompts):
    with Engine.from_pretrained(smollm2_path, ngram(8), max_batch_size=1, max_model_len=512) as engine:
        chunks = list(engine.stream(prompts["echo"], SamplingParams(max_tokens=TOKENS)))
    result = chunks[-1].result
    assert "".join(c.text for c in chunks) == result.text
    assert result.text == ECHO
    assert result.finish_reason == "stop"
    json.dumps(result.metrics.to_dict())
