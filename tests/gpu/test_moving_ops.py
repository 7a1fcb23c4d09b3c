"""The ops that move hidden states, tokens and logits, on the GPU: eagerly and from a captured graph."""

from __future__ import annotations

import pytest
from device_cases import DeviceCase, check_eager, check_replay
from moving_cases import CASES, op_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", CASES)
def test_the_op_has_the_references_effect(name):
    check_eager(DeviceCase(op_of(name), CASES[name]), "cuda", range(4))


@pytest.mark.parametrize("name", CASES)
def test_a_graph_follows_its_tensors(name):
    check_replay(DeviceCase(op_of(name), CASES[name]), "cuda")
