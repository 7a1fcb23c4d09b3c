"""The sizes of a model as the floor counts with them."""

from __future__ import annotations

from ..model_zoo.config import DecoderConfig, MlaConfig
from ..profiling.sizes import LayerSizes, ModelSizes


def model_sizes(config: DecoderConfig) -> ModelSizes:
    """What of a model's config decides how many bytes and operations its passes take."""
    inputs = config.per_layer_input
    return ModelSizes(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=tuple(_layer(config, layer) for layer in range(config.num_layers)),
        layer_inputs=0 if inputs is None else config.num_layers * inputs.size,
        layer_input_norm=0 if inputs is None else inputs.size,
    )


def _layer(config: DecoderConfig, layer: int) -> LayerSizes:
    hidden, dense, moe = config.hidden_size, config.dense_size(layer), config.moe
    attention = _heads(config, layer) if config.mla is None else _latent(config, config.mla)
    matrices = attention.matrices + 3 * hidden * dense
    vectors = attention.vectors + 2 * hidden + (2 * hidden if config.post_norms else 0)
    vectors += (2 * dense + hidden) if config.mlp_bias and dense else 0
    if config.per_layer_input is not None:
        matrices += 2 * config.per_layer_input.size * hidden
        vectors += hidden
    experts: dict[str, int] = {}
    if moe is not None and config.has_mixture(layer):
        router = moe.num_experts * hidden
        matrices += 0 if moe.float32_router else router
        matrices += hidden if moe.shared_gate else 0
        # The norms of the mixture beside a dense feed-forward, and the scale of every expert.
        vectors += 4 * hidden if moe.beside_dense else 0
        experts = {
            "num_experts": moe.num_experts,
            "experts_per_token": moe.experts_per_token,
            "expert_matrices": 3 * hidden * moe.intermediate_size,
            "float32_matrices": router if moe.float32_router else 0,
            "float32_vectors": moe.num_experts * (moe.choice_bias + moe.beside_dense),
        }
    return LayerSizes(
        matrices=matrices,
        vectors=vectors + (1 if config.layer_scale else 0),
        cached=attention.cached,
        written=attention.written,
        pair_products=attention.pair_products,
        sliding=config.window_of_layer(layer),
        **experts,
    )


def _heads(config: DecoderConfig, layer: int) -> LayerSizes:
    """Attention alone, over heads of keys and values."""
    hidden, heads, queries = config.hidden_size, config.heads_of_layer(layer), config.num_heads
    owner = config.cached_layer(layer) == layer
    keys = heads.num_kv_heads * heads.head_dim
    projected = queries * heads.head_dim * (2 if config.output_gate else 1)
    projected += keys * (1 if heads.keys_are_values else 2) if owner else 0
    vectors = (projected if config.qkv_bias else 0) + (hidden if config.output_bias else 0)
    vectors += (heads.head_dim * (2 if owner else 1)) if config.qk_norm else 0
    return LayerSizes(
        matrices=hidden * (projected + queries * heads.head_dim),
        vectors=vectors,
        cached=2 * keys,
        written=2 * keys if owner else 0,
        pair_products=2 * queries * heads.head_dim,
    )


def _latent(config: DecoderConfig, mla: MlaConfig) -> LayerSizes:
    """Attention alone, over latents: a token's rotated key and its latent, which is its value too."""
    hidden, heads = config.hidden_size, config.num_heads
    queries = heads * mla.head_dim
    through = mla.query_rank * (hidden + queries) if mla.query_rank else hidden * queries
    absorbed = heads * (mla.nope_dim + mla.value_dim) * mla.kv_rank
    vectors = mla.query_rank + mla.kv_rank + (hidden if config.output_bias else 0)
    return LayerSizes(
        matrices=through + hidden * mla.cached_dim + absorbed + heads * mla.value_dim * hidden,
        vectors=vectors + (config.qkv_size if config.qkv_bias else 0),
        cached=mla.cached_dim,
        written=mla.cached_dim,
        pair_products=heads * (mla.cached_dim + mla.kv_rank),
    )
