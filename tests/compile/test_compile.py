"""A sample of the kernels becomes machine code, one target each in turn, within its budget and as README.md says.

`python -m draftgraph.kernels.compile_report --check` does the same for every kernel and every target.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from draftgraph.kernels import compile_report
from draftgraph.kernels.compile_report import TARGETS, Usage, all_specs, cell_of, least_of, over_budget
from draftgraph.kernels.triton_support import triton

pytestmark = [pytest.mark.compile, pytest.mark.skipif(triton is None, reason="Triton has no build for this machine")]


@pytest.fixture(scope="module")
def usages(tmp_path_factory):
    """From a process without TRITON_INTERPRET, in which kernels could not be compiled."""
    path = tmp_path_factory.mktemp("compile") / "usages.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "draftgraph.kernels.compile_report", "--sample", "--json", str(path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    return [Usage(**row) for row in json.loads(path.read_text(encoding="utf-8"))]


def test_the_sample_holds_every_target(usages):
    specs = [(spec.op, spec.variant) for spec in all_specs()]
    assert len(set(specs)) == len(specs)
    assert [(u.op, u.variant) for u in usages] == specs[::3]
    for target in TARGETS:
        assert len({u.op for u in usages if u.target == target}) >= 6


def test_everything_is_within_its_budget(usages):
    specs = {(spec.op, spec.variant): spec for spec in all_specs()}
    assert [usage for usage in usages if over_budget(usage, specs[usage.op, usage.variant])] == []


def test_the_table_in_the_readme_has_every_kernel():
    rows = compile_report.readme_rows()
    assert list(rows) == [(spec.op, spec.variant) for spec in all_specs()]
    for spec in all_specs():
        cells = rows[spec.op, spec.variant]
        assert tuple(cells[len(TARGETS) :]) == least_of(spec)
        assert [cell.split("/")[1] for cell in cells[: len(TARGETS)]] == ["0"] * len(TARGETS)


def test_the_table_in_the_readme_is_up_to_date(usages):
    if f"With Triton {triton.__version__}:" not in compile_report.readme_table():
        pytest.skip("another version of Triton made kernels/README.md's table, and its compiler counts differently")
    rows = compile_report.readme_rows()
    told = [(u, rows[u.op, u.variant][TARGETS.index(u.target)]) for u in usages]
    assert [(u, cell) for u, cell in told if cell != cell_of(u)] == [], (
        "run `python -m draftgraph.kernels.compile_report --write`"
    )


def test_a_spill_is_noticed():
    """The same kernel with a quarter of the registers has to spill."""
    script = (
        "import dataclasses\n"
        "from draftgraph.kernels.compile_report import all_specs, compile_spec\n"
        "spec = next(s for s in all_specs() if (s.op, s.variant) == ('window_attention', '128, bf16'))\n"
        "print(compile_spec(dataclasses.replace(spec, maxnreg=64), 'sm_90').spills)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert int(result.stdout) > 0
