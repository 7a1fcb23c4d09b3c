"""The packed windows of one forward, as the model and the attention op take them."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Window(NamedTuple):
    """`W` token positions of `B` rows, packed one row after another; the rest of `W` is padding.

    A prefill chunk is a window of one row; a verify is one window per row of the bucket.
    """

    tokens: torch.Tensor
    """int32 [W]: token ids; 0 in padding."""
    positions: torch.Tensor
    """int32 [W]: absolute positions, for the rotary embedding; 0 in padding."""
    slots: torch.Tensor
    """int32 [W]: cache slot of each token; the reserved slot in padding."""
    rows: torch.Tensor
    """int32 [W]: row of each token; -1 in padding."""
    cu_tokens: torch.Tensor
    """int32 [B + 1]: row b's window is packed positions `cu_tokens[b]` to `cu_tokens[b + 1]`."""
    base: torch.Tensor
    """int32 [B]: how many cached positions lie before the row's window. Window token j of row b is cached at
    `base[b] + j`."""
    slot_of_row: torch.Tensor
    """int32 [B]: cache slot of each row."""
    ancestors: torch.Tensor | None = None
    """int64 [W]: bit j is set when window token j of the same row is visible. None: a chain, each token sees
    itself and those before it."""
