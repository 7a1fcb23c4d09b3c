"""The head: logits in place, with and without a soft cap, from plain and packed weights."""

from __future__ import annotations

import pytest
import torch
from op_checks import check_capture_safe, check_registration

from draftgraph.kernels.linear import linear, pack_weight
from draftgraph.kernels.project_logits import project_logits, project_logits_reference

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def arguments(dtype: torch.dtype, soft_cap: float, width: int = 5) -> list:
    hidden, weight = torch.randn(width, 32).to(dtype), torch.randn(70, 32).to(dtype)
    return [hidden, weight, soft_cap, torch.full((width, 70), 9.0, dtype=dtype)]


@DTYPES
@pytest.mark.parametrize("soft_cap", [0.0, 3.0, 30.0])
def test_the_formula(dtype, soft_cap):
    hidden, weight, _, out = args = arguments(dtype, soft_cap)
    expected = hidden.double() @ weight.double().T
    if soft_cap:
        expected = soft_cap * torch.tanh(expected / soft_cap)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for run in (project_logits, project_logits_reference):
        out.fill_(9)
        run(*args)
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=10 * tolerance)


@DTYPES
def test_without_a_cap_it_is_the_linear_layer_bit_by_bit(dtype):
    hidden, weight, _, out = arguments(dtype, 0.0)
    for used in (weight, pack_weight(weight)):
        project_logits(hidden, used, 0.0, out)
        assert torch.equal(out, linear(hidden, used))


def test_a_packed_weight_and_a_cap():
    hidden, weight, cap, out = arguments(torch.float32, 3.0)
    expected = torch.empty_like(out)
    project_logits_reference(hidden, weight, cap, expected)
    project_logits(hidden, pack_weight(weight), cap, out)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_only_the_rows_given_are_written():
    hidden, weight, _, _ = arguments(torch.float32, 0.0)
    logits = torch.full((8, 70), 9.0)
    project_logits(hidden, weight, 0.0, logits[:5])
    assert torch.equal(logits[5:], torch.full((3, 70), 9.0))
    assert torch.equal(logits[:5], linear(hidden, weight))


@pytest.mark.parametrize("run", [project_logits, project_logits_reference])
@pytest.mark.parametrize("change", [lambda x: x[:4], lambda x: x.to(torch.bfloat16)])
def test_an_output_that_does_not_fit_is_refused(run, change):
    hidden, weight, _, out = arguments(torch.float32, 0.0)
    with pytest.raises(ValueError, match=r"out is (float32 \[4, 70\]|bfloat16 \[5, 70\]); accepted: float32 \[5, 70\]"):
        run(hidden, weight, 0.0, change(out))


def test_registration_and_capture():
    for soft_cap in (0.0, 3.0):
        check_registration(project_logits, arguments(torch.float32, soft_cap))
        check_capture_safe(project_logits_reference, arguments(torch.bfloat16, soft_cap))
