"""The two steps of drafting with another vocabulary, in plain tensor operations: what the ops here fuse.

Token-level intersection (TLI): Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms
for Heterogeneous Vocabularies", ICML 2025, algorithm 4.
"""

from __future__ import annotations

import torch


def constrain_draft_logits(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """The logits with -inf at every token that the target does not have.

    Args:
        logits: [N, V].
        allowed: bool [V].
    """
    return torch.where(allowed, logits, -torch.inf)


def map_draft_to_target_ids(tokens: torch.Tensor, target_ids: torch.Tensor) -> torch.Tensor:
    """The target's ids of the drafter's tokens; -1 where the target has none.

    Args:
        tokens: int32 of any shape, ids of the drafter.
        target_ids: int32 [V].
    """
    return target_ids[tokens.long()]
