"""What follows attention in a layer: a gated feed-forward, a mixture of them, or both."""

from __future__ import annotations

import torch

from ..kernels.linear import linear
from ..kernels.moe_experts import activate, moe_experts
from ..kernels.rms_norm import rms_norm
from .weights import LayerConstants, LayerWeights, MixtureWeights, RouterConstants


def gated(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    activation: str,
) -> torch.Tensor:
    """`down (act(gate x) * up x)`, [W, hidden] to [W, hidden] (Shazeer 2020)."""
    gate, up = linear(x, gate_up, gate_up_bias).chunk(2, dim=-1)
    return linear(activate(gate, activation) * up, down, down_bias)


def route(
    logits: torch.Tensor, choice_bias: torch.Tensor | None, constants: RouterConstants
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses each token's experts by their scores.

    Where experts form groups, a group's score is the sum of its `group_members` best, and experts outside the best
    `groups_per_token` groups cannot be chosen (DeepSeek-V2, section 2.2.2, with one member; DeepSeek-V3, section
    2.1.2, equations 12 to 16, with two).

    Args:
        logits: float32 [W, E].
        choice_bias: float32 [E] or None.
        constants: of the router.

    Returns:
        The experts, int32 [W, k], and their weights, float32 [W, k].
    """
    scores = torch.softmax(logits, dim=-1) if constants.scoring == "softmax" else torch.sigmoid(logits)
    choice = scores if choice_bias is None else scores + choice_bias
    if constants.groups_per_token < constants.num_groups:
        groups = choice.unflatten(-1, (constants.num_groups, -1))
        group_scores = groups.topk(constants.group_members, dim=-1).values.sum(-1)
        best = group_scores.topk(constants.groups_per_token, dim=-1).indices
        allowed = torch.zeros_like(group_scores).scatter(-1, best, 1.0)
        choice = torch.where(allowed[:, :, None] > 0.0, groups, float("-inf")).flatten(1)
    experts = choice.topk(constants.experts_per_token, dim=-1).indices
    weights = scores.gather(-1, experts)
    if constants.normalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=constants.normalize_min)
    return experts.int(), weights * constants.scale


def mixture(
    x: torch.Tensor,
    routed_by: torch.Tensor,
    rows: torch.Tensor,
    weights: MixtureWeights,
    constants: RouterConstants,
    activation: str,
) -> torch.Tensor:
    """The weighted sum of each token's experts.

    Args:
        x: [W, hidden].
        routed_by: [W, hidden], what the router takes.
        rows: int32 [W], -1 in padding, whose tokens choose no experts.
        weights: of the mixture.
        constants: of its router.
        activation: of the experts' gates.

    Returns:
        [W, hidden], zero in padding.
    """
    logits = linear(routed_by.to(weights.router.dtype), weights.router).float()
    experts, shares = route(logits, weights.choice_bias, constants)
    if weights.expert_scale is not None:
        shares = shares * weights.expert_scale[experts]
    return moe_experts(x, experts, shares, rows, weights.gate_up, weights.down, activation)


def feed_forward(
    hidden: torch.Tensor, rows: torch.Tensor, weights: LayerWeights, constants: LayerConstants
) -> torch.Tensor:
    """The layer's dense feed-forward, its mixture, or the sum of both, with their norms; [W, hidden] in and out."""
    eps, unit_offset = constants.norm_eps, constants.norm_unit_offset
    normed, update = rms_norm(hidden, weights.mlp_norm, eps, unit_offset), None
    if weights.gate_up is not None and weights.down is not None:
        dense = (weights.gate_up, weights.gate_up_bias, weights.down, weights.down_bias)
        update = gated(normed, *dense, constants.activation)
        if weights.mixture is not None and weights.mixture.shared_gate is not None:
            update = update * torch.sigmoid(linear(normed, weights.mixture.shared_gate))
        if weights.dense_post_norm is not None:
            update = rms_norm(update, weights.dense_post_norm, eps, unit_offset)
    if weights.mixture is not None and constants.router is not None:
        parts = weights.mixture
        x = normed if parts.norm is None else rms_norm(hidden, parts.norm, eps, unit_offset)
        routed_by = normed if parts.router_norm is None else rms_norm(hidden, parts.router_norm, eps, unit_offset)
        routed = mixture(x, routed_by, rows, parts, constants.router, constants.activation)
        if parts.post_norm is not None:
            routed = rms_norm(routed, parts.post_norm, eps, unit_offset)
        update = routed if update is None else routed + update
    assert update is not None, "a layer has a feed-forward, a mixture, or both"
    return update
