"""Every specialisation that an engine asks for becomes machine code, without spills and within the smallest limits.

On an NVIDIA target and on AMD's; `python tests/compile/engine_launches.py` does the same for all targets.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine_launches import CHECKPOINTS, is_over_budget

from draftgraph.kernels.compile_report import Usage
from draftgraph.kernels.triton_support import triton
from draftgraph.model_zoo.registry import FAMILIES

pytestmark = [
    pytest.mark.compile,
    pytest.mark.slow,
    pytest.mark.skipif(triton is None, reason="Triton has no build for this machine"),
]

SWEPT = ("sm_90", "gfx942")


@pytest.fixture(scope="module")
def usages(tmp_path_factory):
    path = tmp_path_factory.mktemp("compile") / "usages.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = str(Path(__file__).with_name("engine_launches.py"))
    command = [sys.executable, script, "--targets", *SWEPT, "--json", str(path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert path.exists(), result.stderr[-4000:]
    return [Usage(**row) for row in json.loads(path.read_text(encoding="utf-8"))]


def test_nothing_spills_or_uses_too_much(usages):
    assert [usage for usage in usages if is_over_budget(usage)] == []


def test_the_sweep_holds_every_op_of_an_engine(usages):
    ops = {"ngram_propose", "plan_window", "pack_window", "pack_prefill", "rope_and_cache", "window_attention"}
    ops |= {
        "sample_target",
        "accept_standard",
        "accept_block",
        "accept_synthetic",
        "accept_coupled",
        "record_logprobs",
        "commit",
        "pack_block",
        "pack_tail",
        "pack_unseen",
        "draft_argmax",
        "draft_distribution",
        "advance_draft",
        "moe_experts",
        "suffix_propose",
    }
    for target in SWEPT:
        assert {usage.op for usage in usages if usage.target == target} >= ops


def test_the_sweep_holds_every_family():
    assert {hf["model_type"] for hf in CHECKPOINTS.values()} >= set(FAMILIES) - {"gemma3", "gemma4"}
