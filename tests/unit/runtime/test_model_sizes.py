"""The floor's sizes of every family against the parameters that its checkpoints hold, and a round counted by hand."""

from __future__ import annotations

import pytest
import torch
from tiny_models import MODELS, tiny_model

from draftgraph.model_zoo.config import DecoderConfig, MlaConfig, MoeConfig
from draftgraph.model_zoo.registry import family_of
from draftgraph.model_zoo.rope import RopeConfig
from draftgraph.profiling import forward_cost
from draftgraph.runtime.model_sizes import model_sizes


@pytest.mark.parametrize("name", MODELS)
def test_all_weights_are_counted_once(name):
    model = tiny_model(name)
    hf = model.config.to_dict()
    config = family_of(hf).read_config(hf)
    sizes = model_sizes(config)
    layers = sum(
        layer.matrices
        + layer.vectors
        + layer.float32_matrices
        + layer.float32_vectors
        + layer.num_experts * layer.expert_matrices
        for layer in sizes.layers
    )
    tables = sizes.head * (1 if config.tie_word_embeddings else 2)
    if config.per_layer_input is not None:
        tables += config.per_layer_input.vocab_size * sizes.layer_inputs + sizes.input_matrices + sizes.layer_input_norm
    stored = {name: tensor.numel() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        stored.pop("lm_head.weight", None)
    # Ernie stores the choice's bias of every router, whether it is used or not.
    assert layers + sizes.hidden_size + tables == sum(stored.values())


LATENT = DecoderConfig(
    model_type="deepseek_v3",
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=100,
    num_layers=2,
    num_heads=4,
    num_kv_heads=1,
    head_dim=40,
    norm_eps=1e-6,
    max_position_embeddings=512,
    attention_scale=0.2,
    layer_types=("full_attention",) * 2,
    rope=(("full_attention", RopeConfig(dim=8, theta=1e4)),),
    rope_interleaved=True,
    mla=MlaConfig(query_rank=24, kv_rank=32, nope_dim=12, rope_dim=8, value_dim=10),
    moe=MoeConfig(
        layers=(1,),
        num_experts=16,
        experts_per_token=4,
        intermediate_size=20,
        shared_size=20,
        scoring="sigmoid",
        choice_bias=True,
        float32_router=True,
    ),
)


def test_a_pass_over_latents_and_experts_matches_the_hand_count():
    """One layer with a dense feed-forward, one with 16 experts of which a token takes 4, and a shared one."""
    sizes = model_sizes(LATENT)
    latents = 64 * 24 + 24 * 4 * 20 + 64 * 40 + 4 * 22 * 32 + 4 * 10 * 64  # to and from queries, latent, heads, output
    assert latents == 11_392
    dense, expert, router = 3 * 64 * 100, 3 * 64 * 20, 16 * 64
    norms = 24 + 32 + 2 * 64
    first, second = sizes.layers
    assert (first.matrices, first.vectors) == (latents + dense, norms)
    assert (second.matrices, second.vectors) == (latents + expert, norms)  # the shared one
    assert (second.expert_matrices, second.float32_matrices, second.float32_vectors) == (expert, router, 16)

    # 3 tokens after 50 cached ones, at a width of 4. Each token leaves three quarters of the experts alone.
    cost = forward_cost(sizes, width=4, rows=1, window=3, context=50, dtype=torch.bfloat16)
    distinct = 16 * (1 - 0.75**3)
    assert distinct == second.distinct_experts(3) == 9.25
    elements = 2 * latents + dense + expert + 2 * norms + distinct * expert + 64 + 4 * 64 + 1000 * 64
    latent_cache = 2 * 40 * 50  # of both layers: 32 numbers of latent and 8 of rotated key per token
    assert cost.bytes_read == 2 * (elements + latent_cache) + 4 * (router + 16)
    assert cost.bytes_written == 2 * (3 * 2 * 40 + 4 * 1000)
    pairs = 3 * 50 + 6
    products = 4 * (2 * latents + dense + expert + router + 64 * 1000) + 3 * 4 * expert + 2 * pairs * 4 * (40 + 32)
    assert cost.operations == 2 * products


def test_as_many_experts_as_tokens_can_choose():
    second = model_sizes(LATENT).layers[1]
    assert second.distinct_experts(1) == 4.0
    assert second.distinct_experts(0) == 0.0
    assert second.distinct_experts(1000) == pytest.approx(16.0)
    assert model_sizes(LATENT).layers[0].distinct_experts(5) == 0.0
