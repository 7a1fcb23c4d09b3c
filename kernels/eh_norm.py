"""The input of a draft head's projection. A plain function: torch.compile fuses it into one kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .rms_norm import rms_norm


def eh_norm(
    tokens: torch.Tensor,
    rows: torch.Tensor,
    embedding: torch.Tensor,
    hidden: torch.Tensor,
    states: torch.Tensor | None = None,
    *,
    norms: torch.Tensor | None = None,
    eps: float = 0.0,
    unit_offset: bool = False,
    zero_positions: torch.Tensor | None = None,
    hidden_first: bool = False,
    embedding_scale: float = 1.0,
) -> torch.Tensor:
    """Embeddings and hidden states side by side, each normalised (Li et al. 2024, arXiv 2401.15077, section 4.1).

    Lookup, gather, zeroing, both norms and the concatenation come out as one loop nest. It takes that both halves read
    `rows`, which tells padding: Inductor fuses loops side by side only where they share what they read.

    Args:
        tokens: int32 [W].
        rows: int32 [W], -1 in padding, where both halves are zeroed.
        embedding: [V, H].
        hidden: [N, H].
        states: int32 [W], the row of `hidden` that each token reads; None: row w is token w's, and N is W.
        norms: [2, H], the weights of the two RMSNorms, in the order of the concatenation; None for no norms.
        eps: of the norms.
        unit_offset: the norms multiply with `1 + weight`.
        zero_positions: int32 [W], positions; at position 0 the embedding is zeroed. None zeroes nothing.
        hidden_first: the hidden state comes before the embedding.
        embedding_scale: what embeddings are multiplied with before their norm.

    Returns:
        [W, 2H], in the type of `embedding`.
    """
    padding = (rows < 0)[:, None]
    blank = padding if zero_positions is None else padding | (zero_positions == 0)[:, None]
    looked_up = F.embedding(tokens, embedding)
    if embedding_scale != 1.0:
        looked_up = looked_up * embedding_scale
    embedded = torch.where(blank, 0.0, looked_up)
    read = hidden if states is None else hidden.index_select(0, states)
    read = torch.where(padding, 0.0, read)
    parts = [read, embedded] if hidden_first else [embedded, read]
    if norms is not None:
        parts = [rms_norm(part, norms[side], eps, unit_offset) for side, part in enumerate(parts)]
    return torch.cat(parts, 1)
