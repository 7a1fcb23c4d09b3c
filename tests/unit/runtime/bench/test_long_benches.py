"""Benches that are gone on with, what is quoted of them, and those that only count."""

import dataclasses
import json

import pytest
from shipped import ship_untrained

from draftgraph.runtime import shipped_heads
from draftgraph.runtime.bench.acceptance import acceptance_options, measure_acceptance
from draftgraph.runtime.bench.journal import Journal
from draftgraph.runtime.bench.options import BenchOptions
from draftgraph.runtime.bench.prompt_sets import load_prompt_set, split_limit
from draftgraph.runtime.bench.records import Answer, Pass
from draftgraph.runtime.bench.session import Bench
from draftgraph.runtime.bench.summary import markdown
from draftgraph.runtime.bench.tables import set_rows
from draftgraph.runtime.errors import ConfigError
from draftgraph.runtime.speculative_config import SpeculativeConfig

from .conftest import ENGINE_OPTIONS, NGRAM

ANSWER = Answer(
    prompt_set="echo",
    prompt="a",
    repeat=0,
    status="ok",
    prompt_tokens=3,
    token_ids=(1, 2, 3),
    bursts=((0.5, 1), (0.75, 2)),
    latency=1.0,
    rounds=2,
    histogram=((0, 0), (1, 1)),
)
PASS = Pass(method="plain", answers=(ANSWER,), seconds=1.5)


class TestJournal:
    def test_passes_come_back_as_they_were(self, tmp_path):
        file = tmp_path / "journal"
        Journal.open(file, {"a": [1]}).keep(3, PASS)
        journal = Journal.open(file, {"a": (1,)})
        assert journal.kept(3, "plain") == PASS
        assert journal.kept(2, "plain") is None
        assert journal.kept(3, "other") is None

    def test_a_line_that_was_cut_off_is_dropped(self, tmp_path):
        file = tmp_path / "journal"
        journal = Journal.open(file, {})
        journal.keep(0, PASS)
        whole = file.read_text()
        journal.keep(1, PASS)
        file.write_text(file.read_text()[:-9])
        journal = Journal.open(file, {})
        assert journal.kept(1, "plain") is None
        assert file.read_text() == whole
        journal.keep(1, PASS)
        assert Journal.open(file, {}).kept(1, "plain") == PASS

    def test_failed_answers_are_tried_anew(self, tmp_path):
        failed = dataclasses.replace(ANSWER, status="failed", error="no memory")
        Journal.open(tmp_path / "journal", {}).keep(0, dataclasses.replace(PASS, answers=(ANSWER, failed)))
        assert Journal.open(tmp_path / "journal", {}).kept(0, "plain") is None

    def test_another_bench_is_refused(self, tmp_path):
        Journal.open(tmp_path / "journal", {"max_tokens": 8, "seed": 0})
        with pytest.raises(ConfigError, match="keeps another bench: max_tokens was 8 and is 9"):
            Journal.open(tmp_path / "journal", {"max_tokens": 9, "seed": 0})

    @pytest.mark.parametrize("text", ["hello\n", "[]\n", '{"schema": "other"}\n', "{}\n"])
    def test_another_file_is_refused_and_stays(self, tmp_path, text):
        (tmp_path / "file").write_text(text)
        with pytest.raises(ConfigError, match="is not what a bench keeps"):
            Journal.open(tmp_path / "file", {})
        assert (tmp_path / "file").read_text() == text


class TestNumberOfPrompts:
    def test_a_set_says_how_many(self):
        assert split_limit("humaneval:40") == ("humaneval", 40)
        cases = load_prompt_set("echo:2", 1, lambda *_: None)
        assert len(cases) == 2
        assert {case.prompt_set for case in cases} == {"echo"}
        assert len(load_prompt_set("echo", 1, lambda *_: None)) == 1

    def test_a_file_may_be_called_so(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "mine.jsonl:2").write_text("")
        assert split_limit("mine.jsonl:2") == ("mine.jsonl:2", None)

    @pytest.mark.parametrize(
        ("sets", "message"),
        [
            (("echo:0",), "must be at least 1"),
            (("echo", "echo:2"), "two prompt sets are called 'echo'"),
            (("ecko:2",), "no prompt set 'ecko'"),
        ],
    )
    def test_bad_names(self, sets, message):
        with pytest.raises(ConfigError, match=message):
            BenchOptions(prompt_sets=sets)


@pytest.fixture(scope="module")
def heads(tiny_model_path, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shipped_heads, "HEADS_DIRECTORY", tmp_path_factory.mktemp("heads"))
        ship_untrained(tiny_model_path, tmp_path_factory.mktemp("trained"))
        yield


def prepare(path, make=BenchOptions, **options):
    settings = {"speculative": (NGRAM,), "prompt_sets": ("echo:2", "chat:1"), "max_tokens": 6, "repeats": 1}
    return Bench.prepare(str(path), make(**{**settings, **options}), ENGINE_OPTIONS, lambda *_: None)


def test_an_interrupted_bench_goes_on(tiny_model_path, known_device, tmp_path):
    ready, file = prepare(tiny_model_path, peers=("transformers",)), tmp_path / "journal"

    def stop(done, total, phase):
        if (phase, done) == ("measuring", 5):
            raise KeyboardInterrupt

    first = ready.run(stop, journal_file=file)
    assert first.partial
    kept = file.read_text()
    second = ready.run(lambda *_: None, journal_file=file)
    assert not second.partial
    assert file.read_text().startswith(kept)
    # 3 prompts for each of plain, ngram, transformers plain and transformers lookup.
    assert len(file.read_text().splitlines()) == 1 + 3 * 4
    for before, after in zip(first.methods, second.methods, strict=True):
        assert after.answers[: len(before.answers)] == before.answers
        assert after.overall.answers == 3
    quoted = markdown(second)
    lines = [line for line in quoted.splitlines() if line.startswith("|")]
    assert lines[0].startswith("| echo, 2 prompts | tokens/s | against plain | against transformers plain | tokens per")
    for prefix in ("| plain |", f"| {second.methods[1].method.name} |", "| transformers plain |"):
        assert sum(line.startswith(prefix) for line in lines) == 2, "one row in each of two tables"
    plain, ngram, peer = (one.by_set["echo"] for one in second.methods[:3])
    row = next(line for line in lines if line.startswith("| ngram"))
    cells = [cell.strip() for cell in row.split("|")]
    assert cells[3] == f"{ngram.tokens_per_second / plain.tokens_per_second:.2f} x"
    assert cells[4] == f"{ngram.tokens_per_second / peer.tokens_per_second:.2f} x"
    assert cells[5] == f"{ngram.tokens_per_round:.2f}"
    assert cells[7] == "yes, all 2"
    assert peer.speed_up_against_peer == pytest.approx(1.0)
    rows = dict(set_rows(second.methods))
    assert rows["echo: speed-up against the plain peer"][2] == "1.00 x"
    assert "chat: accepted at 1, 2, ..." in rows
    with pytest.raises(ConfigError, match="max_tokens was 6 and is 7"):
        prepare(tiny_model_path, peers=("transformers",), max_tokens=7).run(lambda *_: None, journal_file=file)


def test_counting_alone(tiny_model_path, heads):
    configs = (NGRAM, SpeculativeConfig(method="eagle3"))
    ready = prepare(tiny_model_path, acceptance_options, speculative=configs)
    report = measure_acceptance(ready, lambda *_: None)
    document = json.loads(json.dumps(report.to_dict()))
    assert document["schema"] == "draftgraph-acceptance"
    ngram, eagle3 = document["methods"]
    assert eagle3["config"]["method"] == "eagle3"
    for one, depth in ((ngram, 4), (eagle3, 3)):
        assert [figures["answers"] for figures in one["by_set"].values()] == [2, 1]
        for figures in one["by_set"].values():
            assert 1.0 <= figures["tokens_per_round"] <= depth + 1
            assert len(figures["acceptance_by_position"]) <= depth
            assert "tokens_per_second" not in figures
    # What is not timed is not cut off, unless the user says when.
    assert document["settings"]["timeout"] >= 24 * 3600
    assert acceptance_options(timeout=5.0).timeout == 5.0
    # Greedy texts are those of one prompt at a time.
    alone = measure_acceptance(prepare(tiny_model_path, acceptance_options, concurrency=1), lambda *_: None)
    texts = [{answer.key: answer.token_ids for answer in one.methods[0].answers} for one in (report, alone)]
    assert texts[0] == texts[1]
