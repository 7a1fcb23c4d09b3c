"""What suffix decoding costs at 32k tokens of context, as a share of a verify of SmolLM2-135M's shape there.

pytest tests/bench/test_suffix.py --benchmark-enable -s
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import pytest
import torch

from draftgraph.graphs import DecodeState, StateShape
from draftgraph.kernels.window import Window
from draftgraph.model_zoo.config import DecoderConfig
from draftgraph.model_zoo.decoder import DecoderModel
from draftgraph.model_zoo.placement import WeightBuilder, decoder_placements
from draftgraph.model_zoo.registry import FAMILIES
from draftgraph.model_zoo.rope import RopeConfig
from draftgraph.runtime.speculators.suffix import SuffixSpeculator

pytestmark = pytest.mark.bench

CONTEXT, LENGTH, WIDTH, DRAFTS, VOCAB = 33000, 32768, 8, 7, 49152
LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, SIZE = 30, 576, 1536, 9, 3, 64


def verifier() -> DecoderModel:
    """A decoder of SmolLM2-135M's shape in bfloat16, with random weights."""
    config = DecoderConfig(
        model_type="llama",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=SIZE,
        norm_eps=1e-5,
        max_position_embeddings=CONTEXT,
        attention_scale=SIZE**-0.5,
        layer_types=("full_attention",) * LAYERS,
        tie_word_embeddings=True,
        rope=(("full_attention", RopeConfig(dim=SIZE, theta=10000.0)),),
    )

    placements = decoder_placements(config, FAMILIES[config.model_type].layer_norms)
    builder = WeightBuilder(config, placements, dtype=torch.bfloat16, device="cpu")
    for name, placement in placements.items():
        builder.add(name, 0.02 * torch.randn(placement.shape))
    return DecoderModel(config, builder.build())


def test_proposing_costs_under_a_twentieth_of_a_verify(benchmark):
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    shape = StateShape(
        slots=1, context=CONTEXT, num_drafts=DRAFTS, vocab_size=VOCAB, max_bucket=1, max_width=WIDTH, ring=64
    )
    state = DecodeState.allocate(shape, dtype=torch.bfloat16, device="cpu")
    # Phrases that recur, as code and prose do, with words between them.
    phrases = [rng.integers(0, VOCAB, rng.integers(3, 40)) for _ in range(200)]
    text = np.concatenate([phrases[rng.integers(0, 200)] for _ in range(4000)])[:CONTEXT]
    state.tokens[0] = torch.from_numpy(text)
    state.slot_of_row[0] = 0
    state.finished[0] = False
    speculator = SuffixSpeculator(DRAFTS)
    speculator.allocate(state)
    speculator.finish(0, rng.permutation(text).tolist())
    speculator.admit(0)
    state.length[0] = LENGTH
    speculator.propose(state, 1)

    model = verifier()
    cache = model.allocate_cache(2, CONTEXT)
    zeros = torch.zeros(WIDTH, dtype=torch.int32)
    window = Window(
        tokens=zeros.clone(),
        positions=torch.arange(WIDTH, dtype=torch.int32) + LENGTH - 1,
        slots=zeros.clone(),
        rows=zeros.clone(),
        cu_tokens=torch.tensor([0, WIDTH], dtype=torch.int32),
        base=torch.tensor([LENGTH - 1], dtype=torch.int32),
        slot_of_row=torch.zeros(1, dtype=torch.int32),
    )

    def verify() -> None:
        model.logits(model.forward(window, cache), out=state.logits)

    def propose() -> None:
        state.length[0] += 4  # what a round commits
        speculator.propose(state, 1)

    with torch.inference_mode():
        verify()
        verifies, proposals = [], []
        for _ in range(7):
            for run, seconds in ((verify, verifies), (propose, proposals)):
                start = time.perf_counter()
                run()
                seconds.append(time.perf_counter() - start)
        benchmark.pedantic(propose, rounds=5)
    share = statistics.median(proposals) / statistics.median(verifies)
    print(
        f"\npropose {1e3 * statistics.median(proposals):.2f} ms, verify {1e3 * statistics.median(verifies):.1f} ms: "
        f"{share:.1%}"
    )
    assert share < 0.05
