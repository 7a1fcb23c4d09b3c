"""The DFlash drafter as functions of tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...kernels.linear import linear
from ...kernels.project_logits import project_logits
from ...kernels.rms_norm import rms_norm
from ...kernels.rope_and_cache import rope_and_cache
from ...kernels.window import Window
from ..decoder import CompileRegion, DecoderModel, DecoderWeights, KvCache, LayerWeights, decoder_layer, identity
from .config import DFlashConfig


class ContextWeights(NamedTuple):
    """What makes keys and values of the target's hidden states, for all layers at once."""

    fc: torch.Tensor
    """[H, n * Ht]."""
    fc_bias: torch.Tensor | None
    """[H]."""
    norm: torch.Tensor
    """[H]."""
    key_value: torch.Tensor
    """[2 * L * Hkv * D, H]: the keys of every layer, then the values of every layer."""
    key_value_bias: torch.Tensor | None
    """[2 * L * Hkv * D]."""
    key_norms: torch.Tensor | None
    """[L, 1, D]."""


class DFlashWeights(NamedTuple):
    """The whole drafter."""

    embedding: torch.Tensor
    """[V, H]."""
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    """[H]."""
    head: torch.Tensor | None
    """[Vd, H]; None: the target's."""
    context: ContextWeights
    mask_embedding: torch.Tensor | None = None
    """[H], of the mask token; None: the table's."""


def store_context(
    hidden: torch.Tensor,
    states: torch.Tensor | None,
    weights: ContextWeights,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    window: Window,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_layers: int,
    interleaved: bool,
) -> None:
    """Writes the keys and values of all layers: one product, one norm of all keys, one rotation and write.

    Args:
        hidden: [N, n * Ht], the target's hidden states side by side.
        states: int32 [W] into `hidden`; None: row w is token w's.
        weights: of the drafter.
        eps: of the norms.
        cos: float32 [P, half], by position.
        sin: float32 [P, half].
        window: where the states belong; its tokens are not read.
        key_cache: [R1, L * Hkv, S, D], written to: a layer's heads after those of the layer before.
        value_cache: likewise.
        num_layers: `L`.
        interleaved: see `rope_and_cache`.
    """
    if states is not None:
        hidden = hidden.index_select(0, states)
    context = rms_norm(linear(hidden, weights.fc, weights.fc_bias), weights.norm, eps)
    projected = linear(context, weights.key_value, weights.key_value_bias)
    if weights.key_norms is not None:
        keys, values = projected.chunk(2, 1)
        keys = rms_norm(keys.unflatten(1, (num_layers, -1, key_cache.shape[3])), weights.key_norms, eps)
        projected = torch.cat((keys.flatten(1), values), 1)
    rope_and_cache(
        projected,
        None,
        None,
        cos,
        sin,
        window.positions,
        window.slots,
        window.rows,
        window.cu_tokens,
        window.base,
        key_cache,
        value_cache,
        0,  # no queries: all heads are keys or values
        eps,
        False,
        interleaved,
    )


def put_masks(hidden: torch.Tensor, masked: torch.Tensor, mask_embedding: torch.Tensor) -> torch.Tensor:
    """The queries' embeddings, [W, H], with `mask_embedding`, [H], where `masked`, bool [W]."""
    return torch.where(masked[:, None], mask_embedding, hidden)


def drafting_states(
    hidden: torch.Tensor, weight: torch.Tensor, eps: float, rows: int, queries: int, drafts: int
) -> torch.Tensor:
    """The final norm of what drafts.

    The anchor's query comes first in a row, and drafts where it drafts.

    Args:
        hidden: [W, H], of each row's queries, row after row.
        weight: [H].
        eps: of the norm.
        rows: how many there are.
        queries: of a row.
        drafts: how many of its last queries draft.

    Returns:
        [drafts * rows, H]: draft by draft, all rows of one side by side.
    """
    blocks = hidden[: rows * queries].unflatten(0, (rows, queries))[:, queries - drafts :]
    return rms_norm(blocks.transpose(0, 1).flatten(0, 1), weight, eps)


class DFlashModel:
    """A DFlash drafter: what its context's keys and values are made with, and its layers over a block of queries."""

    mask_state: torch.Tensor | None = None
    """Its masks are tokens: none reads a hidden state."""

    def __init__(
        self,
        config: DFlashConfig,
        target: DecoderModel,
        weights: DFlashWeights,
        *,
        target_ids: torch.Tensor | None = None,
        max_positions: int,
        compile_region: CompileRegion = identity,
        attention_backend: str | None = None,
    ) -> None:
        """Takes the weights as they were loaded.

        Args:
            config: of the drafter.
            target: whose embedding and logits it uses where it has none of its own.
            weights: of the drafter.
            target_ids: int32 [Vd]; None where it drafts all of the target's tokens.
            max_positions: the longest context that will be used.
            compile_region: see `DecoderModel`.
            attention_backend: of its layers, see `DecoderModel`.
        """
        self.config, self._target, self._weights = config, target, weights
        self.layers = config.layers
        self.device, self.dtype = target.device, target.dtype
        self.state_size, self.mask_token, self.target_ids = config.state_size, config.mask_token, target_ids
        head = weights.head if weights.head is not None else target.weights.head
        layers = DecoderWeights(weights.embedding, weights.layers, weights.final_norm, head)
        self._decoder = DecoderModel(
            config.layers,
            layers,
            max_positions=max_positions,
            compile_region=compile_region,
            attention_backend=attention_backend,
        )
        self._shares_embedding = weights.embedding is target.weights.embedding
        self._store = compile_region(store_context)
        self._layer = compile_region(decoder_layer)
        self._put_masks, self._drafting = compile_region(put_masks), compile_region(drafting_states)

    def allocate_cache(self, slots: int, context: int) -> KvCache:
        """See `DecoderModel.allocate_cache`; a slot's layers lie side by side."""
        return self._decoder.allocate_cache(slots, context, by_slot=True)

    def precompute_and_store_context_kv(
        self, window: Window, hidden: torch.Tensor, states: torch.Tensor | None, cache: KvCache
    ) -> None:
        """Writes the keys and values of new context tokens, for all layers in one go.

        They depend on the target's hidden states alone, so they are made once and stay.

        Args:
            window: the positions and slots of the tokens.
            hidden: [N, state_size], of the target.
            states: int32 [W], the row of `hidden` that each token reads; None: row w is token w's.
            cache: written to.
        """
        *_, cos, sin, _, _, _ = self._decoder.layer_arguments(0, window, cache)
        self._store(
            hidden,
            states,
            self._weights.context,
            self.config.layers.norm_eps,
            cos,
            sin,
            window,
            cache.key.transpose(0, 1).flatten(1, 2),
            cache.value.transpose(0, 1).flatten(1, 2),
            self.config.layers.num_layers,
            self.config.layers.rope_interleaved,
        )

    def read_block(self, window: Window, masked: torch.Tensor, cache: KvCache) -> torch.Tensor:
        """Runs the queries of all rows over their context and each other.

        Args:
            window: the queries, `ancestors` saying that all of a row's see each other; causal layers leave it out.
            masked: bool [W], which of them are masks.
            cache: their keys and values are written behind the context's, where the next round's context will lie.

        Returns:
            [W, H], before the final norm.
        """
        weights = self._weights
        hidden = (self._target if self._shares_embedding else self._decoder).embed(window.tokens)
        if weights.mask_embedding is not None:
            hidden = self._put_masks(hidden, masked, weights.mask_embedding)
        chain = window._replace(ancestors=None)
        for index, causal in enumerate(self.config.causal):
            window_of_layer = chain if causal else window
            hidden = self._layer(hidden, *self._decoder.layer_arguments(index, window_of_layer, cache))
        return hidden

    def read_out(self, hidden: torch.Tensor, rows: int, queries: int, drafts: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of what `read_block` gave, `drafting_states`, [N, H], and their logits, [N, Vd]."""
        norm, eps = self._weights.final_norm, self.config.layers.norm_eps
        normed = self._drafting(hidden, norm, eps, rows, queries, drafts)
        if self._weights.head is None:
            return normed, self._target.logits(normed)
        logits = normed.new_empty((normed.shape[0], self.config.draft_vocab_size))
        project_logits(normed, self._weights.head, 0.0, logits)
        return normed, logits
