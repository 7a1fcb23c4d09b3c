"""Prediction modules as functions of tensors."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch

from ...kernels.eh_norm import eh_norm
from ...kernels.linear import linear
from ...kernels.project_logits import project_logits
from ...kernels.rms_norm import rms_norm
from ...kernels.window import Window
from ..config import DecoderConfig
from ..decoder import CompileRegion, DecoderModel, DecoderWeights, KvCache, LayerWeights, decoder_layer, identity
from .config import MtpConfig


class MtpModule(NamedTuple):
    """The weights of one module besides its layer's."""

    embedding: torch.Tensor
    """[V, H]."""
    pair_norms: torch.Tensor
    """[2, H], of the embedding and the hidden state, in the order in which the projection takes them."""
    projection: torch.Tensor
    """[H, 2H]."""
    final_norm: torch.Tensor | None
    """[H], after the layer; None for none."""
    head: torch.Tensor | None
    """[V, H]; None: the target's."""


class PairConstants(NamedTuple):
    """How a module joins its two inputs; see `layout.Layout`."""

    norm_eps: float
    unit_offset: bool
    zeroes_first: bool
    hidden_first: bool


def module_layer(
    tokens: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    embedding: torch.Tensor,
    hidden: torch.Tensor,
    states: torch.Tensor | None,
    pair_norms: torch.Tensor,
    projection: torch.Tensor,
    constants: PairConstants,
    *layer: Any,
) -> torch.Tensor:
    """The projection of both inputs, each normalised, and the layer (DeepSeek-V3, section 2.2, equations 21 and 22).

    Args:
        tokens: int32 [W].
        rows: int32 [W], -1 in padding.
        positions: int32 [W].
        embedding: [V, H].
        hidden: [N, H].
        states: int32 [W] into `hidden`, or None.
        pair_norms: [2, H].
        projection: [H, 2H].
        constants: how the inputs are joined.
        layer: what `decoder_layer` takes after the hidden states.

    Returns:
        [W, H], before the final norm.
    """
    joined = eh_norm(
        tokens,
        rows,
        embedding,
        hidden,
        states,
        norms=pair_norms,
        eps=constants.norm_eps,
        unit_offset=constants.unit_offset,
        zero_positions=positions if constants.zeroes_first else None,
        hidden_first=constants.hidden_first,
    )
    return decoder_layer(linear(joined, projection), *layer)


class MtpModel:
    """Prediction modules: a `ModularHead`. Module i's keys and values are layer i of its cache."""

    target_ids = None
    mask_token = 0
    mask_state = None

    def __init__(
        self,
        config: MtpConfig,
        target: DecoderModel,
        *,
        modules: tuple[MtpModule, ...],
        layers: tuple[LayerWeights, ...],
        max_positions: int,
        compile_region: CompileRegion = identity,
    ) -> None:
        """Takes the weights as they were loaded.

        Args:
            config: of the modules.
            target: whose logits they use, unless they have heads of their own.
            modules: in the order in which they are applied.
            layers: of the modules.
            max_positions: the longest context that will be used.
            compile_region: see `DecoderModel`.
        """
        self.config, self._target, self._modules = config, target, modules
        self.num_modules = config.num_modules
        self.layers = _first_only(config)
        self.device, self.dtype = target.device, target.dtype
        self.state_size = config.target_hidden_size
        # `forward` of this model is never run: a module's output is normalised by its own norm.
        blank = target.weights.embedding.new_ones(config.target_hidden_size)
        weights = DecoderWeights(target.weights.embedding, layers, blank, target.weights.embedding)
        self._decoder = DecoderModel(config.layers, weights, max_positions=max_positions, compile_region=compile_region)
        style = config.style
        self._constants = PairConstants(
            norm_eps=config.layers.norm_eps,
            unit_offset=config.layers.norm_unit_offset,
            zeroes_first=style.zeroes_first,
            hidden_first=style.hidden_first,
        )
        self._run = compile_region(module_layer)
        self._norm = compile_region(rms_norm)

    def allocate_cache(self, slots: int, context: int) -> KvCache:
        """See `DecoderModel.allocate_cache`."""
        return self._decoder.allocate_cache(slots, context)

    def read_target(
        self, window: Window, hidden: torch.Tensor, states: torch.Tensor | None, cache: KvCache
    ) -> torch.Tensor:
        """See `DraftHead.read_target`; `hidden` is the target's last, after its final norm."""
        return self._forward(window, hidden, states, cache, 0)

    def read_own(self, window: Window, hidden: torch.Tensor, cache: KvCache, module: int = 0) -> torch.Tensor:
        """See `ModularHead.read_own`."""
        return self._forward(window, hidden, None, cache, module)

    def _forward(
        self, window: Window, hidden: torch.Tensor, states: torch.Tensor | None, cache: KvCache, module: int
    ) -> torch.Tensor:
        weights = self._modules[module]
        return self._run(
            window.tokens,
            window.rows,
            window.positions,
            weights.embedding,
            hidden,
            states,
            weights.pair_norms,
            weights.projection,
            self._constants,
            *self._decoder.layer_arguments(module, window, cache),
        )

    def read_out(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DraftHead.read_out`: both come after the final norm."""
        normed = self.feedback(hidden, 0)
        return normed, self.logits(normed, 0)

    def feedback(self, hidden: torch.Tensor, module: int) -> torch.Tensor:
        """See `ModularHead.feedback`."""
        norm = self._modules[module].final_norm
        if norm is None:
            return hidden
        return self._norm(hidden, norm, self._constants.norm_eps, self._constants.unit_offset)

    def logits(self, hidden: torch.Tensor, module: int) -> torch.Tensor:
        """See `ModularHead.logits`."""
        head = self._modules[module].head
        if head is None:
            return self._target.logits(hidden)
        logits = hidden.new_empty((hidden.shape[0], self.config.vocab_size))
        project_logits(hidden, head, 0.0, logits)
        return logits


def _first_only(config: MtpConfig) -> DecoderConfig:
    """The decoder layer of one module, for the floor."""
    layers, moe = config.layers, config.layers.moe
    if moe is not None:
        moe = dataclasses.replace(moe, layers=(0,)) if 0 in moe.layers else None
    return dataclasses.replace(layers, num_layers=1, layer_types=layers.layer_types[:1], moe=moe)
