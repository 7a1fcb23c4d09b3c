"""The body of the GPU's tests, under the interpreter: so that it stays right where no GPU ever runs it."""

from __future__ import annotations

import pytest
from device_cases import at_full_length, cases, check_eager, check_effect, check_replay, without_live_rows

from draftgraph.kernels import vocabulary_parts
from draftgraph.kernels.registration import CUDA_IMPLEMENTATIONS

CASES = cases(vocab=70)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    monkeypatch.setattr(vocabulary_parts, "LEAST_PART", 32)


@pytest.mark.parametrize("name", CASES)
def test_the_op_has_the_references_effect(name):
    check_eager(CASES[name], "cpu", range(2))


@pytest.mark.parametrize("name", [name for name in CASES if not name.endswith(("fp16", "fp32"))])
def test_a_graph_follows_its_tensors(name):
    check_replay(CASES[name], "cpu")


@pytest.mark.parametrize("name", CASES)
def test_a_bucket_of_padding_rows(name):
    """Lengths of zero, on the reserved slot."""
    case = CASES[name]
    args = case.make(3)
    without_live_rows(case, args)
    check_effect(case, "cpu", args)


@pytest.mark.parametrize("name", ["plan_window", "budget_topk", "pack_window", "ngram_propose", "commit"])
def test_rows_as_long_as_their_context(name):
    case = CASES[name]
    for seed in range(3):
        args = case.make(seed)
        at_full_length(case, args)
        check_effect(case, "cpu", args)


def test_every_op_of_a_round_has_a_case():
    forward = {"window_attention", "rope_and_cache", "compact_path"}
    assert {case.op for case in CASES.values()} == set(CUDA_IMPLEMENTATIONS) - forward
