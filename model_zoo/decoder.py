"""The decoder that all families share: the layer as a free function over the tensors of `weights.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..kernels.linear import linear
from ..kernels.rms_norm import rms_norm
from ..kernels.window import Window
from .attention import head_attention
from .config import DecoderConfig
from .feedforward import gated, mixture
from .mla import latent_attention
from .rope import rope_tables
from .weights import DecoderWeights as DecoderWeights
from .weights import LayerConstants as LayerConstants
from .weights import LayerWeights as LayerWeights
from .weights import RouterConstants

CACHE_BLOCK = 64
"""A cache holds a multiple of it."""
WINDOW_OVERHANG = 64
"""How many positions past the context a window may reach: its last drafts, which commit then cuts off."""

CompileRegion = Callable[[Callable[..., Any]], Callable[..., Any]]


class KvCache(NamedTuple):
    """Keys and values of every slot; the last slot is the reserved one."""

    key: torch.Tensor
    """[L, R1, Hkv, S, D]."""
    value: torch.Tensor
    """[L, R1, Hkv, S, Dv]; Dv is 0 with latent attention, whose values are the last dimensions of its keys."""

    def clear(self, slot: int) -> None:
        """Zeroes a slot. A row that ended with values that are not finite must not leave them to the next."""
        self.key[:, slot].zero_()
        self.value[:, slot].zero_()


def identity(function: Callable[..., Any]) -> Callable[..., Any]:
    """The `compile_region` that does not compile."""
    return function


def feed_forward(x: torch.Tensor, rows: torch.Tensor, weights: LayerWeights, constants: LayerConstants) -> torch.Tensor:
    """The layer's dense feed-forward, its mixture, or the sum of both: [W, hidden] to [W, hidden]."""
    update = None
    if weights.gate_up is not None and weights.down is not None:
        dense = (weights.gate_up, weights.gate_up_bias, weights.down, weights.down_bias)
        update = gated(x, *dense, constants.activation)
    if weights.mixture is not None and constants.router is not None:
        routed = mixture(x, rows, weights.mixture, constants.router, constants.activation)
        update = routed if update is None else routed + update
    assert update is not None, "a layer has a feed-forward, a mixture, or both"
    return update


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
    """One pre-norm layer: attention, then the feed-forward, each added to the residual stream.

    Args:
        hidden: [W, hidden].
        weights: of this layer.
        key_cache: [R1, Hkv, S, D], this layer's, written to.
        value_cache: [R1, Hkv, S, Dv], this layer's, written to.
        cos: float32 [P, rotary / 2].
        sin: float32 [P, rotary / 2].
        window: the tokens.
        constants: the layer's choices.

    Returns:
        [W, hidden].
    """
    eps, unit_offset = constants.norm_eps, constants.norm_unit_offset
    normed = rms_norm(hidden, weights.attention_norm, eps, unit_offset)
    attention = head_attention if weights.latent is None else latent_attention
    attended = attention(normed, weights, key_cache, value_cache, cos, sin, window, constants)
    update = linear(attended, weights.output, weights.output_bias)
    if weights.attention_post_norm is not None:
        update = rms_norm(update, weights.attention_post_norm, eps, unit_offset)
    hidden = hidden + update

    normed = rms_norm(hidden, weights.mlp_norm, eps, unit_offset)
    update = feed_forward(normed, window.rows, weights, constants)
    if weights.mlp_post_norm is not None:
        update = rms_norm(update, weights.mlp_post_norm, eps, unit_offset)
    return hidden + update


def head(hidden: torch.Tensor, weight: torch.Tensor, soft_cap: float) -> torch.Tensor:
    """Logits, [W, hidden] to [W, vocab]; with a soft cap, `cap * tanh(logits / cap)`."""
    logits = linear(hidden, weight)
    if soft_cap == 0.0:
        return logits
    return torch.tanh(logits / soft_cap) * soft_cap


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
        self._head = compile_region(head)

    def _layer_constants(self, layer: int) -> LayerConstants:
        config, router = self.config, None
        if config.moe is not None and config.has_mixture(layer):
            moe = config.moe
            router = RouterConstants(
                experts_per_token=moe.experts_per_token,
                scoring=moe.scoring,
                num_groups=moe.num_groups,
                groups_per_token=moe.groups_per_token,
                group_members=moe.group_members,
                normalize=moe.normalize,
                normalize_min=moe.normalize_min,
                scale=moe.scale,
            )
        return LayerConstants(
            num_heads=config.num_heads,
            norm_eps=config.norm_eps,
            norm_unit_offset=config.norm_unit_offset,
            activation=config.activation,
            attention_scale=config.attention_scale,
            sliding_window=config.window_of_layer(layer),
            soft_cap=config.attention_soft_cap,
            rope_interleaved=config.rope_interleaved,
            latent_norm_eps=0.0 if config.mla is None else config.mla.norm_eps,
            router=router,
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
        shape = (config.num_layers, slots, config.num_kv_heads, positions)
        return KvCache(
            torch.zeros((*shape, config.head_dim), dtype=self.dtype, device=self.device),
            torch.zeros((*shape, config.cached_value_dim), dtype=self.dtype, device=self.device),
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
        hidden = F.embedding(window.tokens, self.weights.embedding)
        if self._embedding_scale != 1.0:
            hidden = hidden * self._embedding_scale
        states = {0: hidden}
        keys, values = cache.key.unbind(0), cache.value.unbind(0)
        for index, weights in enumerate(self.weights.layers):
            cos, sin = self._tables[index]
            hidden = self._layer(
                hidden,
                weights,
                keys[index],
                values[index],
                cos,
                sin,
                window,
                self._constants[index],
            )
            if index + 1 in aux_layers:
                states[index + 1] = hidden
        hidden = self._norm(hidden, self.weights.final_norm, self.config.norm_eps, self.config.norm_unit_offset)
        states[self.config.num_layers] = hidden
        return hidden, tuple(states[layer] for layer in aux_layers)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[W, hidden] to [W, vocab], in the model's type, the final soft cap applied."""
        return self._head(hidden, self.weights.head, self.config.final_soft_cap)
