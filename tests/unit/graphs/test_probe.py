"""The probe: what it makes of a process that answers, crashes, hangs or talks nonsense, and what it keeps."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from draftgraph.graphs.probe import CHECKS, Finding, Platform, probe
from draftgraph.graphs.probe_checks import run_checks, toy_loop
from draftgraph.graphs.recording_capture import recorded_executor

PLATFORM = Platform(torch_version="2.13.0+cu130", bindings="13.4.4", driver=(13, 0), device="a GPU")
DEVICE = torch.device("cuda", 0)
ROUND = '{"check": "round", "works": true, "reason": "fine"}'
LOOP = '{"check": "loop", "works": true, "reason": "fine too"}'


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def run(code: str, cache=None, **options):
    return probe(DEVICE, cache, platform=options.pop("platform", PLATFORM), command=python(code), **options)


def say(*lines: str) -> str:
    return "".join(f"print({line!r}, flush=True)\n" for line in lines)


def test_answers_are_taken_as_they_are():
    assert run(say(ROUND, LOOP)) == {"round": Finding(True, "fine"), "loop": Finding(True, "fine too")}
    failed = '{"check": "loop", "works": false, "reason": "a small loop failed: GraphError: no"}'
    assert run(say(ROUND, failed))["loop"] == Finding(False, "a small loop failed: GraphError: no")


def test_a_crash_costs_only_what_it_kept_from_answering():
    found = run(say(ROUND) + "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert found == {"round": Finding(True, "fine"), "loop": Finding(False, "the check crashed with SIGSEGV")}
    found = run("import os; os.abort()")
    assert found["round"] == Finding(False, "the check crashed with SIGABRT")
    assert found["loop"] == Finding(False, "not tried, because the check of 'round' did not end")


def test_a_hang_is_stopped():
    found = run(say(ROUND) + "import time; time.sleep(60)", timeout=1.0)
    assert found["round"].works
    assert found["loop"] == Finding(False, "the check hung for 1 s and was stopped")


def test_an_error_and_nonsense_are_reasons():
    found = run("raise ImportError('no such module')")
    assert found["round"] == Finding(False, "the check ended with code 1 and no answer: ImportError: no such module")
    found = run(say("[]", "hello", '{"check": "round"}', LOOP))
    assert not found["round"].works
    assert found["loop"].works
    missing = probe(DEVICE, platform=PLATFORM, command=["/nonexistent/python"])
    assert "could not be started" in missing["loop"].reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"torch_version": "2.9.1"}, "needs torch 2.11 or newer, found 2.9.1"),
        ({"bindings": None}, "needs the package cuda-bindings 12.8 or newer, which is not installed"),
        ({"bindings": "12.6.2"}, "needs cuda-bindings 12.8 or newer, found 12.6.2"),
        ({"driver": None}, "needs an NVIDIA driver that cuda-bindings can load"),
    ],
)
def test_what_is_missing_is_said_without_trying(change, reason):
    import dataclasses

    found = run("raise SystemExit(1)", platform=dataclasses.replace(PLATFORM, **change))
    assert found == {name: Finding(False, reason) for name in CHECKS}


def test_an_old_driver_has_rounds_but_no_loop():
    import dataclasses

    found = run(say(ROUND, LOOP), platform=dataclasses.replace(PLATFORM, driver=(12, 2)))
    assert found["round"].works
    assert found["loop"] == Finding(False, "needs a driver for CUDA 12.4 or newer, found 12.2")


def test_the_answer_is_kept_for_the_same_platform_alone(tmp_path):
    import dataclasses

    first = run(say(ROUND, LOOP), tmp_path)
    assert run("raise SystemExit(1)", tmp_path) == first
    for change in ({"driver": (13, 1)}, {"torch_version": "2.12.0"}, {"device": "another GPU"}, {"revision": 99}):
        assert not run("raise SystemExit(1)", tmp_path, platform=dataclasses.replace(PLATFORM, **change))["loop"].works
    assert run("raise SystemExit(1)", tmp_path) == first
    assert not run("raise SystemExit(1)", tmp_path, fresh=True)["loop"].works
    assert not run(say(ROUND, LOOP), tmp_path)["loop"].works, "the newer answer replaces the older"


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"platform": 1}', None])
def test_a_damaged_answer_is_ignored(tmp_path, damage):
    run(say(ROUND, LOOP), tmp_path)
    (file,) = (tmp_path / "executors").iterdir()
    if damage is None:
        content = json.loads(file.read_text())
        content["findings"]["loop"]["works"] = "yes"
        damage = json.dumps(content)
    file.write_text(damage)
    assert run(say(ROUND, LOOP.replace("true", "false")), tmp_path)["loop"] == Finding(False, "fine too")
    assert json.loads(file.read_text())["findings"]["loop"]["works"] is False


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, caplog):
    (tmp_path / "executors").write_text("a file, not a folder")
    assert run(say(ROUND, LOOP), tmp_path)["loop"].works
    assert "cannot be kept" in caplog.text


@pytest.mark.parametrize("name", CHECKS)
def test_the_small_loop_passes_where_it_should(name):
    program, verdict = toy_loop("cpu")
    assert verdict() is not None, "the check would pass without a run"
    for _ in recorded_executor(name).rounds(program):
        pass
    assert verdict() is None


def test_checks_say_what_went_wrong():
    def check(name: str) -> str | None:
        if name == "loop":
            raise RuntimeError("no\nloop")
        return None if name == "round" else "it is odd"

    lines: list[str] = []
    run_checks(("round", "odd", "loop"), check, lines.append)
    answers = [json.loads(line) for line in lines]
    assert [a["works"] for a in answers] == [True, False, False]
    assert [a["reason"] for a in answers[1:]] == [
        "a small loop failed: it is odd",
        "a small loop failed: RuntimeError: no loop",
    ]


def test_without_cuda_the_other_process_answers_with_an_error():
    """The real command, on a machine that has no CUDA device."""
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is here")
    found = probe(DEVICE, platform=PLATFORM)
    assert not any(f.works for f in found.values())
    assert "code 1" in found["round"].reason
