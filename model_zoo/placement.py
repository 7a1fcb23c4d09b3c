"""Where the tensors of a checkpoint go in the fused weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from ..kernels.linear import pack_weight
from .config import DecoderConfig
from .decoder import DecoderWeights, LayerWeights

_MATRICES = frozenset({"qkv", "output", "gate_up", "down", "head"})


class Placement(NamedTuple):
    """Rows of one weight."""

    field: str
    """Of `LayerWeights`, or of `DecoderWeights` where `layer` is None."""
    layer: int | None
    start: int
    """The first row."""
    shape: tuple[int, ...]
    """In the checkpoint; the first dimension counts the rows."""


def decoder_placements(config: DecoderConfig, layer_norms: Mapping[str, str]) -> dict[str, Placement]:
    """Every tensor of a checkpoint by name.

    Args:
        config: of the model.
        layer_norms: the family's names of the norms, and their fields of `LayerWeights`.
    """
    hidden, intermediate = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    # Per projection: the field, its first row, its shape, and whether it has a bias.
    projections = {
        "self_attn.q_proj": ("qkv", 0, (queries, hidden), config.qkv_bias),
        "self_attn.k_proj": ("qkv", queries, (keys, hidden), config.qkv_bias),
        "self_attn.v_proj": ("qkv", queries + keys, (keys, hidden), config.qkv_bias),
        "self_attn.o_proj": ("output", 0, (hidden, queries), config.output_bias),
        "mlp.gate_proj": ("gate_up", 0, (intermediate, hidden), config.mlp_bias),
        "mlp.up_proj": ("gate_up", intermediate, (intermediate, hidden), config.mlp_bias),
        "mlp.down_proj": ("down", 0, (hidden, intermediate), config.mlp_bias),
    }
    placements = {
        "model.embed_tokens.weight": Placement("embedding", None, 0, (config.vocab_size, hidden)),
        "model.norm.weight": Placement("final_norm", None, 0, (hidden,)),
    }
    if not config.tie_word_embeddings:
        placements["lm_head.weight"] = Placement("head", None, 0, (config.vocab_size, hidden))
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for name, (field, start, shape, has_bias) in projections.items():
            placements[f"{prefix}{name}.weight"] = Placement(field, layer, start, shape)
            if has_bias:
                placements[f"{prefix}{name}.bias"] = Placement(f"{field}_bias", layer, start, shape[:1])
        for name, field in layer_norms.items():
            placements[f"{prefix}{name}.weight"] = Placement(field, layer, 0, (hidden,))
        if config.qk_norm:
            head = (config.head_dim,)
            placements[f"{prefix}self_attn.q_norm.weight"] = Placement("query_norm", layer, 0, head)
            placements[f"{prefix}self_attn.k_norm.weight"] = Placement("key_norm", layer, 0, head)
    return placements


class WeightBuilder:
    """Takes tensors in any order, and packs each fused weight as soon as its last part has come."""

    def __init__(
        self, config: DecoderConfig, placements: Mapping[str, Placement], *, dtype: torch.dtype, device: str
    ) -> None:
        self._config = config
        self._placements = placements
        self._dtype = dtype
        self._device = device
        self._missing: dict[tuple[int | None, str], int] = {}
        self._rows: dict[tuple[int | None, str], int] = {}
        for placement in placements.values():
            key = (placement.layer, placement.field)
            self._missing[key] = self._missing.get(key, 0) + 1
            self._rows[key] = self._rows.get(key, 0) + placement.shape[0]
        self._weights: dict[tuple[int | None, str], torch.Tensor] = {}
        # Unpacked matrices whose packed copy is made, for the next layer to use: freed and allocated anew,
        # they would leave holes in the heap.
        self._spare: dict[tuple[int, ...], list[torch.Tensor]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Casts a tensor into its place."""
        placement = self._placements[name]
        key = (placement.layer, placement.field)
        if key not in self._weights:
            shape = (self._rows[key], *placement.shape[1:])
            spare = self._spare.get(shape)
            self._weights[key] = spare.pop() if spare else torch.empty(shape, dtype=self._dtype, device=self._device)
        self._weights[key].narrow(0, placement.start, placement.shape[0]).copy_(tensor)
        self._missing[key] -= 1
        if self._missing[key] == 0 and placement.field in _MATRICES:
            plain = self._weights[key]
            self._weights[key] = pack_weight(plain)
            if self._weights[key] is not plain:
                self._spare.setdefault(tuple(plain.shape), []).append(plain)

    def build(self) -> DecoderWeights:
        """The finished weights; every tensor must have been added."""
        self._spare.clear()
        layers: list[dict[str, torch.Tensor]] = [{} for _ in range(self._config.num_layers)]
        for (layer, field), weight in self._weights.items():
            if layer is not None:
                layers[layer][field] = weight
        embedding = self._weights[None, "embedding"]
        tied = self._config.tie_word_embeddings
        return DecoderWeights(
            embedding=embedding,
            layers=tuple(LayerWeights(**fields) for fields in layers),
            final_norm=self._weights[None, "final_norm"],
            head=pack_weight(embedding) if tied else self._weights[None, "head"],
        )
