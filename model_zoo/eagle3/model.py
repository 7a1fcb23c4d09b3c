"""The EAGLE-3 head as functions of tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...kernels.eh_norm import eh_norm
from ...kernels.linear import linear
from ...kernels.project_logits import project_logits
from ...kernels.rms_norm import rms_norm
from ...kernels.window import Window
from ..decoder import CompileRegion, DecoderModel, DecoderWeights, KvCache, LayerWeights, decoder_layer, identity
from .config import Eagle3Config


class Eagle3Weights(NamedTuple):
    """The whole head."""

    embedding: torch.Tensor
    """[V, H]."""
    pair_norms: torch.Tensor
    """[2, H]: of the embedding, and of the hidden state."""
    layers: tuple[LayerWeights, ...]
    """The first without a norm before attention, and with 2H columns in `qkv`."""
    final_norm: torch.Tensor
    """[H]."""
    head: torch.Tensor | None
    """[Vd, H]; None: the target's."""
    fc: torch.Tensor | None = None
    """[H, n * Ht]."""
    fc_bias: torch.Tensor | None = None
    input_norm: torch.Tensor | None = None
    """[n * Ht]."""
    fc_norms: torch.Tensor | None = None
    """[n, Ht]."""


def combine(
    hidden: torch.Tensor,
    states: torch.Tensor | None,
    input_norm: torch.Tensor | None,
    fc_norms: torch.Tensor | None,
    fc: torch.Tensor | None,
    fc_bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """One hidden state of the head's size from those of the target.

    Args:
        hidden: [N, n * Ht].
        states: int32 [W] into `hidden`, or None.
        input_norm: [n * Ht], over all of them.
        fc_norms: [n, Ht], over each of them.
        fc: [H, n * Ht]; None where n * Ht is H.
        fc_bias: [H].
        eps: of the norms.

    Returns:
        [W, H].
    """
    if states is not None:
        hidden = hidden.index_select(0, states)
    if input_norm is not None:
        hidden = rms_norm(hidden, input_norm, eps)
    if fc_norms is not None:
        hidden = rms_norm(hidden.unflatten(1, fc_norms.shape), fc_norms, eps).flatten(1)
    return hidden if fc is None else linear(hidden, fc, fc_bias)


def first_layer(
    tokens: torch.Tensor,
    rows: torch.Tensor,
    embedding: torch.Tensor,
    hidden: torch.Tensor,
    pair_norms: torch.Tensor,
    eps: float,
    norm_before_residual: bool,
    *layer: Any,
) -> torch.Tensor:
    """The layer whose attention reads [norm(embedding), norm(hidden)], and whose residual is `hidden`.

    Args:
        tokens: int32 [W].
        rows: int32 [W], -1 in padding.
        embedding: [V, H].
        hidden: [W, H].
        pair_norms: [2, H].
        eps: of the norms.
        norm_before_residual: the residual is the normalised hidden state.
        layer: what `decoder_layer` takes after the hidden states.

    Returns:
        [W, H].
    """
    pairs = eh_norm(tokens, rows, embedding, hidden, norms=pair_norms, eps=eps)
    residual = pairs[:, hidden.shape[1] :] if norm_before_residual else hidden
    return decoder_layer(residual, *layer, attention_input=pairs)  # type: ignore[misc]


class Eagle3Model:
    """An EAGLE-3, EAGLE-3.1 or P-EAGLE head: a `DraftHead`."""

    def __init__(
        self,
        config: Eagle3Config,
        target: DecoderModel,
        weights: Eagle3Weights,
        *,
        target_ids: torch.Tensor | None = None,
        mask_state: torch.Tensor | None = None,
        max_positions: int,
        compile_region: CompileRegion = identity,
    ) -> None:
        """Takes the weights as they were loaded.

        Args:
            config: of the head.
            target: whose logits it uses where it has no head of its own.
            weights: of the head.
            target_ids: int32 [Vd]; None where it drafts all of the target's tokens.
            mask_state: [n * Ht], for drafting in parallel.
            max_positions: the longest context that will be used.
            compile_region: see `DecoderModel`.
        """
        self.config, self._target, self._weights = config, target, weights
        self.layers = config.layers
        self.device, self.dtype = target.device, target.dtype
        self.state_size = config.state_size
        self.target_ids, self.mask_state, self.mask_token = target_ids, mask_state, config.mask_token or 0
        head = weights.head if weights.head is not None else target.weights.head
        layers = DecoderWeights(weights.embedding, weights.layers, weights.final_norm, head)
        self._decoder = DecoderModel(config.layers, layers, max_positions=max_positions, compile_region=compile_region)
        self._combine = compile_region(combine)
        self._first = compile_region(first_layer)
        self._layer = compile_region(decoder_layer)
        self._norm = compile_region(rms_norm)

    def allocate_cache(self, slots: int, context: int) -> KvCache:
        """See `DecoderModel.allocate_cache`."""
        return self._decoder.allocate_cache(slots, context)

    def read_target(
        self, window: Window, hidden: torch.Tensor, states: torch.Tensor | None, cache: KvCache
    ) -> torch.Tensor:
        """See `DraftHead.read_target`."""
        w = self._weights
        combined = self._combine(hidden, states, w.input_norm, w.fc_norms, w.fc, w.fc_bias, self.config.layers.norm_eps)
        return self.read_own(window, combined, cache)

    def read_own(self, window: Window, hidden: torch.Tensor, cache: KvCache) -> torch.Tensor:
        """See `DraftHead.read_own`."""
        hidden = self._first(
            window.tokens,
            window.rows,
            self._weights.embedding,
            hidden,
            self._weights.pair_norms,
            self.config.layers.norm_eps,
            self.config.norm_before_residual,
            *self._decoder.layer_arguments(0, window, cache),
        )
        for index in range(1, self.config.layers.num_layers):
            hidden = self._layer(hidden, *self._decoder.layer_arguments(index, window, cache))
        return hidden

    def read_out(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DraftHead.read_out`: logits come after the final norm, and so does the feedback with `norm_output`."""
        normed = self._norm(hidden, self._weights.final_norm, self.config.layers.norm_eps)
        feedback = normed if self.config.norm_output else hidden
        if self._weights.head is None:
            return feedback, self._target.logits(normed)
        logits = normed.new_empty((normed.shape[0], self.config.draft_vocab_size))
        project_logits(normed, self._weights.head, 0.0, logits)
        return feedback, logits
