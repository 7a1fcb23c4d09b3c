"""A linear layer whose weight may be packed for oneDNN."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .registration import define_op

# How many rows the packed layout is chosen for. In bf16 the choice made no difference; in fp32 a hint of 1
# cost up to three times the time at 2 to 16 rows, and any hint from 2 to 512 was alike.
_ROWS_HINT = 16


def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The specification: `x @ weight.T + bias` with `x[W, in]`, `weight[out, in]`, `bias[out]`."""
    return F.linear(x, weight, bias)


def _linear_cpu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def _linear_fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


_linear = define_op(
    "linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor",
    cpu=_linear_cpu,
    fake=_linear_fake,
    packed_cpu=True,
)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias`.

    On the CPU an opaque op, which alone can take a packed weight; elsewhere torch's own, so that Inductor
    sees the GEMM. With a packed weight a row of the result depends, bit for bit, on that row of `x` only: not
    on its index or its neighbours, and in bf16 not on `W` either (in fp32: among widths above 1).

    Args:
        x: [W, in].
        weight: [out, in], plain or from `pack_weight`.
        bias: [out].

    Returns:
        [W, out], like `x`.
    """
    if x.device.type == "cpu":
        return _linear(x, weight, bias)
    return F.linear(x, weight, bias)


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """Packs a weight for `linear`: a reordered copy where oneDNN can use one, else `weight` itself.

    Args:
        weight: [out, in]. The packed form only serves as a weight of `linear`.
    """
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return weight
    supported = weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    if not supported:
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
