"""What a draft head that reads the target's hidden states is to the engine."""

from __future__ import annotations

from typing import Protocol

import torch

from ..kernels.window import Window
from .config import DecoderConfig
from .decoder import KvCache
from .draft_config import HeadConfig


class StateReader(Protocol):
    """A drafter that reads the target's hidden states and has a KV cache of its own."""

    @property
    def config(self) -> HeadConfig:
        """What it reads of the target, and what it writes."""

    layers: DecoderConfig
    """Its decoder layers."""
    device: torch.device
    dtype: torch.dtype
    state_size: int
    """Columns of the target's hidden states side by side, as the head reads them."""
    target_ids: torch.Tensor | None
    """int32 [Vd], the target's id of each token that it can draft; None where it can draft all of them."""
    mask_token: int
    """What stands in for tokens that are not known, where it drafts in parallel."""
    mask_state: torch.Tensor | None
    """[state_size], what stands in for hidden states that are not known; None where it does not draft in parallel."""

    def allocate_cache(self, slots: int, context: int) -> KvCache:
        """Allocates zeroed keys and values; see `DecoderModel.allocate_cache`."""


class DraftHead(StateReader, Protocol):
    """EAGLE's heads, and multi-token prediction modules.

    Position j of its cache holds what it made of the target's hidden state at j and token j + 1. A head whose config
    says `reads_target_cache` has none, and every `cache` below is the target's, which it only reads.
    """

    def read_target(
        self, window: Window, hidden: torch.Tensor, states: torch.Tensor | None, cache: KvCache
    ) -> torch.Tensor:
        """Runs tokens beside hidden states of the target.

        Args:
            window: the tokens, each the one after its position.
            hidden: [N, state_size], of the target.
            states: int32 [W], the row of `hidden` that each token reads; None: row w is token w's.
            cache: written to.

        Returns:
            [W, hidden].
        """

    def read_own(self, window: Window, hidden: torch.Tensor, cache: KvCache) -> torch.Tensor:
        """Runs drafted tokens beside what the head made of the ones before: [W, hidden] to [W, hidden]."""

    def read_out(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a forward's output, what `read_own` takes for the next token, [W, hidden], and the logits, [W, Vd]."""


class ModularHead(DraftHead, Protocol):
    """A head of one or several modules, each applied at a step of its own (DeepSeek-V3, section 2.2).

    Module i's input at position j is what module i - 1 made there, the target's hidden state for the first, and token
    j + 1 + i. All modules keep their keys and values at position j.
    """

    num_modules: int

    def read_own(self, window: Window, hidden: torch.Tensor, cache: KvCache, module: int = 0) -> torch.Tensor:
        """Runs one module: [W, hidden] to [W, hidden]."""

    def feedback(self, hidden: torch.Tensor, module: int) -> torch.Tensor:
        """Of a module's output, what the next module takes, [W, hidden]."""

    def logits(self, hidden: torch.Tensor, module: int) -> torch.Tensor:
        """The logits of what `feedback` gave, [W, V]."""
