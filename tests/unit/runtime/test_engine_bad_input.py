"""Bad input of every kind: a clear error before expensive work, and the engine stays usable."""

from __future__ import annotations

import json
import shutil

import pytest

from draftgraph import Engine, SamplingParams
from draftgraph.model_zoo.errors import CheckpointError
from draftgraph.runtime.errors import ConfigError, NotAvailableError, RequestError


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([3, 100000], "token id 100000 at position 1 of the prompt is outside the vocabulary, which is 0 to"),
        ([3, -1], "token id -1 at position 1"),
        ([1] * 512, "the prompt has 512 tokens; max_model_len is 512 .* at most 511 are accepted"),
        (3.5, "a prompt is a string, a list of token ids, or a list of chat messages"),
        ([3, "a"], "the list holds 'a'"),
        ([{"role": "user"}], "chat message 0 must have a 'role' and a 'content'"),
        (["one", ""], "the prompt is empty"),
        ("a\ud800b", r"the prompt is not valid text: it holds '\\ud800' at character 1"),
        ([{"role": "user", "content": None}], "the content of chat message 0 must be a string, got None"),
        ([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "must be a string, got"),
    ],
    ids=str,
)
def test_bad_prompts_are_refused_before_anything_runs(engine, prompt, message, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(type(engine._core), "step", lambda core: pytest.fail("something ran"))
        with pytest.raises(RequestError, match=message):
            engine.generate(prompt)
        if not isinstance(prompt, list) or "one" not in prompt:
            with pytest.raises(RequestError, match=message):
                engine.stream(prompt)
    assert len(engine.generate("one", SamplingParams(max_tokens=2, ignore_eos=True)).token_ids) == 2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dtype": "float8"}, ConfigError, "dtype must be one of auto, float32, bfloat16, float16; got 'float8'"),
        ({"device": "tpu9"}, ConfigError, "device must be cpu, cuda or auto, got 'tpu9'"),
        ({"device": "mps"}, NotAvailableError, "device 'mps' is not supported; accepted: cpu, cuda, auto"),
        ({"device": "cuda:77"}, NotAvailableError, "device 'cuda:77' cannot be used: .*; accepted: cpu, auto"),
        ({"max_model_len": 1}, ConfigError, "max_model_len must be an integer of at least 2, got 1"),
        ({"max_model_len": 5000}, ConfigError, "max_model_len is 5000, but the model was made for at most 1024"),
        ({"max_batch_size": 0}, ConfigError, "max_batch_size must be an integer of at least 1, got 0"),
        ({"batch_buckets": [1, 2]}, ConfigError, r"\(2\) must hold max_batch_size \(4\)"),
        ({"executor": "loop"}, ConfigError, "executor 'loop' cannot be used on cpu"),
        ({"metrics": "all"}, ConfigError, "metrics must be one of none, summary, detailed; got 'all'"),
        ({"attention_backend": "x"}, ConfigError, "attention_backend must be one of auto, sdpa; got 'x'"),
        ({"batch_buckets": 4}, ConfigError, "batch_buckets must be a list of integers or None, got 4"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 8}, "max_model_len": 8},
            ConfigError,
            r"num_speculative_tokens is 8, but a sequence has at most 8 tokens \(max_model_len\): use at most 7",
        ),
        ({"compile": 1}, ConfigError, "compile must be True or False, got 1"),
        (
            {
                "speculative_config": {
                    "method": "ngram",
                    "num_speculative_tokens": 2,
                    "use_local_argmax_reduction": True,
                }
            },
            NotAvailableError,
            "use_local_argmax_reduction",
        ),
        ({"speculative_config": {"method": "ngrams"}}, ConfigError, "ngram"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 16}, "exact": True},
            ConfigError,
            "at most 15 speculative tokens, got 16",
        ),
    ],
    ids=str,
)
def test_bad_settings_are_refused_before_weights_are_read(tiny_model_path, options, error, message, monkeypatch):
    monkeypatch.setattr("draftgraph.runtime.loading.load_model", lambda *a, **k: pytest.fail("weights were read"))
    with pytest.raises(error, match=message):
        Engine.from_pretrained(tiny_model_path, **options)


@pytest.mark.parametrize("params", [{"max_tokens": 3}, 5, [SamplingParams()]], ids=str)
def test_parameters_of_another_type_are_refused(engine, params):
    for use in (engine.generate, engine.stream):
        with pytest.raises(RequestError, match="params must be a SamplingParams or None, got"):
            use("one", params)


@pytest.mark.parametrize("model", [None, 5])
def test_a_model_must_be_a_name_or_a_path(model):
    with pytest.raises(ConfigError, match="model must be the name or path of a model"):
        Engine.from_pretrained(model)


def copy_of(path, tmp_path):
    return shutil.copytree(path, tmp_path / "copy")


def test_a_chat_template_that_refuses_is_a_request_error(tiny_model_path, tmp_path):
    path = copy_of(tiny_model_path, tmp_path)
    (path / "chat_template.jinja").write_text("{{ raise_exception('only questions, please') }}")
    with Engine.from_pretrained(path, compile=False) as engine:
        with pytest.raises(RequestError, match="chat template refused these messages: only questions, please"):
            engine.generate([{"role": "user", "content": "hello"}])
        assert engine.generate("one", SamplingParams(max_tokens=1)).token_ids


@pytest.mark.parametrize("fault", ["missing", "broken"])
def test_a_tokenizer_that_cannot_be_read_is_named(tiny_model_path, tmp_path, fault):
    path = copy_of(tiny_model_path, tmp_path)
    for file in path.glob("tokenizer*"):
        file.unlink()
    if fault == "broken":
        (path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"the tokenizer in .*copy cannot be loaded: "):
        Engine.from_pretrained(path, compile=False)


@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": None},
        {"head_dim": 15},
        {"hidden_size": "x"},
        {"num_hidden_layers": 0},
        {"num_attention_heads": 3},
        {"vocab_size": -3},
    ],
    ids=str,
)
def test_a_config_that_makes_no_sense_is_named(tiny_model_path, tmp_path, change):
    path = copy_of(tiny_model_path, tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=r"copy.config\.json does not describe a model: "):
        Engine.from_pretrained(path, compile=False)
