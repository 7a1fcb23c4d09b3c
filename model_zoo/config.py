"""What a decoder-only transformer is made of, whatever family it comes from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from .errors import UnsupportedModelError
from .rope import RopeConfig

LayerType = Literal["full_attention", "sliding_attention"]
LAYER_TYPES: tuple[LayerType, ...] = ("full_attention", "sliding_attention")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")

SCORINGS = ("softmax", "sigmoid")


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """The mixtures of experts of a model, and how their tokens choose; see `feedforward.route`."""

    layers: tuple[int, ...]
    """Which layers have a mixture."""
    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Of one expert."""
    shared_size: int = 0
    """Intermediate size of the feed-forward that every token takes besides (all shared experts in one); 0: none."""
    shared_gate: bool = False
    """That feed-forward's output is weighted with the sigmoid of a product with the token."""
    scoring: str = "softmax"
    """One of `SCORINGS`: how logits become scores."""
    choice_bias: bool = False
    """A bias per expert counts in the choice of experts, not in their weights."""
    num_groups: int = 1
    """Experts form groups of equal size."""
    groups_per_token: int = 1
    """A token's experts come from so many groups."""
    group_members: int = 1
    """A group is as good as the sum of its best so many scores."""
    normalize: bool = False
    """A token's weights are divided by their sum."""
    normalize_min: float = 0.0
    """What that sum is at least taken for."""
    scale: float = 1.0
    """The weights are multiplied with it."""
    float32_router: bool = False
    """The router's product is computed in float32, whatever the model's type."""
    beside_dense: bool = False
    """Layers with a mixture have their dense feed-forward too, and each of the two norms of its own (Gemma 4)."""

    def __post_init__(self) -> None:
        for name in ("num_experts", "experts_per_token", "intermediate_size", "num_groups", "groups_per_token"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} of the mixture must be a positive integer, got {value!r}")
        if self.scoring not in SCORINGS:
            raise UnsupportedModelError(f"router scoring {self.scoring!r}; supported: {', '.join(SCORINGS)}")
        if self.num_experts % self.num_groups:
            raise ValueError(f"{self.num_experts} experts do not form {self.num_groups} groups of equal size")
        if self.groups_per_token > self.num_groups:
            raise ValueError(f"groups_per_token ({self.groups_per_token}) exceeds num_groups ({self.num_groups})")
        size = self.num_experts // self.num_groups
        if self.experts_per_token > self.groups_per_token * size:
            raise ValueError(
                f"experts_per_token ({self.experts_per_token}) exceeds the {self.groups_per_token * size} experts "
                "that a token may choose from"
            )
        if not 1 <= self.group_members <= size:
            raise ValueError(f"group_members must be 1 to {size}, the size of a group, got {self.group_members}")
        if self.shared_size < 0:
            raise ValueError(f"shared_size must not be negative, got {self.shared_size}")


@dataclass(frozen=True, kw_only=True)
class MlaConfig:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): heads share one cached latent per token."""

    query_rank: int
    """Size of the latent that queries are made from; 0: they are made from the hidden state."""
    kv_rank: int
    """Size of the latent that keys and values are made from."""
    nope_dim: int
    """Dimensions of a query or key that come from its latent."""
    rope_dim: int
    """Dimensions that are rotated; all heads share one such key."""
    value_dim: int
    """Dimensions of a head's values."""
    norm_eps: float = 1e-6
    """Of the latents' norms."""

    def __post_init__(self) -> None:
        for name in ("kv_rank", "nope_dim", "rope_dim", "value_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} of latent attention must be a positive integer, got {value!r}")
        if not isinstance(self.query_rank, int) or self.query_rank < 0:
            raise ValueError(f"query_rank of latent attention must be an integer from 0 on, got {self.query_rank!r}")

    @property
    def head_dim(self) -> int:
        """Dimensions of a head's queries before the latent's projection is absorbed."""
        return self.nope_dim + self.rope_dim

    @property
    def cached_dim(self) -> int:
        """Dimensions that are cached per token: the rotated key, then the latent."""
        return self.rope_dim + self.kv_rank


@dataclass(frozen=True, kw_only=True)
class HeadsConfig:
    """The heads of one kind of layer, where kinds differ."""

    num_kv_heads: int
    head_dim: int
    keys_are_values: bool = False
    """Values are made of what keys are made of, before its norm and rotation; they have no projection of their own."""


@dataclass(frozen=True, kw_only=True)
class PerLayerInputConfig:
    """A second, small embedding per token and layer, which each layer adds in at its end (Gemma 3n, Gemma 4)."""

    vocab_size: int
    size: int
    """Of one layer's embedding."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The sizes and choices of one model; a family's `config.py` makes it from a Hugging Face config.json."""

    model_type: str
    """The family's name in the registry."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    """Key heads in the cache: 1 with latent attention."""
    head_dim: int
    """Dimensions of a cached key."""
    norm_eps: float
    max_position_embeddings: int
    """The longest context the model was made for."""
    rope: tuple[tuple[LayerType, RopeConfig], ...]
    """The rotary embedding of each layer type that occurs."""
    layer_types: tuple[LayerType, ...]
    """One per layer."""
    eos_token_ids: tuple[int, ...] = ()
    tie_word_embeddings: bool = False
    """The head's weight is the embedding table."""
    qkv_bias: bool = False
    output_bias: bool = False
    """A bias on the projection that follows attention."""
    output_gate: bool = False
    """What a head attended is weighted with the sigmoid of a projection of the token, as wide as its queries."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """An RMSNorm on every query and key head."""
    norm_unit_offset: bool = False
    """Norms multiply with `1 + weight` (Gemma)."""
    post_norms: bool = False
    """Attention and feed-forward outputs pass one more norm before they are added (Gemma)."""
    activation: str = "silu"
    """One of `ACTIVATIONS`."""
    sliding_window: int = 0
    """Of the `sliding_attention` layers: a token sees itself and the `sliding_window - 1` before it."""
    attention_scale: float
    attention_soft_cap: float = 0.0
    """0 for none."""
    final_soft_cap: float = 0.0
    """0 for none."""
    embedding_scale: float = 1.0
    rope_interleaved: bool = False
    """Rotary pairs are neighbours; otherwise they lie half of the rotated dimensions apart."""
    moe: MoeConfig | None = None
    """None: every layer's feed-forward is dense."""
    mla: MlaConfig | None = None
    """None: heads of keys and values are cached as they are."""
    full_heads: HeadsConfig | None = None
    """The heads of `full_attention` layers; None: as `num_kv_heads` and `head_dim` say, like all others."""
    value_norm: bool = False
    """An RMSNorm without weights on every value head."""
    num_shared_layers: int = 0
    """The last layers have no keys and values: they read those of the last layer of their type that has. All of them,
    in a draft head that reads another model's."""
    shared_mlp_factor: int = 1
    """Those layers' feed-forwards are so many times as wide."""
    layer_scale: bool = False
    """Each layer's output is multiplied with a number."""
    per_layer_input: PerLayerInputConfig | None = None
    num_next_token_layers: int = 0
    """Layers for multi-token prediction that a checkpoint counts on after the last one; no part of the target."""

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for the rotary embedding, got {self.head_dim}")
        if self.norm_eps < 0.0 or self.attention_scale <= 0.0:
            raise ValueError("norm_eps must not be negative and attention_scale must be positive")
        if self.activation not in ACTIVATIONS:
            raise UnsupportedModelError(f"activation {self.activation!r}; supported: {', '.join(ACTIVATIONS)}")
        if len(self.layer_types) != self.num_layers:
            raise ValueError(f"{len(self.layer_types)} layer_types for {self.num_layers} layers")
        unknown = sorted(set(self.layer_types) - set(LAYER_TYPES))
        if unknown:
            raise UnsupportedModelError(f"layer types {unknown}; supported: {', '.join(LAYER_TYPES)}")
        if "sliding_attention" in self.layer_types and self.sliding_window < 1:
            raise ValueError("sliding_attention layers need a positive sliding_window")
        missing = sorted(set(self.layer_types) - set(self.rope_by_type))
        if missing:
            raise ValueError(f"no rotary embedding is given for layer types {missing}")
        for kind, rope in self.rope_by_type.items():
            if rope.dim > (head_dim := self.heads_of_type(kind).head_dim):
                raise ValueError(f"the rotary embedding turns {rope.dim} of {head_dim} dimensions")
        self._check_parts()

    def _check_parts(self) -> None:
        if self.full_heads is not None and self.num_heads % self.full_heads.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of {self.full_heads.num_kv_heads}")
        if not 0 <= self.num_shared_layers <= self.num_layers:
            raise ValueError(f"num_shared_layers must be 0 to {self.num_layers}, got {self.num_shared_layers}")
        alone = set(self.layer_types[self.num_cached_layers :]) - set(self.layer_types[: self.num_cached_layers])
        if alone and self.num_cached_layers:
            raise ValueError(f"no layer has the keys and values that the last ones of type {sorted(alone)} read")
        if self.moe is not None and not set(self.moe.layers) <= set(range(self.num_layers)):
            raise ValueError(f"layers {self.moe.layers} have a mixture, but there are {self.num_layers} layers")
        if self.mla is not None:
            expected = {"num_kv_heads": 1, "head_dim": self.mla.cached_dim, "qk_norm": False, "output_gate": False}
            for name, value in expected.items():
                if getattr(self, name) != value:
                    raise ValueError(f"{name} must be {value} with latent attention, got {getattr(self, name)}")
            if any(rope.dim != self.mla.rope_dim for rope in self.rope_by_type.values()):
                raise ValueError(f"the rotary embedding must turn the {self.mla.rope_dim} dimensions of rope_dim")

    @cached_property
    def rope_by_type(self) -> dict[LayerType, RopeConfig]:
        """The rotary embedding of each layer type."""
        return dict(self.rope)

    @cached_property
    def qkv_size(self) -> int:
        """Rows of the fused projection that follows the attention's norm; see `LayerWeights.qkv`."""
        if self.mla is not None:
            return (self.mla.query_rank or self.num_heads * self.mla.head_dim) + self.mla.cached_dim
        gates = self.num_heads if self.output_gate else 0
        return (self.num_heads + 2 * self.num_kv_heads + gates) * self.head_dim

    @property
    def num_cached_layers(self) -> int:
        """How many layers have keys and values: the first ones."""
        return self.num_layers - self.num_shared_layers

    def cached_layer(self, layer: int) -> int:
        """The layer whose keys and values a layer reads: itself, or the last one of its type that has any; -1 where
        none has.
        """
        if layer < self.num_cached_layers:
            return layer
        return self.last_cached_layer(self.layer_types[layer])

    def last_cached_layer(self, kind: LayerType) -> int:
        """The last layer of a type that has keys and values; -1 where there is none."""
        owners = [layer for layer in range(self.num_cached_layers) if self.layer_types[layer] == kind]
        return owners[-1] if owners else -1

    def heads_of_type(self, kind: LayerType) -> HeadsConfig:
        """The heads of the layers of one type."""
        if kind == "full_attention" and self.full_heads is not None:
            return self.full_heads
        return HeadsConfig(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)

    def heads_of_layer(self, layer: int) -> HeadsConfig:
        """The heads of a layer."""
        return self.heads_of_type(self.layer_types[layer])

    def has_mixture(self, layer: int) -> bool:
        """Whether the layer's feed-forward is a mixture of experts."""
        return self.moe is not None and layer in self.moe.layers

    def dense_size(self, layer: int) -> int:
        """Intermediate size of the layer's dense feed-forward, or of its shared experts; 0: it has none."""
        if self.moe is not None and layer in self.moe.layers and not self.moe.beside_dense:
            return self.moe.shared_size
        return self.intermediate_size * (1 if layer < self.num_cached_layers else self.shared_mlp_factor)

    def window_of_layer(self, layer: int) -> int:
        """The layer's sliding window; 0 for full attention."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else 0
