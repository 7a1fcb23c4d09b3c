import json
import resource

import pytest

from draftgraph.runtime.errors import ConfigError
from draftgraph.runtime.train.journal import Journal

SETTINGS = {"target": "a", "openings": ("x", "y"), "seed": 1}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "out" / "answers.jsonl"


def reopen(file, settings=SETTINGS):
    with Journal(file, "answers", settings) as journal:
        return journal.entries


@pytest.fixture
def two(file):
    with Journal(file, "answers", SETTINGS) as journal:
        journal.add([{"n": 1, "text": "ä\ud800"}])
        journal.add([{"n": 2}])
    return file


def test_entries_are_lines_behind_the_settings(two):
    first, *rest = two.read_text().splitlines()
    assert json.loads(first) == {"settings": {**SETTINGS, "openings": ["x", "y"]}}
    assert [json.loads(line)["n"] for line in rest] == [1, 2]
    assert [entry["n"] for entry in reopen(two)] == [1, 2]


def test_a_kill_at_any_byte_loses_the_last_entry_at_most(two):
    data = two.read_bytes()
    ends = [place + 1 for place, byte in enumerate(data) if byte == ord("\n")]
    for length in range(len(data) + 1):
        two.write_bytes(data[:length])
        whole = max(0, sum(end <= length for end in ends) - 1)
        with Journal(two, "answers", SETTINGS) as journal:
            assert len(journal.entries) == whole
            journal.add([{"n": 3}])
        assert [entry["n"] for entry in reopen(two)] == [*[1, 2][:whole], 3]


def test_other_settings_are_named(two):
    with pytest.raises(
        ConfigError, match=r'other settings \(seed is 1 there and 2 now; target is "a" there and "b" now\)'
    ):
        reopen(two, {**SETTINGS, "seed": 2, "target": "b"})
    with pytest.raises(ConfigError, match="top_k is null there and 5 now"):
        reopen(two, {**SETTINGS, "top_k": 5})
    assert len(reopen(two)) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("my notes", "does not begin with the settings that its answers were made by"),
        ('{"prompt": "x"}\n', "does not begin with the settings"),
        ('{"settings": 1}\n', "does not begin with the settings"),
        ("not json\n", r"line 1 of .* is damaged"),
        ('{"settings": {}}\n[1]\n', "line 2 of .* is not a JSON object"),
    ],
)
def test_files_that_are_refused_are_left_as_they_are(file, text, message):
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        reopen(file)
    assert file.read_text() == text


def test_one_process_at_a_time(two):
    opened = Journal(two, "answers", SETTINGS)
    with pytest.raises(ConfigError, match="another process is writing the answers"):
        reopen(two)
    opened.close()
    assert len(reopen(two)) == 2


def test_places_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        reopen(tmp_path / "file" / "answers.jsonl")
    with pytest.raises(ConfigError, match="is a directory"):
        reopen(tmp_path)


def test_a_full_disk(two):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = two.read_bytes()
    with Journal(two, "answers", SETTINGS) as journal:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))
        try:
            with pytest.raises(ConfigError, match=r"could not be written to .*; what was written before is kept"):
                journal.add([{"text": "x" * 100}])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert two.read_bytes() == before
    assert len(reopen(two)) == 2
