"""The EAGLE-1 and -2 head as functions of tensors."""

from __future__ import annotations

from typing import Any

import torch

from ...kernels.eh_norm import eh_norm
from ...kernels.linear import linear
from ...kernels.project_logits import project_logits
from ...kernels.window import Window
from ..decoder import CompileRegion, DecoderModel, DecoderWeights, KvCache, LayerWeights, decoder_layer, identity
from .config import EagleConfig


def first_layer(
    tokens: torch.Tensor,
    rows: torch.Tensor,
    embedding: torch.Tensor,
    hidden: torch.Tensor,
    states: torch.Tensor | None,
    fc: torch.Tensor,
    fc_bias: torch.Tensor | None,
    *layer: Any,
) -> torch.Tensor:
    """The projection fc([embedding, feature]), and the layer without its first norm (Li et al. 2024, section 4.1).

    Args:
        tokens: int32 [W].
        rows: int32 [W], -1 in padding.
        embedding: [V, H].
        hidden: [N, H].
        states: int32 [W] into `hidden`, or None.
        fc: [H, 2H].
        fc_bias: [H].
        layer: what `decoder_layer` takes after the hidden states.

    Returns:
        [W, H].
    """
    return decoder_layer(linear(eh_norm(tokens, rows, embedding, hidden, states), fc, fc_bias), *layer)


class EagleModel:
    """An EAGLE-1 or -2 head: a `DraftHead` whose output goes to the target's head, and back to itself."""

    target_ids = None
    mask_token = 0
    mask_state = None

    def __init__(
        self,
        config: EagleConfig,
        target: DecoderModel,
        *,
        embedding: torch.Tensor,
        fc: torch.Tensor,
        fc_bias: torch.Tensor | None,
        layers: tuple[LayerWeights, ...],
        head: torch.Tensor | None = None,
        max_positions: int,
        compile_region: CompileRegion = identity,
    ) -> None:
        """Takes the weights as they were loaded.

        Args:
            config: of the head.
            target: whose logits it uses, unless `head` is given.
            embedding: [V, H].
            fc: [H, 2H].
            fc_bias: [H].
            layers: the first without a norm before attention.
            head: [V, H], a head of its own.
            max_positions: the longest context that will be used.
            compile_region: see `DecoderModel`.
        """
        self.config, self._target = config, target
        self.layers = config.layers
        self.device, self.dtype = target.device, target.dtype
        self.state_size = config.target_hidden_size
        self._embedding, self._fc, self._fc_bias, self._head = embedding, fc, fc_bias, head
        # It has no final norm: `forward` of this model is never run.
        weights = DecoderWeights(embedding, layers, embedding.new_ones(config.layers.hidden_size), embedding)
        self._decoder = DecoderModel(config.layers, weights, max_positions=max_positions, compile_region=compile_region)
        self._first = compile_region(first_layer)
        self._layer = compile_region(decoder_layer)

    def allocate_cache(self, slots: int, context: int) -> KvCache:
        """See `DecoderModel.allocate_cache`."""
        return self._decoder.allocate_cache(slots, context)

    def read_target(
        self, window: Window, hidden: torch.Tensor, states: torch.Tensor | None, cache: KvCache
    ) -> torch.Tensor:
        """See `DraftHead.read_target`; `hidden` is the target's last, after its final norm."""
        hidden = self._first(
            window.tokens,
            window.rows,
            self._embedding,
            hidden,
            states,
            self._fc,
            self._fc_bias,
            *self._decoder.layer_arguments(0, window, cache),
        )
        for index in range(1, self.config.layers.num_layers):
            hidden = self._layer(hidden, *self._decoder.layer_arguments(index, window, cache))
        return hidden

    def read_own(self, window: Window, hidden: torch.Tensor, cache: KvCache) -> torch.Tensor:
        """See `DraftHead.read_own`: its own output stands in for the target's."""
        return self.read_target(window, hidden, None, cache)

    def read_out(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DraftHead.read_out`: both are of the layer's output, which no norm follows."""
        if self._head is None:
            return hidden, self._target.logits(hidden)
        logits = hidden.new_empty((hidden.shape[0], self.config.vocab_size))
        project_logits(hidden, self._head, 0.0, logits)
        return hidden, logits
