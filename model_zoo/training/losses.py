"""How far a head's drafts are from what the target would write."""

from __future__ import annotations

import torch


def distribution_loss(logits: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    """Cross-entropy with the target's distribution, which differs from the KL divergence by a constant.

    Args:
        logits: [N, Vd], the head's.
        goal: [N, Vd], the target's logits of the same tokens.

    Returns:
        float32 [N].
    """
    return -(goal.float().softmax(-1) * logits.float().log_softmax(-1)).sum(-1)


def overlap(logits: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    """sum_x min(p(x), q(x)), the probability that speculative sampling accepts a draft of q (Leviathan et al. 2023).

    Args:
        logits: [N, Vd], the head's.
        goal: [N, Vd], the target's.

    Returns:
        float32 [N], in [0, 1].
    """
    return torch.minimum(goal.float().softmax(-1), logits.float().softmax(-1)).sum(-1)


def prefix_hits(hits: torch.Tensor, known: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts chains of right drafts.

    Args:
        hits: bool [N, K], whether a draft is the target's token.
        known: bool [N, K], whether the target's token is there to compare with; a prefix of each row.

    Returns:
        float32 [K] both: rows whose drafts up to the i-th are right, and rows where they are known.
    """
    right = (hits & known).cumprod(-1)
    return right.sum(0).float(), known.sum(0).float()


def weighted_mean(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """sum(values * weights) / sum(weights); 0 where no weight is positive."""
    return (values * weights).sum() / weights.sum().clamp_min(1e-6)
