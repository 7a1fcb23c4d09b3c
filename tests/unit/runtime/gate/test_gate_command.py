import json
import math
import re
from contextlib import contextmanager
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from draftgraph.profiling.baseline import Baseline, Measure
from draftgraph.profiling.gate import Limits, Verdict
from draftgraph.profiling.interleaved import Contender
from draftgraph.runtime import cli
from draftgraph.runtime.gate import run
from draftgraph.runtime.gate.ratios import Comparison, Group

COUNTS = {"step: kernels": 3, "answer: rounds": 22}
DEVICE = "A processor, 2 cores"


class Scripted:
    """A group whose measurements are given: each is the subject's time; the reference's is 1 ms."""

    def __init__(self, *subjects, reference=1e-3):
        self.subjects, self.reference, self.measured = list(subjects), reference, 0

    @contextmanager
    def source(self):
        contest = {name: Contender(run=lambda: None) for name in ("accept", "yardstick")}
        comparison = Comparison("accept", "yardstick", Limits(least=0.10, most=0.15))
        yield ScriptedGroup(contest, (comparison,), ("yardstick",), 1, 1, self)


class ScriptedGroup(Group):
    def __init__(self, *fields):
        super().__init__(*fields[:-1])
        object.__setattr__(self, "script", fields[-1])

    def measure(self):
        from draftgraph.profiling.interleaved import Times

        script = self.script
        subject = script.subjects[min(script.measured, len(script.subjects) - 1)]
        script.measured += 1
        return Times({"accept": (subject,), "yardstick": (script.reference,)})


@pytest.fixture
def machine(monkeypatch):
    """A device of a given name that counts `COUNTS`; the test scripts what is timed."""
    monkeypatch.setattr(run, "current_device", lambda: DEVICE)
    monkeypatch.setattr(run, "_COUNTS", (("all", lambda: dict(COUNTS)),))

    run_gate = run.run_gate

    def check(path, *subjects, reference=1e-3, quick=False):
        script = Scripted(*subjects, reference=reference)
        report = run_gate(path, quick=quick, progress=lambda *_: None, groups=(script.source,))
        return report, script

    return check


def save(path, **changes):
    content = {
        "device": DEVICE,
        "made_with": run.versions(),
        "counts": COUNTS,
        "ratios": {"accept / yardstick": Measure(value=0.5, spread=0.0)},
        "seconds": {"accept": Measure(value=5e-4, spread=0.0), "yardstick": Measure(value=1e-3, spread=0.0)},
    }
    Baseline(**{**content, **changes}).save(path)
    return path


def test_an_unchanged_tree_passes_at_once(machine, tmp_path):
    report, script = machine(save(tmp_path / "b.json"), 5.2e-4)
    assert report.passed
    assert report.notes == ()
    assert script.measured == 1
    assert {f.verdict for f in report.findings} == {Verdict.OK}


def test_a_disturbance_is_measured_again(machine, tmp_path):
    report, script = machine(save(tmp_path / "b.json"), 7e-4, 6.5e-4, 5.1e-4)
    assert report.passed
    assert script.measured == 3


def test_a_regression_stays(machine, tmp_path):
    report, script = machine(save(tmp_path / "b.json"), 6.0e-4, 6.1e-4, 6.0e-4)
    assert script.measured == run.ATTEMPTS
    assert [f.name for f in report.findings if f.verdict.fails] == ["accept / yardstick"]


def test_a_ratio_of_another_device_is_only_shown(machine, tmp_path):
    path = save(tmp_path / "b.json", device="Another", made_with={**run.versions(), "torch": "1.0"})
    report, script = machine(path, 5e-3)
    assert report.passed
    assert not report.same_device
    assert script.measured == 1
    assert {f.verdict for f in report.findings if f.kind != "count"} == {Verdict.SHOWN}
    assert f"no baseline of this device ({DEVICE})" in report.notes[0]
    assert "draftgraph gate --update" in report.notes[0]
    assert report.notes[1].startswith("the baseline was made with torch 1.0, not ")


def test_times_count_only_where_the_machine_is_as_fast_as_it_was(machine, tmp_path):
    path = save(tmp_path / "b.json", ratios={"accept / yardstick": Measure(value=0.8, spread=0.0)})
    times = {f.name: f.verdict for f in machine(path, 8e-4)[0].findings if f.kind == "seconds"}
    assert times == {"accept": Verdict.WORSE, "yardstick": Verdict.OK}
    report, _ = machine(path, 12e-4, reference=1.5e-3)
    assert {f.verdict for f in report.findings if f.kind == "seconds"} == {Verdict.SHOWN}
    assert report.passed


def test_quick_times_nothing_and_counts_still_fail(machine, tmp_path):
    path = save(tmp_path / "b.json", counts={**COUNTS, "step: kernels": 2})
    report, script = machine(path, 5e-4, quick=True)
    assert script.measured == 0
    assert [f.name for f in report.findings if f.verdict.fails] == ["step: kernels"]
    assert report.notes == ("quick: only counts were compared, nothing was timed",)


def test_counts_of_a_real_model_are_compared_where_both_have_them(machine, tmp_path, monkeypatch):
    real = {"smollm2-135m (hub): rounds": 30}
    assert machine(save(tmp_path / "a.json", counts={**COUNTS, **real}), 5e-4, quick=True)[0].passed
    monkeypatch.setattr(run, "_COUNTS", (("all", lambda: {**COUNTS, "smollm2-135m (hub): rounds": 31}),))
    assert machine(save(tmp_path / "b.json"), 5e-4, quick=True)[0].passed
    other = save(tmp_path / "c.json", counts={**COUNTS, **real}, device="Another")
    assert machine(other, 5e-4, quick=True)[0].passed
    assert not machine(save(tmp_path / "d.json", counts={**COUNTS, **real}), 5e-4, quick=True)[0].passed


def test_a_new_baseline_has_the_median_and_the_spread(machine, tmp_path):
    script = Scripted(5e-4, 6e-4, 4e-4, 5e-4, 5e-4)
    baseline, doubts = run.make_baseline(lambda *_: None, groups=(script.source,))
    assert script.measured == run.PASSES
    assert baseline.counts == COUNTS
    assert baseline.device == DEVICE
    assert baseline.ratios["accept / yardstick"].value == 0.5
    assert math.isclose(baseline.ratios["accept / yardstick"].spread, 0.4)
    assert len(doubts) == 1
    assert "varied by 40%" in doubts[0]


def invoke(*arguments):
    return CliRunner().invoke(cli.app, ["gate", *map(str, arguments)], env={"COLUMNS": "120"})


@pytest.fixture
def command(machine, monkeypatch):
    monkeypatch.setattr(run, "run_gate", lambda path, *, quick, progress: machine(path, 5.2e-4, quick=quick)[0])
    script = Scripted(4e-4)
    original = run.make_baseline
    monkeypatch.setattr(run, "make_baseline", lambda progress: original(progress, groups=(script.source,)))
    return invoke


def test_the_command_passes_and_fails_by_its_exit_code(command, tmp_path):
    good = command("--baseline", save(tmp_path / "b.json"))
    assert good.exit_code == 0, good.output
    assert "2 of 2 counts are those of the baseline" in good.output
    assert "gate: passed" in good.output
    bad = command("--baseline", save(tmp_path / "c.json", counts={**COUNTS, "step: kernels": 2}))
    assert bad.exit_code == 1
    assert "gate: FAILED: step: kernels" in bad.output
    assert "draftgraph gate --update" in bad.output
    assert "answer: rounds" not in bad.output
    assert "answer: rounds" in command("--baseline", tmp_path / "c.json", "--all").output


def test_the_json_document(command, tmp_path):
    result = command("--json", "--baseline", save(tmp_path / "b.json"))
    document = json.loads(result.stdout)
    assert document["passed"] is True
    assert document["same_device"] is True
    finding = next(f for f in document["findings"] if f["kind"] == "ratio")
    assert finding == {
        "kind": "ratio",
        "name": "accept / yardstick",
        "before": 0.5,
        "now": pytest.approx(0.52),
        "allowed": pytest.approx(0.55),
        "verdict": "ok",
    }


def test_update_writes_and_shows_the_difference(command, tmp_path):
    path = save(tmp_path / "b.json", counts={"step: kernels": 2, "answer: rounds": 22})
    result = command("--update", "--baseline", path)
    assert result.exit_code == 0, result.output
    assert re.search(r"step: kernels\W+2\W+3\W+\+50.0%", result.output)
    assert re.search(r"accept / yardstick\W+0.500\W+0.400\W+-20.0%", result.output)
    assert "answer: rounds" not in result.output
    assert "is replaced" in result.output.replace("\n", " ")
    assert Baseline.load(path).counts == COUNTS
    fresh = command("--update", "--baseline", tmp_path / "new" / "x.json", "--json")
    assert json.loads(fresh.stdout)["device"] == DEVICE
    assert Baseline.load(tmp_path / "new" / "x.json").counts == COUNTS


def test_a_baseline_that_cannot_be_written_is_refused_before_anything_is_measured(command, tmp_path, monkeypatch):
    def measured(progress):
        raise AssertionError("measured")

    monkeypatch.setattr(run, "make_baseline", measured)
    (tmp_path / "file").touch()
    for path, why in ((tmp_path, "is a directory"), (tmp_path / "file" / "b.json", "cannot be written: File exists")):
        result = command("--update", "--baseline", path)
        assert result.exit_code == 2
        assert why in result.stderr


def test_without_a_baseline_it_says_what_to_do(command, tmp_path, monkeypatch):
    missing = command("--baseline", tmp_path / "none.json")
    assert missing.exit_code == 2
    assert f"draftgraph gate --update --baseline {tmp_path / 'none.json'}" in missing.stderr
    monkeypatch.setattr(run, "find_baseline", lambda device: None)
    nothing = command()
    assert nothing.exit_code == 2
    assert "there is no baseline of any device: run `draftgraph gate --update` on a tree" in nothing.stderr
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    assert "is not JSON" in command("--baseline", tmp_path / "broken.json").stderr


def test_options_that_contradict_each_other_are_refused(command):
    result = command("--update", "--quick")
    assert result.exit_code == 2
    assert "--quick measures no times" in result.stderr


def test_a_committed_baseline_is_readable_and_names_its_own_device():
    from draftgraph.profiling.baseline import DIRECTORY, baseline_path

    files = sorted(DIRECTORY.glob("*.json"))
    assert files
    for file in files:
        baseline = Baseline.load(file)
        assert baseline_path(baseline.device) == file
        assert replace(baseline, counts={}) != baseline
