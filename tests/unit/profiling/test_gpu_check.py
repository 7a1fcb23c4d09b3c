"""The device check runs on a machine without a GPU too, smaller, and keeps what it has when it is cut short."""

from __future__ import annotations

import json
import time

import pytest
import torch

from draftgraph.profiling import gpu_check
from draftgraph.profiling.checks import page
from draftgraph.profiling.checks.identity import Identity, compare_tokens
from draftgraph.profiling.checks.loop_costs import CountdownLoop


def run(tmp_path, *arguments):
    status = gpu_check.main([str(tmp_path / "out"), "--device", "cpu", *arguments])
    report = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    return status, report, (tmp_path / "out" / "gpu_check.md").read_text()


def test_the_sections_that_need_no_gpu(tmp_path, capsys):
    names = ["environment", "identity", "loops", "decoding", "ops"]
    status, report, text = run(tmp_path, *(word for name in names for word in ("--only", name)))
    assert status == 0, report
    sections = report["sections"]
    assert list(sections) == names
    assert report["left_out"] == []
    rows = sections["identity"]["rows"]
    assert {row["executor"] for row in rows} >= {"host"}
    assert {row["method"] for row in rows} >= {"none", "ngram"}
    assert all(row["passed"] and row["tokens"] == 128 for row in rows)
    speeds = {row["method"]: row for row in sections["decoding"]["rows"] if row["executor"] == "host"}
    assert speeds["ngram"]["rounds"] < speeds["none"]["rounds"] == 32
    assert "| tiny | ngram | coupled | sampled |" in text
    assert "identity: ok" in capsys.readouterr().out


def test_a_section_that_fails_is_shown_and_the_others_run(tmp_path, monkeypatch):
    def fails(check, section):
        section.rows.append({"what": "before", "passed": True})
        raise ValueError("a | in\nthe message")

    monkeypatch.setitem(gpu_check.SECTIONS, "environment", fails)
    status, report, text = run(tmp_path, "--only", "environment", "--only", "ops")
    assert status == 1
    assert report["sections"]["environment"]["rows"] == [{"what": "before", "passed": True}]
    assert report["sections"]["ops"]["error"] == ""
    assert "| environment | ValueError: a \\| in the message |" in text


def test_what_there_was_no_time_for_is_named(tmp_path):
    status, report, text = run(tmp_path, "--minutes", "1e-9")
    assert status == 1
    assert report["left_out"] == list(gpu_check.SECTIONS)
    assert "| identity | left out: no time was left |" in text


def test_a_section_stops_when_the_time_is_up(tmp_path):
    check = gpu_check.Check(torch.device("cpu"), ("host",), time.monotonic() - 1, small=True)
    section = gpu_check.Section()
    gpu_check.identity(check, section)
    assert len(section.rows) == 1
    assert section.error == "no time was left for the rest"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "0"], "--minutes must be positive, got 0.0"),
        (["--device", "tpu"], "--device must be cuda or cpu, got 'tpu'"),
        (["--only", "speed"], "invalid choice: 'speed'"),
    ],
)
def test_bad_arguments(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        gpu_check.main([str(tmp_path / "out"), *arguments])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("wanted", "got", "equal"),
    [
        ([[1, 2, 3]], [[1, 2, 3]], 3),
        ([[1, 2, 3]], [[1, 9, 3]], 1),
        ([[1, 2, 3]], [[1, 2]], 2),
        ([[1, 2, 3]], [[1, 2, 3, 4]], 2),
        ([[1, 2], [5]], [[1, 2], [6]], 2),
    ],
)
def test_comparing_tokens(wanted, got, equal):
    total = sum(map(len, wanted))
    assert compare_tokens(wanted, got) == (total, equal)
    assert Identity("tiny", "none", "standard", "greedy", "host", total, equal).passed is (total == equal)


def test_an_executor_that_leaves_the_loop_early_is_noticed():
    class Leaves:
        name = "leaves"

        def rounds(self, program):
            yield

    loop = CountdownLoop.build(torch.device("cpu"), kernels=1, branches=2)
    with pytest.raises(RuntimeError, match="executor 'leaves' left the loop with 5 of 5 rounds to go"):
        loop.run(Leaves(), 5)


def test_tables_escape_and_round():
    assert page.table(["a", "b"], [[1.23456, "x|y"], [12345.6, True]]) == (
        "| a | b |\n| --- | --- |\n| 1.23 | x\\|y |\n| 12346 | True |"
    )
