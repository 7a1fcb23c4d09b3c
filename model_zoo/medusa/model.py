"""Medusa heads as functions of tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from ...kernels.linear import linear
from ..decoder import CompileRegion, identity
from .config import MedusaConfig


class MedusaHead(NamedTuple):
    """One head."""

    blocks: tuple[torch.Tensor, ...]
    """[H, H] each."""
    biases: tuple[torch.Tensor | None, ...]
    """[H] each."""
    head: torch.Tensor
    """[Vd, H]."""


def head_logits(hidden: torch.Tensor, weights: MedusaHead) -> torch.Tensor:
    """Adds SiLU(W x + b) to x for every block, then projects (Cai et al. 2024, section 2.1.1).

    Args:
        hidden: [W, H].
        weights: of the head.

    Returns:
        [W, Vd].
    """
    for block, bias in zip(weights.blocks, weights.biases, strict=True):
        hidden = hidden + F.silu(linear(hidden, block, bias))
    return linear(hidden, weights.head)


class MedusaModel:
    """Medusa heads. Head i drafts the token i + 2 places after the one whose hidden state it reads."""

    def __init__(
        self,
        config: MedusaConfig,
        heads: tuple[MedusaHead, ...],
        *,
        target_ids: torch.Tensor | None = None,
        compile_region: CompileRegion = identity,
    ) -> None:
        """Takes the weights as they were loaded.

        Args:
            config: of the heads.
            heads: the first for the nearest token.
            target_ids: int32 [Vd], the target's id of each token; None: the same.
            compile_region: see `DecoderModel`.
        """
        self.config, self._heads, self.target_ids = config, heads, target_ids
        self.device, self.dtype = heads[0].head.device, heads[0].head.dtype
        self.state_size = config.target_hidden_size
        self._logits = compile_region(head_logits)

    def logits(self, head: int, hidden: torch.Tensor) -> torch.Tensor:
        """What head `head` says, [W, Vd], of the target's hidden states after its final norm, [W, H]."""
        return self._logits(hidden, self._heads[head])
