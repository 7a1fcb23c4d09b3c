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
    head_dim: int
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
        for rope in self.rope_by_type.values():
            if rope.dim > self.head_dim:
                raise ValueError(f"the rotary embedding turns {rope.dim} of {self.head_dim} dimensions")

    @cached_property
    def rope_by_type(self) -> dict[LayerType, RopeConfig]:
        """The rotary embedding of each layer type."""
        return dict(self.rope)

    @cached_property
    def qkv_size(self) -> int:
        """Rows of the fused query, key and value projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def window_of_layer(self, layer: int) -> int:
        """The layer's sliding window; 0 for full attention."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else 0
