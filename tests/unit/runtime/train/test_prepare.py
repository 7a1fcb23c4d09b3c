import functools
import json

import pytest

from draftgraph import Engine
from draftgraph.runtime.errors import ConfigError, RequestError
from draftgraph.runtime.train import prepare
from draftgraph.runtime.train.prepare import DataOptions, prepare_examples
from draftgraph.runtime.train.self_made import SelfMadeSettings
from draftgraph.runtime.train.target_text import TargetText


@pytest.fixture
def data(tmp_path):
    file = tmp_path / "data.jsonl"
    lines = [{"prompt": text, "answer": "one two three"} for text in ("a b", "one two", "def add", "a b", "x " * 60)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return str(file)


@pytest.fixture
def run(tiny_model_path, tmp_path):
    """Prepares examples; gives what was said, too, and how often an engine was opened."""

    def prepared(options):
        said, opened = [], []

        def open_engine():
            sizes = {"max_batch_size": 8, "batch_buckets": [8], "max_model_len": 256}
            opened.append(Engine.from_pretrained(tiny_model_path, dtype="float32", compile=False, **sizes))
            return opened[-1]

        out = tmp_path / "out"
        found = prepare_examples(options, tiny_model_path, out, open_engine, dtype="float32", say=said.append)
        assert all(engine._closed for engine in opened)
        return found, said, len(opened)

    return prepared


def test_data_that_is_answered(run, data):
    examples, said, opened = run(DataOptions(data=data, max_length=64))
    assert (len(examples), opened) == (3, 0)
    assert said == ["examples: 3 used, 1 duplicates dropped, 1 dropped as too long"]


def test_the_target_answers(run, data):
    options = DataOptions(data=data, max_length=64, regenerate=True, max_tokens=5)
    examples, said, opened = run(options)
    assert opened == 1
    assert said[0] == "prompts: 3 used, 1 duplicates dropped, 1 dropped as too long"
    assert said[1].startswith("answers: 3, ")
    assert all(len(e.answer_tokens()) <= 5 for e in examples)
    assert run(options)[::2] == (examples, 0)


def test_the_target_makes_up_prompts_and_answers_them(run, tmp_path, monkeypatch):
    few = functools.partial(SelfMadeSettings, openings=("",), samples=16, max_tokens=30, temperature=2.0)
    monkeypatch.setattr(prepare, "SelfMadeSettings", few)
    options = DataOptions(data="self:2", max_length=256, regenerate=True, max_tokens=5, seed=1)
    examples, said, opened = run(options)
    assert (len(examples), opened) == (2, 1)
    assert said[0] == "prompts: 2 of 2 made up by the target used"
    assert sorted(file.name for file in (tmp_path / "out").glob("*.jsonl")) == ["answers.jsonl", "prompts.jsonl"]
    assert run(options)[::2] == (examples, 0)


def test_held_out_text_is_dropped(run, data, monkeypatch):
    options = DataOptions(data=data, max_length=64, drop_held_out=True)
    monkeypatch.setattr(prepare, "held_out_texts", lambda progress: ("def ADD",))
    examples, said, _ = run(options)
    assert len(examples) == 2
    assert said[-1] == "examples that share text with held-out prompts: 1 dropped"
    monkeypatch.setattr(prepare, "held_out_texts", lambda progress: ("one two three",))
    with pytest.raises(ConfigError, match="share text with held-out prompts: none is left"):
        run(options)


def test_options_that_are_refused(data):
    for options, error, message in (
        ({"data": "nowhere"}, ConfigError, "there is no data 'nowhere'"),
        ({"data": "self:4"}, ConfigError, "must be answered by the target, too: add --regenerate"),
        ({"data": data, "max_length": 1}, ConfigError, "max_length must be at least 2"),
        ({"data": data, "temperature": -1.0}, RequestError, "temperature must be"),
        ({"data": data, "seed": -1}, ConfigError, "seed must be from 0"),
    ):
        with pytest.raises(error, match=message):
            DataOptions(**options)


def test_a_target_without_a_template_is_refused_before_it_is_loaded(run, plain_target, monkeypatch):
    monkeypatch.setattr(plain_target.tokenizer, "chat_template", None)
    monkeypatch.setattr(TargetText, "of_directory", lambda path: plain_target)
    with pytest.raises(ConfigError, match="only by a target with a chat template"):
        run(DataOptions(data="self:4", regenerate=True))
