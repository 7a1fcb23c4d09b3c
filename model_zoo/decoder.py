"""The decoder that all families share: weights as plain tensors, the layer as a free function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..kernels.embed_tokens import embed_tokens
from ..kernels.linear import linear
from ..kernels.project_logits import project_logits
from ..kernels.rms_norm import rms_norm
from ..kernels.rope_and_cache import rope_and_cache
from ..kernels.window import Window
from ..kernels.window_attention import window_attention
from .config import DecoderConfig
from .rope import rope_tables

CACHE_BLOCK = 64
"""A cache holds a multiple of it."""
WINDOW_OVERHANG = 64
"""How many positions past the context a window may reach: its last drafts, which commit then cuts off."""

CompileRegion = Callable[[Callable[..., Any]], Callable[..., Any]]


class LayerWeights(NamedTuple):
    """One layer. Matrices are [out, in], as `kernels.linear` takes them."""

    attention_norm: torch.Tensor
    """[hidden]."""
    qkv: torch.Tensor
    """[(Hq + 2 Hkv) * D, hidden]: queries, keys, values."""
    output: torch.Tensor
    """[hidden, Hq * D]."""
    mlp_norm: torch.Tensor
    """[hidden]."""
    gate_up: torch.Tensor
    """[2 * intermediate, hidden]: gate, then up."""
    down: torch.Tensor
    """[hidden, intermediate]."""
    qkv_bias: torch.Tensor | None = None
    output_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    query_norm: torch.Tensor | None = None
    """[D]."""
    key_norm: torch.Tensor | None = None
    """[D]."""
    attention_post_norm: torch.Tensor | None = None
    """[hidden], on the attention's output before it is added."""
    mlp_post_norm: torch.Tensor | None = None
    """[hidden], on the feed-forward's output before it is added."""


class DecoderWeights(NamedTuple):
    """The whole model."""

    embedding: torch.Tensor
    """[vocab, hidden]."""
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    """[hidden]."""
    head: torch.Tensor
    """[vocab, hidden]; may be packed, and may be the embedding table."""


class KvCache(NamedTuple):
    """Keys and values of every slot; the last slot is the reserved one."""

    key: torch.Tensor
    """[L, R1, Hkv, S, D]."""
    value: torch.Tensor
    """[L, R1, Hkv, S, D]."""

    def clear(self, slot: int) -> None:
        """Zeroes a slot. A row that ended with values that are not finite must not leave them to the next."""
        self.key[:, slot].zero_()
        self.value[:, slot].zero_()


class LayerConstants(NamedTuple):
    """What of the configuration a layer's graph depends on; layers with equal constants share a graph."""

    num_heads: int
    norm_eps: float
    norm_unit_offset: bool
    activation: str
    attention_scale: float
    sliding_window: int
    soft_cap: float


def identity(function: Callable[..., Any]) -> Callable[..., Any]:
    """The `compile_region` that does not compile."""
    return function


def _activate(gate: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "silu":
        return F.silu(gate)
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")


def decoder_layer(
    hidden: torch.Tensor,
    weights: LayerWeights,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    window: Window,
    constants: LayerConstants,
) -> torch.Tensor:
    """One pre-norm layer: attention, then the gated feed-forward, each added to the residual stream.

    Args:
        hidden: [W, hidden].
        weights: of this layer.
        key_cache: [R1, Hkv, S, D], this layer's, written to.
        value_cache: [R1, Hkv, S, D], this layer's, written to.
        cos: float32 [P, rotary / 2].
        sin: float32 [P, rotary / 2].
        window: the tokens.
        constants: the layer's choices.

    Returns:
        [W, hidden].
    """
    eps, unit_offset = constants.norm_eps, constants.norm_unit_offset
    normed = rms_norm(hidden, weights.attention_norm, eps, unit_offset)
    query = rope_and_cache(
        linear(normed, weights.qkv, weights.qkv_bias),
        weights.query_norm,
        weights.key_norm,
        cos,
        sin,
        window.positions,
        window.slots,
        window.rows,
        window.cu_tokens,
        window.base,
        key_cache,
        value_cache,
        constants.num_heads,
        eps,
        unit_offset,
        False,
    )
    attended = window_attention(
        query,
        key_cache,
        value_cache,
        window.positions,
        window.cu_tokens,
        window.base,
        window.slot_of_row,
        window.ancestors,
        constants.attention_scale,
        constants.sliding_window,
        constants.soft_cap,
    )
    update = linear(attended.flatten(1), weights.output, weights.output_bias)
    if weights.attention_post_norm is not None:
        update = rms_norm(update, weights.attention_post_norm, eps, unit_offset)
    hidden = hidden + update

    normed = rms_norm(hidden, weights.mlp_norm, eps, unit_offset)
    gate, up = linear(normed, weights.gate_up, weights.gate_up_bias).chunk(2, dim=-1)
    update = linear(_activate(gate, constants.activation) * up, weights.down, weights.down_bias)
    if weights.mlp_post_norm is not None:
        update = rms_norm(update, weights.mlp_post_norm, eps, unit_offset)
    return hidden + update


class DecoderModel:
    """A decoder: weights, rotary tables, and the compiled functions."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        *,
        max_positions: int | None = None,
        compile_region: CompileRegion = identity,
    ) -> None:
        """Builds the rotary tables; compiles nothing yet.

        Args:
            config: of the model.
            weights: on the device that the model shall run on.
            max_positions: the longest context that will be used; the model's own by default.
            compile_region: wraps the functions that become one compiled region each, such as
                `partial(torch.compile, fullgraph=True, dynamic=False)`. One graph per width serves all layers
                of one kind.
        """
        self.config = config
        self.weights = weights
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self.max_positions = config.max_position_embeddings if max_positions is None else max_positions
        tables = {
            kind: rope_tables(rope, self.max_positions + WINDOW_OVERHANG, self.device)
            for kind, rope in config.rope_by_type.items()
        }
        self._tables = [tables[kind] for kind in config.layer_types]
        self._constants = [self._layer_constants(layer) for layer in range(config.num_layers)]
        # Rounded to the model's type, as in transformers.
        self._embedding_scale = float(torch.tensor(config.embedding_scale).to(self.dtype))
        self._layer = compile_region(decoder_layer)
        self._norm = compile_region(rms_norm)

    def _layer_constants(self, layer: int) -> LayerConstants:
        config = self.config
        return LayerConstants(
            num_heads=config.num_heads,
            norm_eps=config.norm_eps,
            norm_unit_offset=config.norm_unit_offset,
            activation=config.activation,
            attention_scale=config.attention_scale,
            sliding_window=config.window_of_layer(layer),
            soft_cap=config.attention_soft_cap,
        )

    def allocate_cache(self, slots: int, context: int) -> KvCache:
        """Allocates zeroed keys and values.

        Args:
            slots: how many, the reserved one included.
            context: the most committed tokens of a slot; the cache holds 64 or more positions beyond it.
        """
        if context > self.max_positions:
            raise ValueError(f"context {context} exceeds the rotary tables' {self.max_positions} positions")
        config = self.config
        positions = -(-(context + WINDOW_OVERHANG) // CACHE_BLOCK) * CACHE_BLOCK
        shape = (config.num_layers, slots, config.num_kv_heads, positions, config.head_dim)
        return KvCache(
            torch.zeros(shape, dtype=self.dtype, device=self.device),
            torch.zeros(shape, dtype=self.dtype, device=self.device),
        )

    def forward(self, window: Window, cache: KvCache) -> torch.Tensor:
        """Runs the window's tokens and writes their keys and values; the final norm's output, [W, hidden]."""
        return self.forward_with_aux(window, cache, ())[0]

    def forward_with_aux(
        self, window: Window, cache: KvCache, aux_layers: Sequence[int]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Like `forward`, and also the hidden states that drafters read.

        Args:
            window: the tokens.
            cache: written to.
            aux_layers: indices into transformers' `hidden_states`: 0 is the embedding, i the output of layer
                i - 1, and `num_layers` the final norm's output.

        Returns:
            The final norm's output, and one [W, hidden] per entry of `aux_layers`.
        """
        hidden = self.embed(window.tokens)
        states = {0: hidden}
        for layer in range(self.config.num_layers):
            hidden = self._layer(hidden, *self.layer_arguments(layer, window, cache))
            if layer + 1 in aux_layers:
                states[layer + 1] = hidden
        hidden = self.final_norm(hidden)
        states[self.config.num_layers] = hidden
        return hidden, tuple(states[layer] for layer in aux_layers)

    def forward_range(
        self, hidden: torch.Tensor, window: Window, cache: KvCache, first: int, last: int
    ) -> torch.Tensor:
        """Runs some of the layers, and writes their keys and values.

        Args:
            hidden: [W, hidden], what `embed` gave or the layer before `first` left.
            window: the tokens; their ids are not read.
            cache: written to, at layers `first` to `last - 1`.
            first: the first layer to run, from 0.
            last: the layer to stop before; with `last == first` nothing runs.

        Returns:
            [W, hidden], before the final norm.
        """
        for layer in range(first, last):
            hidden = self._layer(hidden, *self.layer_arguments(layer, window, cache))
        return hidden

    def layer_arguments(self, layer: int, window: Window, cache: KvCache) -> tuple[Any, ...]:
        """What `decoder_layer` takes after the hidden states, for one of the layers."""
        cos, sin = self._tables[layer]
        weights, constants = self.weights.layers[layer], self._constants[layer]
        return weights, cache.key[layer], cache.value[layer], cos, sin, window, constants

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """int32 [W] to [W, hidden], scaled where the model scales."""
        return embed_tokens(tokens, self.weights.embedding, self._embedding_scale)

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """The norm between the last layer and the head, [W, hidden]."""
        return self._norm(hidden, self.weights.final_norm, self.config.norm_eps, self.config.norm_unit_offset)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[W, hidden] to [W, vocab], in the model's type, the final soft cap applied; into `out` if it is given."""
        if out is None:
            out = hidden.new_empty((hidden.shape[0], self.config.vocab_size))
        project_logits(hidden, self.weights.head, self.config.final_soft_cap, out)
        return out
