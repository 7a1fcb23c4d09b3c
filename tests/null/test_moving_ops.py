"""Each op that moves hidden states, tokens and logits on fake CUDA tensors: it can be captured."""

from __future__ import annotations

import importlib

import pytest
import torch
from moving_cases import CASES, op_of

from draftgraph.graphs.capture_guard import check_function, fake_cuda

pytestmark = pytest.mark.null


@pytest.mark.parametrize("case", CASES)
def test_the_op_can_be_captured(case: str) -> None:
    op = getattr(importlib.import_module(f"draftgraph.kernels.{op_of(case)}"), op_of(case))
    for arguments in (CASES[case](2), CASES[case](3)):
        with fake_cuda() as device:
            fake = [
                torch.empty(x.shape, dtype=x.dtype, device=device) if isinstance(x, torch.Tensor) else x
                for x in arguments
            ]
            check_function(case, lambda given=fake: op(*given))
