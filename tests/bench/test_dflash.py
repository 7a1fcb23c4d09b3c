"""The context's keys and values of a DFlash drafter of 5 layers: stacked, as the engine makes them, against per layer.

pytest tests/bench/test_dflash.py --benchmark-enable -s
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from draftgraph.kernels.linear import linear, pack_weight
from draftgraph.kernels.rms_norm import rms_norm
from draftgraph.kernels.rope_and_cache import rope_and_cache
from draftgraph.kernels.window import Window
from draftgraph.model_zoo.dflash.model import ContextWeights, store_context
from draftgraph.profiling.interleaved import Contender, interleave

pytestmark = pytest.mark.bench

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS, KV_HEADS, SIZE, HIDDEN, STATES, CONTEXT, EPS = 5, 8, 128, 1024, 5, 512, 1e-6
"""As in a drafter for Qwen3-0.6B."""


def halves(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)


def window_of(tokens: int) -> Window:
    """One row's window, at position 64 of slot 0."""
    at, zeros = (make(tokens, dtype=torch.int32, device=DEVICE) for make in (torch.arange, torch.zeros))
    ends = torch.tensor([0, tokens], dtype=torch.int32).to(DEVICE)
    return Window(zeros, at + 64, zeros, zeros.clone(), ends, zeros[:1] + 64, zeros[:1].clone())


def contenders(tokens: int) -> tuple[dict[str, Callable[[], None]], Callable[[], list[torch.Tensor]]]:
    """Both ways of writing the same context; and the caches that they wrote."""
    fc, norm, hidden = (
        pack_weight(halves(HIDDEN, STATES * HIDDEN) / 70),
        halves(HIDDEN),
        halves(tokens, STATES * HIDDEN),
    )
    keys, values = ([halves(KV_HEADS * SIZE, HIDDEN) / 32 for _ in range(LAYERS)] for _ in "kv")
    norms, angles = halves(LAYERS, 1, SIZE), torch.rand(2, CONTEXT, SIZE // 2, device=DEVICE)
    stacked = [torch.zeros(2, LAYERS * KV_HEADS, CONTEXT, SIZE, dtype=torch.bfloat16, device=DEVICE) for _ in "kv"]
    apart = [torch.zeros(LAYERS, 2, KV_HEADS, CONTEXT, SIZE, dtype=torch.bfloat16, device=DEVICE) for _ in "kv"]
    weights = ContextWeights(fc, None, norm, pack_weight(torch.cat([*keys, *values])), None, norms)
    packed = [pack_weight(torch.cat(pair)) for pair in zip(keys, values, strict=True)]
    window = window_of(tokens)
    places = (window.positions, window.slots, window.rows, window.cu_tokens, window.base)

    def together() -> None:
        store_context(hidden, None, weights, EPS, *angles, window, *stacked, LAYERS, False)

    def per_layer() -> None:
        context = rms_norm(linear(hidden, fc), norm, EPS)
        for layer in range(LAYERS):
            caches = [part[layer] for part in apart]
            projected = linear(context, packed[layer])
            rope_and_cache(projected, None, norms[layer, 0], *angles, *places, *caches, 0, EPS, False, False)

    def caches() -> list[torch.Tensor]:
        by_layer = [part.unflatten(1, (LAYERS, KV_HEADS)).transpose(0, 1) for part in stacked]
        return [part[:, 0] for part in (*by_layer, *apart)]

    runs = {"stacked": together, "per layer": per_layer}
    if DEVICE == "cuda":
        runs = {name: replay_of(run) for name, run in runs.items()}
    return runs, caches


def replay_of(run: Callable[[], None]) -> Callable[[], None]:
    """The same from a graph, as in a round; done when it returns."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return replay


@pytest.mark.parametrize("tokens", [4, 16, 256])
def test_stacked_against_per_layer(benchmark, tokens):
    """A round's context of one row, that of several, and a prompt's chunk."""
    runs, caches = contenders(tokens)
    for run in runs.values():
        run()
    keys, values, keys_apart, values_apart = caches()
    assert keys_apart.any()
    torch.testing.assert_close(keys, keys_apart, rtol=2**-6, atol=2**-6)
    torch.testing.assert_close(values, values_apart, rtol=2**-6, atol=2**-6)
    times = interleave({name: Contender(run=run) for name, run in runs.items()}, blocks=9, turns=5)
    ratio = times.ratio("stacked", "per layer")
    benchmark.extra_info["stacked / per layer"] = ratio
    benchmark.pedantic(runs["stacked"], rounds=5)
    micro = {name: 1e6 * times.seconds(name) for name in runs}
    print(
        f"\n{tokens} tokens on {DEVICE}: stacked {micro['stacked']:.0f} us, per layer {micro['per layer']:.0f} us, "
        f"ratio {ratio:.2f}"
    )
    assert ratio < 1.05
