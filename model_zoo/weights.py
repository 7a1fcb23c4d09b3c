"""The weights of a decoder as plain tensors, and the choices that a layer's graph depends on."""

from __future__ import annotations

from typing import NamedTuple

import torch


class RouterConstants(NamedTuple):
    """How a mixture's tokens choose their experts; see `config.MoeConfig`, from which it is made."""

    experts_per_token: int
    scoring: str
    num_groups: int
    groups_per_token: int
    group_members: int
    normalize: bool
    normalize_min: float
    scale: float


class MixtureWeights(NamedTuple):
    """The experts and their router."""

    router: torch.Tensor
    """[E, hidden]; its type is the type in which the scores are computed."""
    gate_up: torch.Tensor
    """[E, 2 * intermediate, hidden]: of each expert gate, then up."""
    down: torch.Tensor
    """[E, hidden, intermediate]."""
    choice_bias: torch.Tensor | None = None
    """float32 [E], added to the scores where experts are chosen, not where they are weighted."""
    expert_scale: torch.Tensor | None = None
    """float32 [E], by which an expert's weights are multiplied."""
    router_norm: torch.Tensor | None = None
    """[hidden], of the router's input, if that is not what the dense feed-forward takes."""
    norm: torch.Tensor | None = None
    """[hidden], of the experts' input, likewise."""
    post_norm: torch.Tensor | None = None
    """[hidden], on the mixture's output."""
    shared_gate: torch.Tensor | None = None
    """[1, hidden], of the shared experts."""


class LatentWeights(NamedTuple):
    """What latent attention needs besides the projections that `LayerWeights` has."""

    key_value: torch.Tensor
    """[Hq, nope + Dv, kv rank]: of each head, what makes keys of the latent, then what makes values of it."""
    query: torch.Tensor | None = None
    """[Hq * (nope + rope), query rank]; None where queries are made from the hidden state."""


class PerLayerInputWeights(NamedTuple):
    """How a layer adds its own small embedding in."""

    gate: torch.Tensor
    """[size, hidden]."""
    projection: torch.Tensor
    """[hidden, size]."""
    norm: torch.Tensor
    """[hidden], on what is added."""


class LayerWeights(NamedTuple):
    """One layer. Matrices are [out, in], as `kernels.linear` takes them."""

    attention_norm: torch.Tensor | None
    """[hidden]; None: attention takes the layer's input as it is."""
    qkv: torch.Tensor
    """[(Hq + 2 Hkv) * D, hidden]: queries, keys, values; Hq * D more where heads are gated. With latent attention the
    queries' latent (or the queries), then the latent of keys and values, then the rotary key."""
    output: torch.Tensor
    """[hidden, Hq * Dv]."""
    mlp_norm: torch.Tensor
    """[hidden]."""
    gate_up: torch.Tensor | None
    """[2 * intermediate, hidden]: gate, then up. Of a layer with a mixture, its shared experts, if it has any."""
    down: torch.Tensor | None
    """[hidden, intermediate]."""
    qkv_bias: torch.Tensor | None = None
    output_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    query_norm: torch.Tensor | None = None
    """[D], of each head; with latent attention [query rank], of the queries' latent."""
    key_norm: torch.Tensor | None = None
    """[D], of each head; with latent attention [kv rank], of the latent of keys and values."""
    attention_post_norm: torch.Tensor | None = None
    """[hidden], on the attention's output before it is added."""
    mlp_post_norm: torch.Tensor | None = None
    """[hidden], on the feed-forward's output before it is added."""
    latent: LatentWeights | None = None
    """Of latent attention."""
    mixture: MixtureWeights | None = None
    dense_post_norm: torch.Tensor | None = None
    """[hidden], on the dense feed-forward's output before the mixture's is added."""
    layer_input: PerLayerInputWeights | None = None
    scale: torch.Tensor | None = None
    """[1], by which the layer's output is multiplied."""


class DecoderWeights(NamedTuple):
    """The whole model."""

    embedding: torch.Tensor
    """[vocab, hidden]."""
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    """[hidden]."""
    head: torch.Tensor
    """[vocab, hidden]; may be packed, and may be the embedding table."""
    layer_embedding: torch.Tensor | None = None
    """[vocab, L * size], the layers' small embeddings of a token."""
    layer_projection: torch.Tensor | None = None
    """[L * size, hidden], what the embedding adds to them."""
    layer_projection_norm: torch.Tensor | None = None
    """[size]."""


class LayerConstants(NamedTuple):
    """What of the configuration a layer's graph depends on; layers with equal constants share a graph."""

    num_heads: int
    norm_eps: float
    norm_unit_offset: bool
    activation: str
    attention_scale: float
    sliding_window: int
    soft_cap: float
    rope_interleaved: bool = False
    latent_norm_eps: float = 0.0
    """Of the norms inside latent attention."""
    router: RouterConstants | None = None
    """Of the layer's mixture."""
    value_norm: bool = False
    keys_are_values: bool = False
    """See `config.HeadsConfig`."""
    output_gate: bool = False
    """See `config.DecoderConfig`."""
    writes_cache: bool = True
    """False: the layer reads another's keys and values and has queries alone."""
    attention_backend: str | None = None
    """One of `attention_backends.BACKENDS`; None: the device's own."""
