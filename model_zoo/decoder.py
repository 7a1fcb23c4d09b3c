"""The decoder that all families share: the layer as a free function over the tensors of `weights.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..kernels.attention_backends import check_backend
from ..kernels.embed_tokens import embed_tokens
from ..kernels.linear import linear
from ..kernels.project_logits import project_logits
from ..kernels.rms_norm import rms_norm
from ..kernels.window import Window
from .attention import head_attention
from .config import DecoderConfig
from .feedforward import feed_forward
from .mla import latent_attention
from .per_layer import add_layer_input, layer_inputs
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
    """[L, R1, Hkv, S, D], of the layers that have keys and values of their own. Where kinds of layers differ in their
    heads, Hkv and D are the largest, and a layer uses the first of them."""
    value: torch.Tensor
    """[L, R1, Hkv, S, Dv]; Dv is 0 with latent attention, whose values are the last dimensions of its keys."""

    def clear(self, slot: int) -> None:
        """Zeroes a slot. A row that ended with values that are not finite must not leave them to the next."""
        self.key[:, slot].zero_()
        self.value[:, slot].zero_()


def identity(function: Callable[..., Any]) -> Callable[..., Any]:
    """The `compile_region` that does not compile."""
    return function


def decoder_layer(
    hidden: torch.Tensor,
    weights: LayerWeights,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    window: Window,
    constants: LayerConstants,
    layer_input: torch.Tensor | None = None,
    attention_input: torch.Tensor | None = None,
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
        layer_input: [W, size], the layer's own embeddings of the tokens, if the model has such.
        attention_input: [W, columns of `weights.qkv`], normalised, for a layer whose attention reads something else
            than the residual stream; None: `hidden` after the attention's norm.

    Returns:
        [W, hidden].
    """
    eps, unit_offset = constants.norm_eps, constants.norm_unit_offset
    normed = hidden if attention_input is None else attention_input
    if weights.attention_norm is not None and attention_input is None:
        normed = rms_norm(hidden, weights.attention_norm, eps, unit_offset)
    attention = head_attention if weights.latent is None else latent_attention
    attended = attention(normed, weights, key_cache, value_cache, cos, sin, window, constants)
    update = linear(attended, weights.output, weights.output_bias)
    if weights.attention_post_norm is not None:
        update = rms_norm(update, weights.attention_post_norm, eps, unit_offset)
    hidden = hidden + update

    update = feed_forward(hidden, window.rows, weights, constants)
    if weights.mlp_post_norm is not None:
        update = rms_norm(update, weights.mlp_post_norm, eps, unit_offset)
    hidden = hidden + update
    if weights.layer_input is not None and layer_input is not None:
        hidden = add_layer_input(hidden, layer_input, weights.layer_input, constants)
    return hidden if weights.scale is None else hidden * weights.scale


def layer_constants(config: DecoderConfig, layer: int) -> LayerConstants:
    """What of a model's configuration one of its layers' graph depends on."""
    router = None
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
        value_norm=config.value_norm,
        keys_are_values=config.heads_of_layer(layer).keys_are_values,
        output_gate=config.output_gate,
        writes_cache=config.cached_layer(layer) == layer,
    )


class DecoderModel:
    """A decoder: weights, rotary tables, and the compiled functions."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        *,
        max_positions: int | None = None,
        compile_region: CompileRegion = identity,
        attention_backend: str | None = None,
    ) -> None:
        """Builds the rotary tables; compiles nothing yet.

        Args:
            config: of the model.
            weights: on the device that the model shall run on.
            max_positions: the longest context that will be used; the model's own by default.
            compile_region: wraps the functions that become one compiled region each, such as
                `partial(torch.compile, fullgraph=True, dynamic=False)`. One graph per width serves all layers
                of one kind.
            attention_backend: one of `attention_backends.BACKENDS`; None: the device's own.

        Raises:
            ValueError: the backend is not one for this device.
        """
        self.config = config
        self.weights = weights
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self.max_positions = config.max_position_embeddings if max_positions is None else max_positions
        check_backend(attention_backend, self.device.type)
        tables = {
            kind: rope_tables(rope, self.max_positions + WINDOW_OVERHANG, self.device)
            for kind, rope in config.rope_by_type.items()
        }
        self._tables = [tables[kind] for kind in config.layer_types]
        every = (layer_constants(config, layer) for layer in range(config.num_layers))
        self._constants = [constants._replace(attention_backend=attention_backend) for constants in every]
        self._sources = [(config.cached_layer(i), config.heads_of_layer(i)) for i in range(config.num_layers)]
        # Rounded to the model's type, as in transformers.
        self._embedding_scale = float(torch.tensor(config.embedding_scale).to(self.dtype))
        size = 0 if config.per_layer_input is None else config.per_layer_input.size
        self._input_scale = float(torch.tensor(size**0.5).to(self.dtype))
        self._layer = compile_region(decoder_layer)
        self._norm = compile_region(rms_norm)
        self._project_inputs = compile_region(layer_inputs)

    def allocate_cache(self, slots: int, context: int, *, by_slot: bool = False) -> KvCache:
        """Allocates zeroed keys and values.

        Args:
            slots: how many, the reserved one included.
            context: the most committed tokens of a slot; the cache holds 64 or more positions beyond it.
            by_slot: in memory all layers of a slot lie side by side, as if they were heads of one layer, so that one
                op can write them all. The shapes are the same.
        """
        if context > self.max_positions:
            raise ValueError(f"context {context} exceeds the rotary tables' {self.max_positions} positions")
        config = self.config
        kinds = [config.heads_of_type(kind) for kind in set(config.layer_types)]
        heads, head_dim = max(kind.num_kv_heads for kind in kinds), max(kind.head_dim for kind in kinds)
        positions = -(-(context + WINDOW_OVERHANG) // CACHE_BLOCK) * CACHE_BLOCK
        order = (slots, config.num_cached_layers) if by_slot else (config.num_cached_layers, slots)

        def zeros(size: int) -> torch.Tensor:
            allocated = torch.zeros((*order, heads, positions, size), dtype=self.dtype, device=self.device)
            return allocated.transpose(0, 1) if by_slot else allocated

        return KvCache(zeros(head_dim), zeros(head_dim if config.mla is None else 0))

    def layer_cache(self, cache: KvCache, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values that a layer reads, [R1, Hkv, S, D]: its own, or those of the layer it shares with."""
        source, heads = self._sources[layer]
        key, value = cache.key.select(0, source), cache.value.select(0, source)
        if key.shape[1] == heads.num_kv_heads and key.shape[3] == heads.head_dim:
            return key, value
        key, value = (part.narrow(1, 0, heads.num_kv_heads) for part in (key, value))
        return key.narrow(3, 0, heads.head_dim), value.narrow(3, 0, heads.head_dim)

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
        inputs = self._layer_inputs(window.tokens, hidden)
        for layer in range(self.config.num_layers):
            hidden = self._layer(hidden, *self.layer_arguments(layer, window, cache, inputs))
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
            window: the tokens. Above the first layer their ids are read only where layers have embeddings of their own.
            cache: written to, at layers `first` to `last - 1`.
            first: the first layer to run, from 0.
            last: the layer to stop before; with `last == first` nothing runs.

        Returns:
            [W, hidden], before the final norm.
        """
        inputs = None
        if self.config.per_layer_input is not None and first < last:
            inputs = self._layer_inputs(window.tokens, hidden if first == 0 else self.embed(window.tokens))
        for layer in range(first, last):
            hidden = self._layer(hidden, *self.layer_arguments(layer, window, cache, inputs))
        return hidden

    def layer_arguments(
        self, layer: int, window: Window, cache: KvCache, inputs: torch.Tensor | None = None
    ) -> tuple[Any, ...]:
        """What `decoder_layer` takes after the hidden states, for one of the layers.

        `inputs`, [W, L, size], are the layers' own embeddings of the tokens, if the model has such.
        """
        weights, constants, (cos, sin) = self.weights.layers[layer], self._constants[layer], self._tables[layer]
        own = None if inputs is None else inputs.select(1, layer)
        return weights, *self.layer_cache(cache, layer), cos, sin, window, constants, own

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """int32 [W] to [W, hidden], scaled where the model scales."""
        return embed_tokens(tokens, self.weights.embedding, self._embedding_scale)

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """The norm between the last layer and the head, [W, hidden]."""
        return self._norm(hidden, self.weights.final_norm, self.config.norm_eps, self.config.norm_unit_offset)

    def _layer_inputs(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor | None:
        """[W, L, size], or None where layers have no embeddings of their own."""
        if self.config.per_layer_input is None:
            return None
        assert self.weights.layer_embedding is not None, "the weights lack the layers' embeddings"
        own = embed_tokens(tokens, self.weights.layer_embedding, self._input_scale)
        projection, norm = self.weights.layer_projection, self.weights.layer_projection_norm
        return self._project_inputs(own, hidden, projection, norm, self.config.num_layers, self.config.norm_eps)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[W, hidden] to [W, vocab], in the model's type, the final soft cap applied; into `out` if it is given."""
        if out is None:
            out = hidden.new_empty((hidden.shape[0], self.config.vocab_size))
        project_logits(hidden, self.weights.head, self.config.final_soft_cap, out)
        return out
