"""The gate on this very machine: three runs on an unchanged tree pass, and accept made a fifth slower fails.

pytest tests/bench/test_gate.py --benchmark-enable
"""

from __future__ import annotations

import functools
import time

import pytest

from draftgraph.runtime.gate import run
from draftgraph.runtime.gate.ratios import step_group
from draftgraph.runtime.verification.base import VerificationPolicy

pytestmark = pytest.mark.bench

STEPS = functools.partial(step_group, compiled=False)
ACCEPT = {"accept, greedy / yardstick", "accept, sampled / long yardstick"}


@pytest.fixture(scope="module")
def check(tmp_path_factory):
    """Runs the timed part of the gate on the steps, against a baseline of this moment."""
    path = tmp_path_factory.mktemp("gate") / "baseline.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "_COUNTS", ())
        baseline, _ = run.make_baseline(lambda *_: None, groups=(STEPS,))
        baseline.save(path)
        yield lambda: run.run_gate(path, progress=lambda *_: None, groups=(STEPS,))


def failed(report):
    return {finding.name for finding in report.findings if finding.kind == "ratio" and finding.verdict.fails}


def test_three_runs_on_an_unchanged_tree_pass(benchmark, check):
    reports = [check(), check()]
    reports.append(benchmark.pedantic(check, rounds=1))
    assert [failed(report) for report in reports] == [set()] * 3


def test_an_accept_that_takes_a_fifth_longer_fails(check, monkeypatch):
    accept = VerificationPolicy.accept

    def slower(self, state, bucket):
        start = time.perf_counter()
        accept(self, state, bucket)
        end = time.perf_counter()
        while time.perf_counter() < end + 0.2 * (end - start):
            pass

    monkeypatch.setattr(VerificationPolicy, "accept", slower)
    found = failed(check())
    assert found & ACCEPT
    assert found <= ACCEPT
