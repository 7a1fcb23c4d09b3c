"""The sizes of a model as the floor counts with them."""

from __future__ import annotations

from ..model_zoo.config import DecoderConfig
from ..model_zoo.errors import UnsupportedModelError
from ..profiling.floor import ModelSizes


def model_sizes(config: DecoderConfig) -> ModelSizes:
    """What of a model's config decides how many bytes and operations its passes take.

    Raises:
        UnsupportedModelError: the model has parts that the floor does not count.
    """
    parts = {
        "mixtures of experts": config.moe,
        "latent attention": config.mla,
        "heads that differ by layer": config.full_heads,
        "layers that share a cache": config.num_shared_layers,
        "embeddings of every layer": config.per_layer_input,
        "gated heads": config.output_gate,
    }
    uncounted = [name for name, part in parts.items() if part]
    if uncounted:
        raise UnsupportedModelError(
            f"the least bytes and operations of {config.model_type!r} are not counted, for it has "
            f"{', '.join(uncounted)}; counted are models of dense layers with heads alike"
        )
    return ModelSizes(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        windows=tuple(config.window_of_layer(layer) for layer in range(config.num_layers)),
        qkv_bias=config.qkv_bias,
        output_bias=config.output_bias,
        mlp_bias=config.mlp_bias,
        qk_norm=config.qk_norm,
        post_norms=config.post_norms,
    )
