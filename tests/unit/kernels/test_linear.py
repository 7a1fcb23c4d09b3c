"""Packed linear layers: values, and that a row depends on nothing but itself."""

import pytest
import torch
import torch.nn.functional as F

from draftgraph.kernels.linear import linear, linear_reference, pack_weight

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


def _bf16_or_skip(dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bf16 on this CPU")


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("width", [1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_equals_plain(dtype: torch.dtype, width: int, with_bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(width, 96, dtype=dtype), torch.randn(80, 96, dtype=dtype)
    bias = torch.randn(80, dtype=dtype) if with_bias else None
    expected = linear_reference(x.double(), weight.double(), None if bias is None else bias.double())
    for used in (weight, pack_weight(weight)):
        result = linear(x, used, bias)
        assert result.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance * 10)


def test_unsupported_type_stays_plain() -> None:
    weight = torch.randn(8, 8, dtype=torch.float64)
    assert pack_weight(weight) is weight
    x = torch.randn(2, 8, dtype=torch.float64)
    assert torch.equal(linear(x, weight), F.linear(x, weight))


@needs_onednn
@pytest.mark.parametrize(
    ("dtype", "widths"),
    [(torch.bfloat16, (1, 2, 4, 8, 16, 32, 64)), (torch.float32, (2, 4, 8, 16, 32, 64))],
)
@pytest.mark.parametrize(("out_features", "in_features"), [(960, 576), (576, 1536), (100, 48)])
def test_row_depends_only_on_itself(
    dtype: torch.dtype, widths: tuple[int, ...], out_features: int, in_features: int
) -> None:
    _bf16_or_skip(dtype)
    torch.manual_seed(1)
    weight = pack_weight(torch.randn(out_features, in_features, dtype=dtype))
    assert weight.is_mkldnn
    row = torch.randn(in_features, dtype=dtype)
    expected: torch.Tensor | None = None
    for width in widths:
        for index in {0, width // 2, width - 1}:
            x = torch.randn(width, in_features, dtype=dtype) * 10
            x[index] = row
            result = linear(x, weight)[index]
            expected = result if expected is None else expected
            assert torch.equal(result, expected), (width, index)


@needs_onednn
def test_packed_weight_enters_a_compiled_graph() -> None:
    torch.manual_seed(2)
    x, weight, bias = torch.randn(4, 32), torch.randn(16, 32), torch.randn(16)
    compiled = torch.compile(lambda x, w, b: torch.relu(linear(x * 2, w, b)), fullgraph=True, dynamic=False)
    result = compiled(x, pack_weight(weight), bias)
    torch.testing.assert_close(result, torch.relu(F.linear(x * 2, weight, bias)), rtol=1e-5, atol=1e-5)
