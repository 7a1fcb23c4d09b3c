"""Embeddings of a layer's own, which it adds in at its end (Gemma 3n, Gemma 4)."""

from __future__ import annotations

import torch

from ..kernels.linear import linear
from ..kernels.moe_experts import activate
from ..kernels.rms_norm import rms_norm
from .weights import LayerConstants, PerLayerInputWeights


def layer_inputs(
    own: torch.Tensor, hidden: torch.Tensor, projection: torch.Tensor, norm: torch.Tensor, num_layers: int, eps: float
) -> torch.Tensor:
    """What the layers add in: their own embeddings of the tokens, and a projection of the model's.

    Args:
        own: [W, L * size].
        hidden: [W, hidden], the model's embeddings of the tokens.
        projection: [L * size, hidden].
        norm: [size], of each layer's part of the projection.
        num_layers: `L`.
        eps: of the norm.

    Returns:
        [W, L, size], the two scaled to unit variance together if they have it apart.
    """
    projected = (linear(hidden, projection) * hidden.shape[1] ** -0.5).unflatten(1, (num_layers, -1))
    return (rms_norm(projected, norm, eps) + own.unflatten(1, (num_layers, -1))) * 2.0**-0.5


def add_layer_input(
    hidden: torch.Tensor, layer_input: torch.Tensor, weights: PerLayerInputWeights, constants: LayerConstants
) -> torch.Tensor:
    """Adds a layer's own embeddings, [W, size], gated by the hidden state, to it: [W, hidden]."""
    gated = activate(linear(hidden, weights.gate), constants.activation) * layer_input
    update = linear(gated, weights.projection)
    return hidden + rms_norm(update, weights.norm, constants.norm_eps, constants.norm_unit_offset)
