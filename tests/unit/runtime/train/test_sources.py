import gzip
import json
import re
from pathlib import Path

import pytest

from draftgraph.model_zoo.training.examples import Example
from draftgraph.runtime.bench import prompt_sets
from draftgraph.runtime.bench.records import Case
from draftgraph.runtime.errors import ConfigError
from draftgraph.runtime.train import entries, held_out
from draftgraph.runtime.train.entries import check_data_name, self_made_count
from draftgraph.runtime.train.held_out import held_out_texts
from draftgraph.runtime.train.sources import load_examples, load_prompts

LENGTH = 64


def silent(done, total, what):
    pass


def lines(tmp_path, *values):
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in values) + "\n")
    return str(file)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def prompts(data, target, length=LENGTH):
    return load_prompts(str(data), target, length, silent)


def examples(data, target, length=LENGTH):
    return load_examples(str(data), target, length, silent)


def test_text_is_cut_into_pieces(tmp_path, target):
    text = "def add(a, b):\n    return a + b\n" * 40
    (tmp_path / "a.txt").write_text(text, newline="")
    found = examples(tmp_path / "a.txt", target)
    whole = target.encode_text(text)
    assert [len(e.tokens) for e in found.items[:-1]] == [LENGTH] * (len(found.items) - 1)
    assert found.items[0] == Example.of_text(whole[:LENGTH])
    asked = prompts(tmp_path / "a.txt", target)
    assert asked.items[0] == tuple(whole[: LENGTH // 2])
    assert found.duplicates + len(found.items) == -(-len(whole) // LENGTH)


def test_long_text_is_encoded_in_portions(tmp_path, target, monkeypatch):
    from draftgraph.runtime.train import sources

    text = "one two three\n你好，世界。 repeat" * 20 + "x" * 300
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    monkeypatch.setattr(sources, "_PORTION", 50)
    assert "".join(sources._portions(text)) == text
    assert max(map(len, sources._portions(text))) == 50
    pieces = examples(tmp_path / "a.txt", target, 10_000).items
    assert target.tokenizer.decode(pieces[0].tokens) == text


def test_a_directory_of_texts(tmp_path, target):
    (tmp_path / "inner").mkdir()
    for name, text in (("b.txt", "two two"), ("inner/a.txt", "one one"), ("c.md", "none"), ("d.txt", " \n")):
        (tmp_path / name).write_text(text)
    texts = [target.tokenizer.decode(e.tokens) for e in examples(tmp_path, target).items]
    assert texts == ["two two", "one one"]


def test_prompts_of_a_file(tmp_path, target):
    file = lines(
        tmp_path,
        {"prompt": "one\u2028two"},
        "",
        {"messages": [user("three")]},
        {"messages": [user("three"), assistant("x"), user("y")]},
        {"prompt_ids": [5, 6, 7], "token_ids": [8]},
        {"prompt": "one\u2028two"},
        {"prompt": "long " * 100},
    )
    found = prompts(file, target)
    assert found.items == (
        target.encode_prompt([user("one\u2028two")]),
        target.encode_prompt([user("three")]),
        (5, 6, 7),
    )
    assert (found.duplicates, found.too_long, found.cut) == (2, 1, 0)
    assert found.summary() == "3 used, 2 duplicates dropped, 1 dropped as too long"


def test_prompts_are_text_for_a_target_without_a_template(tmp_path, target):
    target.tokenizer.chat_template = None
    assert prompts(lines(tmp_path, {"prompt": "one two"}), target).items == (tuple(target.encode_text("one two")),)


def test_answered_lines(tmp_path, target):
    answer = target.encode_text("one two")
    file = lines(
        tmp_path,
        {"settings": {"target": "x"}},
        {"prompt": "a", "answer": "one two", "finish": "stop", "token_ids": answer},
        {"prompt": "b", "answer": "one two", "finish": "stop", "token_ids": [*answer, 0]},
        {"prompt": "c", "answer": "one two", "finish": "length", "token_ids": answer},
        {"prompt": "d", "answer": "one two"},
        {"messages": [user("e")], "answer": "one two"},
        {"messages": [user("f"), assistant("one two")]},
        {"number": 3, "prompt_ids": [5, 6], "answer": "one two", "finish": "length", "token_ids": answer},
        {"number": 4, "prompt_ids": [5, 6], "answer": "", "finish": "error", "token_ids": []},
    )
    found = examples(file, target).items
    closed = (*answer, 0)
    expected = [(prompt, closed) for prompt in "abcdef"]
    expected[2] = ("c", answer)
    assert found == (
        *(Example.answered(target.encode_prompt([user(prompt)]), ids) for prompt, ids in expected),
        Example.answered((5, 6), answer),
    )


def test_long_answers_are_cut_and_long_prompts_dropped(tmp_path, target):
    short, long = {"prompt": "a", "answer": "b"}, {"prompt": "a", "answer": "one two " * 30}
    found = examples(lines(tmp_path, short, long, {**long, "prompt": "x " * 80}, long), target)
    assert [len(e.tokens) for e in found.items] == [len(target.answered([user("a")], "b").tokens), LENGTH]
    assert found.summary() == "2 used, 1 duplicates dropped, 1 dropped as too long, 1 cut to max_length"


def test_empty_answers_are_dropped(tmp_path, target):
    full, blank = {"prompt": "a", "answer": "b"}, {"prompt": "c", "answer": " \n"}
    turns = {"messages": [user("d"), assistant(""), user("e"), assistant("f")]}
    nothing = {"messages": [user("d"), assistant(" ")]}
    as_text = {"prompt_ids": [5, 6], "answer": ""}
    found = examples(lines(tmp_path, full, blank, turns, nothing, as_text), target)
    assert found.summary() == "2 used, 3 dropped as their answers are empty"
    assert found.items[0] == target.answered([user("a")], "b")
    (span,) = found.items[1].answer  # the empty turn is context
    assert target.tokenizer.decode(found.items[1].tokens[slice(*span)]).startswith("f")
    with pytest.raises(ConfigError, match="no usable text: the answers of 2 of its 2 entries are empty"):
        examples(lines(tmp_path, blank, nothing), target)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[" * 100_000, r"line 2 of '.*data.jsonl' is not JSON: its lists and objects lie too deep"),
        ("{", r"line 2 of '.*data.jsonl' is not JSON: "),
        ([1], r"line 2 of .* is not a JSON object, but \[1\]; a line holds one of 'prompt'"),
        ({"text": "x"}, "line 2 of .* holds 'text'; a line holds one of 'prompt', a text, 'messages'"),
        ({}, "line 2 of .* holds nothing; a line holds"),
        ({"prompt": "x", "messages": []}, "holds 'prompt', 'messages'; a line holds one of"),
        ({"prompt": " "}, "line 2 of .*: 'prompt' must be a text that is not empty, got \" \""),
        ({"messages": [{"role": "user"}]}, "'messages' must be a list of objects with the texts 'role' and 'content'"),
        ({"prompt": "x", "answer": 3}, "'answer' must be a text, got 3"),
        ({"prompt": "x", "token_ids": []}, r"'token_ids' must be a list of token ids that is not empty, got \[\]"),
        ({"prompt_ids": [1, -1]}, r"'prompt_ids' must be a list of token ids that is not empty, got \[1, -1\]"),
        ({"prompt": "x", "token_ids": [1], "finish": "end"}, "'finish' must be 'stop' or 'length', got \"end\""),
        ({"prompt": "x"}, r"line 2 of .*: there is a prompt and no answer: let the target answer it \(--regenerate\)"),
        ({"prompt": "x", "token_ids": [5000]}, r"holds 5000, but the target's vocabulary has \d+ tokens: another"),
        ({"prompt": "x", "answer": "yes", "token_ids": [70, 71]}, "another target answered this; answer it anew"),
        (
            {"prompt_ids": [5000], "token_ids": [1]},
            "line 2 of .*: token id 5000 at position 0 of the prompt is outside",
        ),
        ({"messages": [assistant("x")]}, "a turn of the assistant, after one of the user"),
        ({"messages": [user("x"), assistant("y")], "token_ids": [1]}, "must hold no turn of the assistant"),
        ({"prompt": "\ud800", "answer": "x"}, r"line 2 of .*: the prompt is not valid text"),
    ],
)
def test_lines_that_are_refused(tmp_path, target, line, message):
    file = tmp_path / "data.jsonl"
    file.write_text("\n" + (line if isinstance(line, str) else json.dumps(line)))
    with pytest.raises(ConfigError, match=message):
        examples(file, target)


def test_prompts_that_are_refused(tmp_path, target):
    with pytest.raises(ConfigError, match=r"line 1 of .* begins with a turn of the assistant"):
        prompts(lines(tmp_path, {"messages": [assistant("x"), user("y")]}), target)


@pytest.mark.parametrize("text", ["", "\n \n", "{}"])
def test_data_without_text(tmp_path, target, text):
    file = tmp_path / ("a.jsonl" if text == "" else "a.txt")
    file.write_text(text if text != "{}" else "x")
    message = "holds no usable text: \\d entries.* found; data is a .txt file or a directory of them, a .jsonl or"
    with pytest.raises(ConfigError, match=message):
        examples(file, target)


def test_data_that_is_too_long_as_a_whole(tmp_path, target):
    file = lines(tmp_path, {"prompt": "x " * 80}, {"prompt": "y " * 80})
    with pytest.raises(
        ConfigError, match=re.escape("all 2 prompts of") + ".* a max_length of 64 tokens leaves no room"
    ):
        prompts(file, target)
    with pytest.raises(ConfigError, match="max_length must be at least 2, got 1"):
        prompts(file, target, 1)


def test_names_that_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "empty").mkdir()
    for data, message in (
        ("nowhere.txt", "there is no data 'nowhere.txt': data is a .txt file"),
        (str(tmp_path / "a.csv"), "is neither a .txt nor a .jsonl file; data is"),
        (str(tmp_path / "empty"), "holds no .txt file; data is .*echo, chat, code, humaneval"),
        ("mtbench", "the prompt set 'mtbench' is held out: what is trained here is measured on all of it"),
        ("mtbench:3", "the prompt set 'mtbench' is held out"),
        ("humaneval:0", "the number of prompts in 'humaneval:0' must be at least 1"),
        ("humanevil:3", "there is no data 'humanevil:3': data is .*NAME:COUNT of a prompt set .*humaneval"),
        ("self:", "self:COUNT needs how many prompts"),
        ("self:0", "got 'self:0'"),
        ("self", "got 'self'"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_data_name(data)


def test_prompts_that_the_target_makes_up_are_not_read(target):
    assert self_made_count("self:2000") == 2000
    assert self_made_count("selfish.txt") is None
    check_data_name("self:3")
    with pytest.raises(ConfigError, match="made up by the target, which must answer them: --regenerate"):
        examples("self:3", target)


def test_compressed_lines(tmp_path, target):
    plain = lines(tmp_path, {"prompt": "one", "answer": "two"})
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(Path(plain).read_bytes()))
    assert examples(packed, target).items == examples(plain, target).items
    for content in (b"plain", packed.read_bytes()[:-12]):
        packed.write_bytes(content)
        with pytest.raises(ConfigError, match=r"packed.jsonl.gz' cannot be read: "):
            examples(packed, target)


def test_files_that_are_not_text(tmp_path, target):
    (tmp_path / "a.txt").write_bytes(b"abc\xff")
    with pytest.raises(ConfigError, match=r"a.txt' is not UTF-8 text: byte 0xff at position 3"):
        examples(tmp_path / "a.txt", target)


def test_prompt_sets(target, monkeypatch):
    assert prompts("chat:2", target, 1000).items == prompts("chat", target, 1000).items[:2]
    assert prompts("chat", target, 1000).items[0] == target.encode_prompt(
        prompt_sets.load_prompt_set("chat", 1, silent)[0].prompt
    )
    published = [Case(prompt_set="humaneval", name=f"HumanEval/{n}", prompt=f"def f{n}():") for n in range(164)]
    chats = [Case(prompt_set="mtbench", name=str(n), prompt=[user(f"question {n}")]) for n in range(80)]
    sets = {"humaneval": published, "mtbench": chats}

    def load(name, limit, progress):
        return tuple(sets[name][:limit])

    monkeypatch.setattr(entries, "load_prompt_set", load)
    monkeypatch.setattr(held_out, "load_prompt_set", load)
    asked = prompts("humaneval", target).items
    assert asked == tuple(tuple(target.encode_text(f"def f{n}():")) for n in range(40, 164))
    assert prompts("humaneval:50", target).items == asked[:50]
    assert prompts("humaneval:999", target).items == asked
    texts = held_out_texts(silent)
    assert len(texts) == 120
    assert texts[0] == "def f0():"
    assert texts[39:41] == ("def f39():", "question 0")
