"""The device check runs on a machine without a GPU too, smaller, and keeps what it has when it is cut short."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time

import pytest
import torch

from draftgraph.profiling import gpu_check
from draftgraph.profiling.checks import page
from draftgraph.profiling.checks.identity import RULES, SAMPLING, Identity, checked_methods, compare_tokens
from draftgraph.profiling.checks.loop_costs import CountdownLoop
from draftgraph.profiling.checks.random_models import RECORDED


def run(tmp_path, *arguments):
    status = gpu_check.main([str(tmp_path / "out"), "--device", "cpu", *arguments])
    report = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    return status, report, (tmp_path / "out" / "gpu_check.md").read_text()


@pytest.mark.slow
def test_the_sections_that_need_no_gpu(tmp_path, capsys):
    names = ["environment", "identity", "loops", "decoding", "ops"]
    status, report, text = run(tmp_path, *(word for name in names for word in ("--only", name)))
    assert status == 0, report
    sections = report["sections"]
    assert list(sections) == names
    assert report["left_out"] == []
    rows = sections["identity"]["rows"]
    combinations = {(row["method"], row["rule"], row["sampling"], row["executor"]) for row in rows}
    assert combinations == set(itertools.product(checked_methods(), RULES, SAMPLING, ["host", *RECORDED]))
    assert {"none", "ngram", "draft_model", "eagle3", "mtp", "dspark", "layerskip", "custom"} <= set(checked_methods())
    assert all(row["passed"] and row["tokens"] == 40 for row in rows)
    speeds = {(row["method"], row["executor"]): row for row in sections["decoding"]["rows"]}
    assert {executor for _, executor in speeds} == {"host", *RECORDED}
    for executor in ("host", *RECORDED):
        assert speeds["ngram", executor]["rounds"] < speeds["none", executor]["rounds"] == 32
        assert speeds["none", executor]["host_microseconds_per_token"] > 0
        captured = [speeds["none", executor][name] for name in ("graphs", "graph_nodes", "capture_seconds")]
        assert all(captured) if executor in RECORDED else captured == [0, 0, 0.0]
    assert "| tiny | ngram | coupled | sampled |" in text
    assert "identity: passed" in capsys.readouterr().out


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


def test_a_section_that_hangs_ends_with_the_time_limit(tmp_path):
    code = """
import sys, time
from draftgraph.profiling import gpu_check
def hangs(check, section):
    section.rows.append({"what": "before"})
    time.sleep(300)
gpu_check.GRACE_SECONDS = 0.5
gpu_check.SECTIONS["ops"] = hangs
gpu_check.main([sys.argv[1], "--device", "cpu", "--minutes", "0.01", "--only", "ops", "--only", "loops"])
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "ops: stopped at the limit of 0.01 minutes" in done.stdout
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert report["sections"]["ops"]["rows"] == [{"what": "before"}]
    assert report["sections"]["ops"]["error"] == "stopped at the limit of 0.01 minutes"
    assert report["left_out"] == ["loops"]


def test_it_needs_no_more_than_torch_and_transformers(tmp_path):
    code = """
import os, sys
others = "accelerate cuda gguf hypothesis nvtx platformdirs pytest pytest_benchmark scipy"
sys.modules.update(dict.fromkeys(others.split()))
del os.environ["DRAFTGRAPH_CACHE"]
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in others.split() else find(name, *rest)
from draftgraph.profiling import gpu_check
names = [word for name in ("environment", "gpu tests", "decoding") for word in ("--only", name)]
sys.exit(gpu_check.main([sys.argv[1], "--device", "cpu", *names]))
"""
    environment = {**os.environ, "DRAFTGRAPH_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gpu tests: left out: not installed are pytest, pytest_benchmark" in done.stdout
    assert "decoding: passed" in done.stdout


def test_a_speed_that_cannot_be_measured_leaves_the_others(monkeypatch):
    def fails(shape, model, method, drafts, executor, *rest):
        if (method, executor) == ("none", "host"):
            raise RuntimeError("out of memory")
        return Identity(shape, method, "standard", "greedy", executor, 1, 1)

    monkeypatch.setattr("draftgraph.profiling.checks.decoding.decoding_speed", fails)
    check = gpu_check.Check(torch.device("cpu"), ("host",), time.monotonic() + 60, small=True)
    section = gpu_check.Section()
    gpu_check.decoding(check, section)
    assert section.rows[0] == {
        "shape": "tiny",
        "method": "none",
        "drafts": 0,
        "executor": "host",
        "passed": False,
        "error": "RuntimeError: out of memory",
    }
    assert len(section.rows) == 6
    assert all(row["passed"] for row in section.rows[1:])
    assert "| RuntimeError: out of memory |" in page.render(
        {"device": "x", "version": "1", "date": "d", "left_out": [], "sections": {"decoding": section.to_dict()}}
    )


def test_the_test_tier_is_left_out_without_pytest(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pytest" else find(name))
    section = gpu_check.Section()
    gpu_check.gpu_tests(gpu_check.Check(torch.device("cpu"), ("host",), time.monotonic() + 60, small=True), section)
    assert section.error == ""
    assert page.state(section.to_dict()) == ("left out: not installed are pytest (pip install pytest pytest-benchmark)")


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


def test_a_folder_that_takes_no_files_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        gpu_check.main([str(tmp_path / "file" / "out"), "--device", "cpu"])
    assert "takes no files: Not a directory" in capsys.readouterr().err


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
