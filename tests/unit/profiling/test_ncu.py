"""The ncu script's command lines."""

from __future__ import annotations

import shlex

import pytest
import typer
from typer.testing import CliRunner

from draftgraph.profiling import ncu

COMMAND = ["draftgraph", "generate", "smollm2-135m", "Hi"]


@pytest.fixture
def invoke():
    app = typer.Typer()
    app.command()(ncu.main)
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def test_one_kernel_is_measured_in_the_steady_state():
    line = ncu.profile_command("attend_kernel", COMMAND, output="run", skip=2, count=3, sections="basic")
    assert line[:3] == ["env", "DRAFTGRAPH_NVTX=1", "ncu"]
    assert {
        "--nvtx",
        "--nvtx-include=draftgraph@steady",
        "--kernel-name=attend_kernel",
        "--launch-skip=2",
        "--launch-count=3",
        "--set=basic",
        "--export=run",
    } <= set(line)
    assert line[-len(COMMAND) :] == COMMAND


def test_print_gives_the_command_and_runs_nothing(invoke, monkeypatch):
    monkeypatch.setenv("PATH", "")
    result = invoke("regex:.*attend.*", "--print", "--", *COMMAND)
    assert result.exit_code == 0
    assert shlex.split(result.output) == ncu.profile_command("regex:.*attend.*", COMMAND, output="draftgraph")


def test_a_missing_tool_is_named_with_its_packages(invoke, monkeypatch):
    monkeypatch.setenv("PATH", "")
    result = invoke("attend_kernel", "--", *COMMAND)
    assert result.exit_code == 2
    assert "ncu was not found on the PATH" in result.output
    assert "cuda-nsight-compute" in result.output


def test_mistakes_are_told(invoke):
    assert "no command to profile" in invoke("attend_kernel").output
    unnamed = invoke("", "--print", "--", *COMMAND)
    assert (unnamed.exit_code, unnamed.output) == (2, "error: the name of the kernel is empty\n")
    for name in ("", "regex:"):
        with pytest.raises(ValueError, match="the name of the kernel is empty"):
            ncu.profile_command(name, COMMAND, output="run")
    with pytest.raises(ValueError, match="skip must be at least 0 and count at least 1, got -1 and 0"):
        ncu.profile_command("k", COMMAND, output="run", skip=-1, count=0)
