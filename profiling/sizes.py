"""The sizes of a decoder that decide what its passes read, write and compute, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """One layer. Elements are of the model's type unless said otherwise."""

    matrices: int
    """Elements of the matrices that every token is multiplied with."""
    vectors: int
    """Elements of norms, biases and the like."""
    cached: int
    """Elements of keys and values that attention reads of one token."""
    written: int
    """Elements of keys and values that the layer writes of one token; 0 where it reads another layer's or model's."""
    pair_products: int
    """Multiply-adds of a token and one that it attends to: its score and its part of the sum, over all heads."""
    sliding: int = 0
    """The sliding window; 0 for full attention."""
    num_experts: int = 0
    """0: there is no mixture of experts."""
    experts_per_token: int = 0
    expert_matrices: int = 0
    """Elements of one expert's matrices."""
    float32_matrices: int = 0
    """Like `matrices`, stored in float32 whatever the model's type."""
    float32_vectors: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 0:
                raise ValueError(f"{field.name} must be at least 0, got {getattr(self, field.name)}")
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(f"experts_per_token must be 1 to {self.num_experts}, got {self.experts_per_token}")

    def distinct_experts(self, tokens: float) -> float:
        """How many experts so many tokens choose among them.

        Expected, if tokens choose apart from each other and every expert is as likely: each of E experts is missed by
        one token of k choices with probability 1 - k / E, so `E (1 - (1 - k / E)^tokens)` are chosen. Groups do not
        change that. Tokens that are alike choose fewer, so a real window may read less.
        """
        if not self.num_experts:
            return 0.0
        missed: float = (1.0 - self.experts_per_token / self.num_experts) ** tokens
        return self.num_experts * (1.0 - missed)

    def weight_bytes(self, tokens: float, element: int) -> float:
        """Bytes of weights that a pass over so many tokens reads, of `element` bytes each."""
        chosen = self.distinct_experts(tokens) * self.expert_matrices
        single = 4 * (self.float32_matrices + self.float32_vectors)
        return (self.matrices + self.vectors + chosen) * element + single

    def multiply_adds(self, width: float, tokens: float) -> float:
        """Of the matrices: over all of `width` positions, but of experts over the `tokens` that are no padding."""
        routed = tokens * self.experts_per_token * self.expert_matrices
        return width * (self.matrices + self.float32_matrices) + routed


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """A decoder. The caller makes it from a model's config."""

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSizes, ...]
    layer_inputs: int = 0
    """Elements of a token's embeddings for the layers, in models that have such."""
    layer_input_norm: int = 0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.layers:
            raise ValueError("layers needs at least one layer, got none")

    @classmethod
    def dense(
        cls,
        *,
        vocab_size: int,
        hidden_size: int,
        intermediate_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        windows: tuple[int, ...],
        qkv_bias: bool = False,
        output_bias: bool = False,
        mlp_bias: bool = False,
        qk_norm: bool = False,
        post_norms: bool = False,
    ) -> ModelSizes:
        """A model of layers alike, with heads of keys and values and one gated feed-forward each.

        `windows` has one value per layer: its sliding window, 0 for full attention.
        """
        sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        for name, value in {**sizes, "intermediate_size": intermediate_size}.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not windows or min(windows) < 0:
            raise ValueError(f"windows needs one value of at least 0 per layer, got {windows}")
        vectors = 2 * hidden_size
        vectors += qkv_bias * (num_heads + 2 * num_kv_heads) * head_dim
        vectors += output_bias * hidden_size
        vectors += mlp_bias * (2 * intermediate_size + hidden_size)
        vectors += qk_norm * 2 * head_dim + post_norms * 2 * hidden_size
        attention = hidden_size * head_dim * (2 * num_heads + 2 * num_kv_heads)
        layers = tuple(
            LayerSizes(
                matrices=attention + 3 * hidden_size * intermediate_size,
                vectors=vectors,
                cached=2 * num_kv_heads * head_dim,
                written=2 * num_kv_heads * head_dim,
                pair_products=2 * num_heads * head_dim,
                sliding=sliding,
            )
            for sliding in windows
        )
        return cls(vocab_size=vocab_size, hidden_size=hidden_size, layers=layers)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def head(self) -> int:
        """Elements of the head, read whole by every verify. A tied embedding is read here, as the head."""
        return self.vocab_size * self.hidden_size

    @property
    def input_matrices(self) -> int:
        """Elements of what projects the embedding to the layers' own, in models that have such."""
        return self.layer_inputs * self.hidden_size

    @property
    def kv_per_token(self) -> int:
        """Elements of the keys and values that are kept of one token."""
        return sum(layer.written for layer in self.layers)
