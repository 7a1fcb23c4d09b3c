"""The decoder under torch.compile, and on fake CUDA tensors."""

from __future__ import annotations

import functools

import pytest
import torch
from tiny_models import SLOTS, pack, random_tokens, tiny_model
from torch._subclasses.fake_tensor import FakeTensorMode

from draftgraph.model_zoo import DecoderModel, DecoderWeights, LayerWeights, load_model

CONTEXT = 128


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _run(model, cache, rows, width=None):
    with torch.inference_mode():
        return model.logits(model.forward(pack(rows, width), cache))


# One kind of layer each, so that one layer graph is compiled.
COMPILED = {
    "gemma3": {"num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2},
    "qwen3_moe": {"num_hidden_layers": 1, "mlp_only_layers": []},
    "deepseek_v3": {"num_hidden_layers": 1, "first_k_dense_replace": 0},
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_equals_eager(name, tmp_path) -> None:
    tiny_model(name, **COMPILED[name]).save_pretrained(tmp_path)
    eager = load_model(tmp_path, dtype=torch.float32)
    region = functools.partial(torch.compile, fullgraph=True, dynamic=False)
    compiled = DecoderModel(eager.config, eager.weights, compile_region=region)
    results = []
    tokens = random_tokens(40, 1)
    for model in (eager, compiled):
        cache = model.allocate_cache(SLOTS, CONTEXT)
        first = _run(model, cache, [(tokens[:30], 0, 1)], width=32)[:30]
        rows = [(tokens[30:], 30, 1), (random_tokens(9, 2), 0, 2)]
        results.append(torch.cat((first, _run(model, cache, rows, width=32)[:19])))
        # What the two wrote is the same too, the reserved slot's garbage aside.
        results.append(cache.key[:, :-1].flatten())
        results.append(cache.value[:, :-1].flatten())
    for one, other in zip(results[:3], results[3:], strict=True):
        assert torch.allclose(one, other, rtol=0.0, atol=1e-5 * float(results[0].abs().max()))

    # Token by token at the same width, the compiled model repeats its own logits bit for bit.
    cache = compiled.allocate_cache(SLOTS, CONTEXT)
    _run(compiled, cache, [(tokens[:30], 0, 1)], width=32)
    steps = [_run(compiled, cache, [([tokens[i]], i, 1)], width=32)[:1] for i in range(30, 40)]
    assert torch.equal(torch.cat(steps), results[3][30:40])


def test_one_layer_graph_per_width_and_kind(tmp_path) -> None:
    graphs: list[tuple[int, ...]] = []

    def counting_backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        graphs.append(tuple(inputs[0].shape))
        return graph

    region = functools.partial(torch.compile, fullgraph=True, dynamic=False, backend=counting_backend)

    def graphs_of_layers(name: str, **changes) -> int:
        """Layer graphs alone: the final norm makes one more per width."""
        torch._dynamo.reset()
        directory = tmp_path / name
        tiny_model(name, **changes).save_pretrained(directory)
        model = load_model(directory, dtype=torch.float32, compile_region=region)
        cache = model.allocate_cache(SLOTS, CONTEXT)
        _run(model, cache, [(random_tokens(30, 0), 0, 1)], width=32)
        graphs.clear()
        for base in range(30, 40):
            _run(model, cache, [(random_tokens(1, 0), base, 1)], width=4)
        return len(graphs) - 1

    assert graphs_of_layers("llama", num_hidden_layers=4) == 1
    four = ["sliding_attention", "full_attention"] * 2
    assert graphs_of_layers("gemma3", num_hidden_layers=4, layer_types=four) == 2


def _fake_cuda(model: DecoderModel, mode: FakeTensorMode) -> DecoderWeights:
    """The shapes of a model's weights, as fake CUDA tensors."""

    def fake(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")

    weights = model.weights
    with mode:
        layers = tuple(LayerWeights(*(fake(tensor) for tensor in layer)) for layer in weights.layers)
        return DecoderWeights(fake(weights.embedding), layers, fake(weights.final_norm), fake(weights.head))


@pytest.mark.parametrize("name", ["llama-biases", "gemma3"])
def test_traces_on_fake_cuda_tensors(name, tmp_path) -> None:
    tiny_model(name).save_pretrained(tmp_path)
    real = load_model(tmp_path, dtype=torch.bfloat16)
    window = pack([([5, 6, 7], 20, 1), ([8], 3, 2)], 8)
    mode = FakeTensorMode()
    weights = _fake_cuda(real, mode)
    with mode:
        model = DecoderModel(real.config, weights)
        cache = model.allocate_cache(SLOTS, CONTEXT)
        there = type(window)(
            *(None if t is None else torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in window)
        )
        hidden, states = model.forward_with_aux(there, cache, (0, 1))
        logits = model.logits(hidden)
    assert hidden.shape == states[0].shape == states[1].shape == (8, real.config.hidden_size)
    assert logits.shape == (8, real.config.vocab_size)
    assert logits.device.type == "cuda"
    assert logits.dtype == torch.bfloat16
