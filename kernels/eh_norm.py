"""The input of a draft head's projection. A plain function: torch.compile fuses it into one kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .rms_norm import rms_norm


def eh_norm(
    tokens: torch.Tensor,
    embedding: torch.Tensor,
    hidden: torch.Tensor,
    states: torch.Tensor | None = None,
    *,
    norms: torch.Tensor | None = None,
    eps: float = 0.0,
    unit_offset: bool = False,
    zero_positions: torch.Tensor | None = None,
    hidden_first: bool = False,
) -> torch.Tensor:
    """Embeddings and hidden states side by side, each normalised (Li et al. 2024, arXiv 2401.15077, section 4.1).

    The two are normalised as one tensor of pairs, which makes it one reduction, so that lookup, gather, zeroing, both
    norms and the concatenation come out as one loop nest.

    Args:
        tokens: int32 [W].
        embedding: [V, H].
        hidden: [N, H].
        states: int32 [W], the row of `hidden` that each token reads; None: row w is token w's, and N is W.
        norms: [2, H], the weights of the two RMSNorms, in the order of the concatenation; None for no norms.
        eps: of the norms.
        unit_offset: the norms multiply with `1 + weight`.
        zero_positions: int32 [W], positions; at position 0 the embedding is zeroed. None zeroes nothing.
        hidden_first: the hidden state comes before the embedding.

    Returns:
        [W, 2H], in the type of `embedding`.
    """
    embedded = F.embedding(tokens, embedding)
    if zero_positions is not None:
        embedded = torch.where((zero_positions == 0)[:, None], 0.0, embedded)
    if states is not None:
        hidden = hidden.index_select(0, states)
    pairs = torch.stack((hidden, embedded) if hidden_first else (embedded, hidden), 1)
    if norms is not None:
        pairs = rms_norm(pairs, norms, eps, unit_offset)
    return pairs.flatten(1)
