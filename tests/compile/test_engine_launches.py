"""What engines ask for becomes machine code, without spills and within the smallest limits: a sample of the settings.

On an NVIDIA target every family, method and rule, on AMD's every method; `python tests/compile/engine_launches.py`
compiles all that any setting asks for, for all targets.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine_launches import is_over_budget
from engine_settings import CHECKPOINTS, settings

from draftgraph.kernels.compile_report import Usage
from draftgraph.kernels.triton_support import triton
from draftgraph.model_zoo.registry import FAMILIES
from draftgraph.runtime.speculative_config import METHODS, REJECTION_SAMPLE_METHODS

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
    command = [sys.executable, script, "--sample", "--targets", *SWEPT, "--json", str(path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert path.exists(), result.stderr[-4000:]
    return [Usage(**row) for row in json.loads(path.read_text(encoding="utf-8"))]


def test_nothing_spills_or_uses_too_much(usages):
    assert [usage for usage in usages if is_over_budget(usage)] == []


def test_the_sample_holds_every_op_of_an_engine(usages):
    common = {"ngram_propose", "plan_window", "pack_window", "pack_prefill", "rope_and_cache", "window_attention"}
    common |= {"sample_target", "accept_standard", "accept_coupled", "record_logprobs", "commit", "embed_tokens"}
    common |= {
        "pack_block",
        "pack_tail",
        "pack_unseen",
        "draft_argmax",
        "advance_draft",
        "suffix_propose",
        "merge_drafts",
    }
    common |= {"choose_budget", "budget_topk", "keep_drafting", "estimate_acceptance", "learn_acceptance"}
    common |= {"gather_rows", "put_rows", "gather_window", "keep_states", "keep_prompt_state", "tokens_after"}
    common |= {"drop_unknown_drafts"}
    more = {"keep_ring", "pack_turn", "draft_positions", "widen_logits"}
    more |= {"accept_block", "accept_synthetic", "draft_distribution", "moe_experts"}
    for target, ops in zip(SWEPT, (common | more, common), strict=True):
        assert {usage.op for usage in usages if usage.target == target} >= ops


def test_the_settings_hold_every_method_and_rule():
    asked = [setting for setting in settings() if setting.drafts]
    drafting = {name for name, method in METHODS.items() if method.available and method.drafts}
    methods = {name for s in asked for name in ((s.method,) if isinstance(s.method, str) else s.method)}
    assert methods >= drafting
    assert {setting.rule for setting in asked} == set(REJECTION_SAMPLE_METHODS)


def test_the_settings_hold_every_family():
    assert {hf["model_type"] for hf in CHECKPOINTS.values()} >= set(FAMILIES) - {"gemma3", "gemma4"}
