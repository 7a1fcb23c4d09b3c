"""Puts the tensors of a draft head into fused weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from ..kernels.linear import pack_weight
from .config import DecoderConfig
from .decoder import DecoderModel, LayerWeights
from .placement import Placement, WeightBuilder, decoder_placements


def layer_placements(config: DecoderConfig, layer_norms: Mapping[str, str]) -> dict[str, Placement]:
    """The tensors of a head's decoder layers, as in a model of that configuration."""
    placements = decoder_placements(dataclasses.replace(config, tie_word_embeddings=True), layer_norms)
    return {name: placement for name, placement in placements.items() if name.startswith("model.layers.")}


class HeadBuilder(WeightBuilder):
    """A `WeightBuilder` for layers without a model around them, and for single weights."""

    def weight(self, field: str) -> torch.Tensor | None:
        """A weight outside of the layers; None where the checkpoint has none."""
        return self._weights.get((None, field))

    def matrix(self, field: str) -> torch.Tensor | None:
        """Like `weight`, packed for `linear`."""
        weight = self.weight(field)
        return None if weight is None else pack_weight(weight)

    def layers(self) -> tuple[LayerWeights, ...]:
        """The layers; a first layer without a norm before attention has None there."""
        return tuple(LayerWeights(**{"attention_norm": None, **fields}) for fields in self.layer_fields())


def own_or_shared(own: torch.Tensor | None, target: DecoderModel) -> torch.Tensor:
    """The head's embedding table, or the target's where it has none or an equal one."""
    shared = target.weights.embedding
    if own is None or (own.shape == shared.shape and torch.equal(own, shared)):
        return shared
    return own


def own_or_shared_head(own: torch.Tensor | None, target: DecoderModel) -> torch.Tensor | None:
    """The head's projection to the vocabulary, packed; the target's where it has an equal one, None where none."""
    shared = target.weights.head
    if own is not None and own.shape == shared.shape and torch.equal(_plain(own), _plain(shared)):
        return shared
    return own


def _plain(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_dense() if weight.is_mkldnn else weight
