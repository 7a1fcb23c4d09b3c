"""`draftgraph inspect --vocab`."""

from __future__ import annotations

import json

import pytest
from draft_models import sentencepiece_tokenizer
from small_tokenizers import byte_level
from typer.testing import CliRunner

from draftgraph.runtime.cli import app

TEXTS = ["The steam engine changed how people worked.\n", "def add(a, b):\n    return a + b\n"] * 3


@pytest.fixture
def paths(tmp_path):
    byte_level(TEXTS).save_pretrained(tmp_path / "ours")
    sentencepiece_tokenizer(TEXTS).save_pretrained(tmp_path / "theirs")
    return str(tmp_path / "ours"), str(tmp_path / "theirs")


def run(*arguments: str):
    return CliRunner().invoke(app, ["inspect", *arguments])


def test_a_table(paths, tmp_path):
    (tmp_path / "text.txt").write_text("".join(TEXTS))
    result = run("--vocab", *paths, "--text", str(tmp_path / "text.txt"))
    assert result.exit_code == 0, result.output
    for part in ("byte-level BPE", "SentencePiece", "share of the tokens", "share of the text", "characters"):
        assert part in result.output


def test_shares_by_token_and_by_frequency(paths, tmp_path):
    (tmp_path / "text.txt").write_text("a b a b ~")
    result = run("--vocab", *paths, "--text", str(tmp_path / "text.txt"), "--json")
    report = json.loads(result.output)
    assert report["characters"] == 9
    for side in (report["target"], report["draft"]):
        assert side["shared_of_tokens"] == side["shared"] / side["tokens"]
        assert 0 < side["shared_of_tokens"] < 1
        assert 0 < side["shared_of_text"] <= 1
    assert report["target"]["name"] == paths[0]


def test_a_vocabulary_is_all_its_own(paths):
    report = json.loads(run("--vocab", paths[0], paths[0], "--json").output)
    assert report["target"]["shared_of_tokens"] == report["draft"]["shared_of_text"] == 1.0
    assert report["characters"] > 100_000, "without a text, Python's reference is counted"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name one thing to inspect"),
        (("--vocab", "no-such", "{theirs}"), "no model 'no-such'"),
        (("--vocab", "{ours}", "{theirs}", "--text", "/no/such/file"), "text must be a file of UTF-8 text"),
    ],
)
def test_bad_input(paths, arguments, message):
    result = run(*(argument.format(ours=paths[0], theirs=paths[1]) for argument in arguments))
    assert result.exit_code == 2
    assert message in result.output
