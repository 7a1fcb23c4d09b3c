"""Root-mean-square normalisation. A plain function: torch.compile fuses it with what surrounds it."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, unit_offset: bool = False) -> torch.Tensor:
    """Normalises the last dimension (Zhang and Sennrich 2019, equation 4), in float32 inside.

    Rounds where transformers does: the Llama kind rounds to the type of `x` before it multiplies with the
    weight, the Gemma kind, whose weight is an offset from one, after.

    Args:
        x: [..., size].
        weight: [size]; None multiplies with nothing.
        eps: added to the mean square.
        unit_offset: multiply with `1 + weight` (Gemma).

    Returns:
        Like `x`.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    if unit_offset:
        return (normed * (1.0 + weight.float())).to(x.dtype)
    return weight * normed.to(x.dtype)
