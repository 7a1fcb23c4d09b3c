"""Where the weights of a head begin: at the target's own, as far as they fit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


@torch.no_grad()
def copy_layer(layer: nn.Module, weights: Mapping[str, torch.Tensor], *, columns: slice = slice(None)) -> None:
    """Copies a layer of the target into a head's, matrix by matrix where the shapes allow.

    A head's feed-forward may be narrower: it takes those inner units whose three weights are largest together. Its
    attention may read more than the residual stream: `columns` says which columns are the stream's; the others begin
    at 0. A matrix that fits in neither way keeps its random values.

    Args:
        layer: with the names of a Llama layer.
        weights: of the target's layer, by the same names.
        columns: of the queries', keys' and values' matrices.
    """
    own = dict(layer.named_parameters())
    units = _largest_units(weights, own)
    for name, parameter in own.items():
        source = weights.get(name)
        if source is None:
            continue
        if units is not None and name.startswith("mlp."):
            source = source[:, units] if name == "mlp.down_proj.weight" else source[units]
        if source.shape == parameter.shape:
            parameter.copy_(source)
        elif name.startswith("self_attn.") and columns != slice(None):
            part = parameter[:, columns]
            if part.shape == source.shape:
                parameter.zero_()
                part.copy_(source)


def _largest_units(weights: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """int64, the inner units of a feed-forward that a narrower one keeps, ascending; None where it is not narrower."""
    gate, up, down = (weights.get(f"mlp.{name}_proj.weight") for name in ("gate", "up", "down"))
    goal = own.get("mlp.gate_proj.weight")
    if gate is None or up is None or down is None or goal is None or goal.shape[0] >= gate.shape[0]:
        return None
    size = gate.float().norm(dim=1) * up.float().norm(dim=1) * down.float().norm(dim=0)
    return size.topk(goal.shape[0]).indices.sort().values


@torch.no_grad()
def read_last_state(fc: nn.Linear, states: int) -> None:
    """Lets a projection of several hidden states side by side begin as the last of them, where the sizes allow.

    Args:
        fc: [H, n * Ht].
        states: `n`.
    """
    size = fc.in_features // states
    if fc.out_features != size:
        return
    fc.weight.mul_(0.1)
    fc.weight[:, -size:] += torch.eye(size)
