"""The body of the GPU's tests, under the interpreter: so that it stays right where no GPU ever runs it."""

from __future__ import annotations

import pytest
from device_cases import CASES, check_eager, check_replay

from draftgraph.kernels.registration import CUDA_IMPLEMENTATIONS


@pytest.mark.parametrize("name", CASES)
def test_the_op_has_the_references_effect(name):
    check_eager(CASES[name], "cpu", range(2))


@pytest.mark.parametrize("name", [name for name in CASES if not name.endswith(("fp16", "fp32"))])
def test_a_graph_follows_its_tensors(name):
    check_replay(CASES[name], "cpu")


def test_every_op_of_a_round_has_a_case():
    forward = {"window_attention", "rope_and_cache", "compact_path"}
    assert {case.op for case in CASES.values()} == set(CUDA_IMPLEMENTATIONS) - forward
