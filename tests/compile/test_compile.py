"""Every kernel becomes machine code for every target, without spills, within its budget, and as README.md says."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from draftgraph.kernels import compile_report
from draftgraph.kernels.compile_report import SHARED_LIMITS, TARGETS, Usage, all_specs
from draftgraph.kernels.triton_support import triton

pytestmark = [pytest.mark.compile, pytest.mark.skipif(triton is None, reason="Triton has no build for this machine")]


@pytest.fixture(scope="module")
def usages(tmp_path_factory):
    """From a process without TRITON_INTERPRET, in which kernels could not be compiled."""
    path = tmp_path_factory.mktemp("compile") / "usages.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "draftgraph.kernels.compile_report", "--json", str(path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    return [Usage(**row) for row in json.loads(path.read_text(encoding="utf-8"))]


def test_every_specialisation_compiles_for_every_target(usages):
    wanted = [(spec.op, spec.variant, target) for spec in all_specs() for target in TARGETS]
    assert [(u.op, u.variant, u.target) for u in usages] == wanted
    assert len(set(wanted)) == len(wanted)


def test_nothing_spills(usages):
    assert [u for u in usages if u.spills] == []


def test_registers_and_shared_memory_are_within_budget(usages):
    specs = {(spec.op, spec.variant): spec for spec in all_specs()}
    for usage in usages:
        spec = specs[usage.op, usage.variant]
        assert usage.registers <= spec.max_registers, usage
        assert usage.shared <= min(spec.max_shared, SHARED_LIMITS[usage.target]), usage


def test_the_table_in_the_readme_is_up_to_date(usages):
    if f"With Triton {triton.__version__}:" not in compile_report.readme_table():
        pytest.skip("another version of Triton made kernels/README.md's table, and its compiler counts differently")
    assert compile_report.readme_table() == compile_report.render_table(usages), (
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
