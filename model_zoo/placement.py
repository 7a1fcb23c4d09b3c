"""Where the tensors of a checkpoint go in the fused weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ..kernels.linear import pack_weight
from .config import DecoderConfig, MlaConfig, MoeConfig
from .weights import DecoderWeights, LatentWeights, LayerWeights, MixtureWeights, PerLayerInputWeights

_MATRICES = frozenset(
    {
        "qkv",
        "output",
        "gate_up",
        "down",
        "head",
        "latent.query",
        "mixture.router",
        "layer_input.gate",
        "layer_input.projection",
        "layer_projection",
    }
)


_PARTS: dict[str, type[Any]] = {
    "latent": LatentWeights,
    "mixture": MixtureWeights,
    "layer_input": PerLayerInputWeights,
}
"""Fields of `LayerWeights` that have fields of their own."""


class Placement(NamedTuple):
    """Rows of one weight."""

    field: str
    """Of `LayerWeights`, with a dot inside one of its parts, or of `DecoderWeights` where `layer` is None."""
    layer: int | None
    start: int
    """The first row."""
    shape: tuple[int, ...]
    """In the checkpoint; all but the last dimension count the rows, or the first where there is one only."""
    stack: int = 0
    """The weight is a stack of so many matrices, one below the other; 0: it is a plain one."""
    dtype: torch.dtype | None = None
    """Of the weight; None: that of the model."""
    factor: float = 1.0
    """What the checkpoint's numbers are multiplied with."""
    pairs: tuple[int, int] | None = None
    """Blocks of so many rows go in turns to `start` and to a second row that is given here; None: all to `start`."""

    @property
    def rows(self) -> int:
        """How many rows."""
        return math.prod(self.shape[:-1]) if len(self.shape) > 1 else self.shape[0]


def decoder_placements(
    config: DecoderConfig, layer_norms: Mapping[str, str], *, fused_experts: bool = False
) -> dict[str, Placement]:
    """Every tensor of a checkpoint by name.

    Args:
        config: of the model.
        layer_norms: the family's names of the norms, and their fields of `LayerWeights`.
        fused_experts: all experts of a mixture lie in two tensors; otherwise each has three of its own.
    """
    hidden = config.hidden_size
    placements = {
        "model.embed_tokens.weight": Placement("embedding", None, 0, (config.vocab_size, hidden)),
        "model.norm.weight": Placement("final_norm", None, 0, (hidden,)),
    }
    if not config.tie_word_embeddings:
        placements["lm_head.weight"] = Placement("head", None, 0, (config.vocab_size, hidden))
    if config.per_layer_input is not None:
        size = config.num_layers * config.per_layer_input.size
        table, projection = (config.per_layer_input.vocab_size, size), (size, hidden)
        norm = (config.per_layer_input.size,)
        placements |= {
            "model.embed_tokens_per_layer.weight": Placement("layer_embedding", None, 0, table),
            "model.per_layer_model_projection.weight": Placement("layer_projection", None, 0, projection),
            "model.per_layer_projection_norm.weight": Placement("layer_projection_norm", None, 0, norm),
        }
    for layer in range(config.num_layers):
        parts = [_heads(config, layer) if config.mla is None else _latent(config, config.mla, layer)]
        dense = "mlp"
        if config.moe is not None and config.has_mixture(layer):
            parts.append(_mixture(config, config.moe, layer, fused_experts))
            dense = "mlp" if config.moe.beside_dense else "mlp.shared_experts"
        if config.dense_size(layer):
            parts.append(_gated(config, layer, dense, config.dense_size(layer)))
        parts.append(_ending(config, layer))
        for part in parts:
            placements |= {f"model.layers.{layer}.{name}": placement for name, placement in part}
        for name, field in layer_norms.items():
            placements[f"model.layers.{layer}.{name}.weight"] = Placement(field, layer, 0, (hidden,))
    return placements


_Parts = Iterator[tuple[str, Placement]]


def _linear(name: str, field: str, layer: int, start: int, shape: tuple[int, int], bias: bool) -> _Parts:
    yield f"{name}.weight", Placement(field, layer, start, shape)
    if bias:
        yield f"{name}.bias", Placement(f"{field}_bias", layer, start, shape[:1])


def _heads(config: DecoderConfig, layer: int) -> _Parts:
    hidden, heads = config.hidden_size, config.heads_of_layer(layer)
    queries, keys = config.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    owner = config.cached_layer(layer) == layer
    if config.output_gate:
        # Of each head the query's rows, then the gate's.
        pairs, shape = (heads.head_dim, queries + 2 * keys), (2 * queries, hidden)
        yield "self_attn.q_proj.weight", Placement("qkv", layer, 0, shape, pairs=pairs)
    else:
        yield from _linear("self_attn.q_proj", "qkv", layer, 0, (queries, hidden), config.qkv_bias)
    if owner:
        yield from _linear("self_attn.k_proj", "qkv", layer, queries, (keys, hidden), config.qkv_bias)
    if owner and not heads.keys_are_values:
        yield from _linear("self_attn.v_proj", "qkv", layer, queries + keys, (keys, hidden), config.qkv_bias)
    yield from _linear("self_attn.o_proj", "output", layer, 0, (hidden, queries), config.output_bias)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", Placement("query_norm", layer, 0, (heads.head_dim,))
        if owner:
            yield "self_attn.k_norm.weight", Placement("key_norm", layer, 0, (heads.head_dim,))


def _latent(config: DecoderConfig, mla: MlaConfig, layer: int) -> _Parts:
    hidden, heads, bias = config.hidden_size, config.num_heads, config.qkv_bias
    queries, rank = heads * mla.head_dim, mla.query_rank
    if rank:
        yield from _linear("self_attn.q_a_proj", "qkv", layer, 0, (rank, hidden), bias)
        yield "self_attn.q_a_layernorm.weight", Placement("query_norm", layer, 0, (rank,))
        yield "self_attn.q_b_proj.weight", Placement("latent.query", layer, 0, (queries, rank))
    else:
        yield "self_attn.q_proj.weight", Placement("qkv", layer, 0, (queries, hidden))
    compressed = (mla.kv_rank + mla.rope_dim, hidden)
    yield from _linear("self_attn.kv_a_proj_with_mqa", "qkv", layer, rank or queries, compressed, bias)
    yield "self_attn.kv_a_layernorm.weight", Placement("key_norm", layer, 0, (mla.kv_rank,))
    expanded = (heads * (mla.nope_dim + mla.value_dim), mla.kv_rank)
    yield "self_attn.kv_b_proj.weight", Placement("latent.key_value", layer, 0, expanded, stack=heads)
    yield from _linear("self_attn.o_proj", "output", layer, 0, (hidden, heads * mla.value_dim), config.output_bias)


def _gated(config: DecoderConfig, layer: int, name: str, size: int) -> _Parts:
    hidden, bias = config.hidden_size, config.mlp_bias
    yield from _linear(f"{name}.gate_proj", "gate_up", layer, 0, (size, hidden), bias)
    yield from _linear(f"{name}.up_proj", "gate_up", layer, size, (size, hidden), bias)
    yield from _linear(f"{name}.down_proj", "down", layer, 0, (hidden, size), bias)


def _mixture(config: DecoderConfig, moe: MoeConfig, layer: int, fused: bool) -> _Parts:
    hidden, size, experts = config.hidden_size, moe.intermediate_size, moe.num_experts
    single = torch.float32 if moe.float32_router else None
    yield "mlp.gate.weight", Placement("mixture.router", layer, 0, (experts, hidden), dtype=single)
    if moe.choice_bias:
        bias = Placement("mixture.choice_bias", layer, 0, (experts,), dtype=torch.float32)
        yield "mlp.gate.e_score_correction_bias", bias
    if moe.beside_dense:
        norm = Placement("mixture.router_norm", layer, 0, (hidden,), factor=hidden**-0.5)
        yield "mlp.gate.scale", norm
        scale = Placement("mixture.expert_scale", layer, 0, (experts,), dtype=torch.float32)
        yield "mlp.gate.per_expert_scale", scale
        yield "pre_feedforward_layernorm_2.weight", Placement("mixture.norm", layer, 0, (hidden,))
        yield "post_feedforward_layernorm_2.weight", Placement("mixture.post_norm", layer, 0, (hidden,))
        yield "post_feedforward_layernorm_1.weight", Placement("dense_post_norm", layer, 0, (hidden,))
    if moe.shared_gate:
        yield "mlp.shared_expert_gate.weight", Placement("mixture.shared_gate", layer, 0, (1, hidden))
    up, down = "mixture.gate_up", "mixture.down"
    if fused:
        yield "mlp.experts.gate_up_proj", Placement(up, layer, 0, (experts, 2 * size, hidden), stack=experts)
        yield "mlp.experts.down_proj", Placement(down, layer, 0, (experts, hidden, size), stack=experts)
        return
    for index in range(experts):
        name, first = f"mlp.experts.{index}", 2 * size * index
        yield f"{name}.gate_proj.weight", Placement(up, layer, first, (size, hidden), stack=experts)
        yield f"{name}.up_proj.weight", Placement(up, layer, first + size, (size, hidden), stack=experts)
        yield f"{name}.down_proj.weight", Placement(down, layer, hidden * index, (hidden, size), stack=experts)


def _ending(config: DecoderConfig, layer: int) -> _Parts:
    hidden = config.hidden_size
    if config.per_layer_input is not None:
        size = config.per_layer_input.size
        yield "per_layer_input_gate.weight", Placement("layer_input.gate", layer, 0, (size, hidden))
        yield "per_layer_projection.weight", Placement("layer_input.projection", layer, 0, (hidden, size))
        yield "post_per_layer_input_norm.weight", Placement("layer_input.norm", layer, 0, (hidden,))
    if config.layer_scale:
        yield "layer_scalar", Placement("scale", layer, 0, (1,))


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
            self._rows[key] = self._rows.get(key, 0) + placement.rows
        self._weights: dict[tuple[int | None, str], torch.Tensor] = {}
        # Unpacked matrices whose packed copy is made, for the next layer to use: freed and allocated anew,
        # they would leave holes in the heap.
        self._spare: dict[tuple[tuple[int, ...], torch.dtype], list[torch.Tensor]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Casts a tensor into its place."""
        placement = self._placements[name]
        key = (placement.layer, placement.field)
        dtype = placement.dtype or self._dtype
        trailing = placement.shape[-1:] if len(placement.shape) > 1 else ()
        if key not in self._weights:
            shape = (self._rows[key], *trailing)
            spare = self._spare.get((shape, dtype))
            self._weights[key] = spare.pop() if spare else torch.empty(shape, dtype=dtype, device=self._device)
        rows = tensor.reshape(placement.rows, *trailing)
        if placement.factor != 1.0:
            rows = rows * placement.factor
        if placement.pairs is None:
            self._weights[key].narrow(0, placement.start, placement.rows).copy_(rows)
        else:
            size, second = placement.pairs
            blocks = rows.unflatten(0, (-1, 2, size))
            for start, part in ((placement.start, blocks[:, 0]), (second, blocks[:, 1])):
                self._weights[key].narrow(0, start, placement.rows // 2).copy_(part.flatten(0, 1))
        self._missing[key] -= 1
        if self._missing[key]:
            return
        plain = self._weights[key]
        if placement.stack:
            self._weights[key] = plain.unflatten(0, (placement.stack, -1))
        elif placement.field in _MATRICES:
            self._weights[key] = pack_weight(plain)
            if self._weights[key] is not plain:
                self._spare.setdefault((tuple(plain.shape), dtype), []).append(plain)

    def layer_fields(self) -> list[dict[str, Any]]:
        """The fields of each layer's `LayerWeights`; every tensor must have been added."""
        layers: list[dict[str, Any]] = [{"gate_up": None, "down": None} for _ in range(self._config.num_layers)]
        for (layer, field), weight in self._weights.items():
            if layer is not None:
                part, _, inner = field.rpartition(".")
                (layers[layer].setdefault(part, {}) if part else layers[layer])[inner] = weight
        for fields in layers:
            for part, kind in _PARTS.items():
                if part in fields:
                    fields[part] = kind(**fields[part])
        return layers

    def build(self) -> DecoderWeights:
        """The finished weights; every tensor must have been added."""
        self._spare.clear()
        embedding = self._weights[None, "embedding"]
        tied = self._config.tie_word_embeddings
        return DecoderWeights(
            embedding=embedding,
            layers=tuple(LayerWeights(**fields) for fields in self.layer_fields()),
            final_norm=self._weights[None, "final_norm"],
            head=pack_weight(embedding) if tied else self._weights[None, "head"],
            layer_embedding=self._weights.get((None, "layer_embedding")),
            layer_projection=self._weights.get((None, "layer_projection")),
            layer_projection_norm=self._weights.get((None, "layer_projection_norm")),
        )
