"""The trained heads that come with draftgraph for SmolLM2-135M-Instruct, and the text that they were trained on."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from draftgraph import Engine, SamplingParams
from draftgraph.model_zoo.checkpoint import read_config
from draftgraph.model_zoo.draft_checkpoint import open_draft
from draftgraph.model_zoo.training.overlap import overlap
from draftgraph.model_zoo.weights_identity import weights_identity
from draftgraph.runtime.cache import complete_entry
from draftgraph.runtime.engine_config import EngineConfig
from draftgraph.runtime.loading import LoadedModel, build_core, load_target
from draftgraph.runtime.models import model_source
from draftgraph.runtime.shipped_heads import HEADS_DIRECTORY, ShippedHead, shipped_head
from draftgraph.runtime.speculative_config import SpeculativeConfig
from draftgraph.runtime.tokenizer_files import load_tokenizer
from draftgraph.runtime.train.held_out import HELD_OUT, held_out_texts
from draftgraph.runtime.train.ship_head import LARGEST_BYTES

TARGET = "smollm2-135m"
METHODS = ("eagle3", "dflash", "dspark")
ANSWERS = sorted((HEADS_DIRECTORY / TARGET).glob("*.jsonl.gz"))
PROMPTS = (
    [{"role": "user", "content": "Give me three tips for learning to cook."}],
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "The history of the steam engine begins with",
)
GREEDY = SamplingParams(max_tokens=32)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=32)


@pytest.fixture(params=METHODS)
def head(request) -> ShippedHead:
    found = shipped_head(TARGET, request.param)
    if found is None:
        pytest.skip(f"no {request.param} head for {TARGET} lies in {HEADS_DIRECTORY}")
    return found


def test_its_files_and_its_note(head):
    assert (head.directory / "model.safetensors").stat().st_size < LARGEST_BYTES
    checkpoint = open_draft(head.directory, head.method)
    checkpoint.check()
    assert checkpoint.unexpected == []
    note = head.note
    assert note["method"] == head.method
    assert note["target"]["alias"] == TARGET
    assert head.target_weights
    assert "train" in note["command"]
    assert head.method in note["command"]
    assert isinstance(note["data"], str)
    assert len(note["data"]) > 20
    assert isinstance(note["seed"], int)
    held_out = note["held_out"]
    rates, length = held_out["acceptance_by_position"], held_out["mean_acceptance_length"]
    assert len(rates) == held_out["num_speculative_tokens"]
    assert all(0.0 < rate < 1.0 for rate in rates)
    assert 1.0 < length < len(rates) + 1
    assert held_out["what"]


@pytest.mark.models
def test_it_fits_the_target(head, smollm2_path):
    open_draft(head.directory).config.check_target(read_config(smollm2_path))
    if model_source(smollm2_path) == head.note["target"]["source"]:
        assert weights_identity(smollm2_path) in head.target_weights


@cache
def loaded(method: str | None) -> LoadedModel:
    """The target, and the head of a method."""
    return load_target(TARGET, config_of(method, "standard"), None)


def config_of(method: str | None, rule: str) -> EngineConfig:
    options: dict[str, Any] = {"method": method or "none", "rejection_sample_method": rule}
    return EngineConfig(
        speculative=SpeculativeConfig(**options),
        dtype="float32",
        compile=False,
        max_batch_size=len(PROMPTS),
        max_model_len=256,
    )


def answers(method: str | None, rule: str, params: SamplingParams) -> list[tuple[int, ...]]:
    """Token ids, from weights that are read once for both rules."""
    target, config = loaded(method), config_of(method, rule)
    if target.speculative is not None:
        config = replace(config, speculative=replace(target.speculative, rejection_sample_method=rule))
    with Engine(target, build_core(target, config), config) as engine:
        return [result.token_ids for result in engine.generate(list(PROMPTS), params)]


@pytest.fixture(scope="module")
def plain(smollm2_path):
    """By rule, what is answered without drafts."""
    found = {rule: answers(None, rule, params) for rule, params in (("standard", GREEDY), ("coupled", SAMPLED))}
    loaded.cache_clear()
    return found


@pytest.mark.models
@pytest.mark.slow
def test_the_text_is_plain_decoding_s(head, plain):
    for rule, params in (("standard", GREEDY), ("coupled", SAMPLED)):
        assert answers(head.method, rule, params) == plain[rule], rule
    loaded.cache_clear()


@pytest.mark.models
@pytest.mark.parametrize("file", ANSWERS, ids=lambda file: file.name)
def test_the_training_text_holds_nothing_that_is_measured_on(smollm2_path, file):
    for name in HELD_OUT:
        if complete_entry(f"prompts-{name}") is None:
            pytest.skip(f"the prompt set {name} is not in the cache: run `draftgraph bench {TARGET} --prompts {name}`")
    held_out = held_out_texts(silent)
    assert len(held_out) == 120, "MT-bench's 80 first turns and HumanEval's first 40"
    tokenizer = load_tokenizer(smollm2_path)
    lines = gzip.decompress(file.read_bytes()).decode("utf-8").split("\n")
    texts = [text for line in lines if line for text in parts_of(json.loads(line), tokenizer)]
    assert len(texts) > 100
    assert overlap(texts, held_out) == ()


def test_there_is_training_text():
    assert ANSWERS


def parts_of(line: dict[str, Any], tokenizer: Any) -> tuple[str, str]:
    if "prompt_ids" in line:  # of text to go on with, which is no chat
        return tokenizer.decode(line["prompt_ids"], skip_special_tokens=True), line["answer"]
    prompt = line["prompt"]
    asked = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
    return asked, line["answer"]


def silent(*_: object) -> None:
    pass
