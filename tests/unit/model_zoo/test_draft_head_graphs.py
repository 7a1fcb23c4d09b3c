"""What a draft head's forward is made of: its products, what is fused, and that no cache is copied."""

from __future__ import annotations

import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from draftgraph.kernels.eh_norm import eh_norm
from draftgraph.kernels.rms_norm import rms_norm
from draftgraph.kernels.window import Window
from draftgraph.model_zoo.decoder import LayerConstants, LayerWeights, decoder_layer
from draftgraph.model_zoo.dflash.model import ContextWeights, store_context
from draftgraph.model_zoo.dspark.model import ConfidenceWeights, MarkovWeights, correct
from draftgraph.model_zoo.eagle import model as eagle
from draftgraph.model_zoo.eagle3 import model as eagle3
from draftgraph.model_zoo.gemma4_assistant import model as assistant
from draftgraph.model_zoo.medusa.model import MedusaHead, head_logits
from draftgraph.model_zoo.mtp import model as mtp

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, SIZE, CONTEXT, WIDTH, KEPT, VOCAB = 64, 96, 4, 2, 16, 128, 8, 20, 50
CONSTANTS = LayerConstants(
    num_heads=HEADS,
    norm_eps=1e-6,
    norm_unit_offset=False,
    activation="silu",
    attention_scale=0.25,
    sliding_window=0,
    soft_cap=0.0,
)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[0]))


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def layer(columns: int) -> tuple[object, ...]:
    """What `decoder_layer` takes after the hidden states."""
    weights = LayerWeights(
        attention_norm=None,
        qkv=normal((HEADS + 2 * KV_HEADS) * SIZE, columns),
        output=normal(HIDDEN, HEADS * SIZE),
        mlp_norm=normal(HIDDEN),
        gate_up=normal(2 * INTERMEDIATE, HIDDEN),
        down=normal(HIDDEN, INTERMEDIATE),
    )
    window = Window(ints(WIDTH), ints(WIDTH), ints(WIDTH), ints(WIDTH), ints(2) + WIDTH, ints(1), ints(1))
    caches = [normal(3, KV_HEADS, CONTEXT, SIZE) for _ in range(2)]
    cos, sin = torch.randn(2, CONTEXT, SIZE // 2)
    return (weights, *caches, cos, sin, window, CONSTANTS)


def eagle_step():
    tokens, states = ints(WIDTH) + 3, torch.arange(WIDTH, dtype=torch.int32)
    fc = normal(HIDDEN, 2 * HIDDEN)
    rows = ints(WIDTH)
    return eagle.first_layer, (
        tokens,
        rows,
        normal(VOCAB, HIDDEN),
        normal(KEPT, HIDDEN),
        states,
        fc,
        None,
        *layer(HIDDEN),
    )


def eagle3_step():
    norms, fc = normal(2, HIDDEN), normal(HIDDEN, 3 * HIDDEN)
    states = torch.arange(WIDTH, dtype=torch.int32)

    def step(tokens, rows, embedding, hidden, norms, fc, *rest):
        combined = eagle3.combine(hidden, states, None, None, fc, None, 1e-6)
        return eagle3.first_layer(tokens, rows, embedding, combined, norms, 1e-6, False, *rest)

    return step, (
        ints(WIDTH),
        ints(WIDTH),
        normal(VOCAB, HIDDEN),
        normal(KEPT, 3 * HIDDEN),
        norms,
        fc,
        *layer(2 * HIDDEN),
    )


def assistant_step():
    """Of hidden size HIDDEN, for a target of twice that."""
    norm, before, after = normal(HIDDEN), normal(HIDDEN, 4 * HIDDEN), normal(2 * HIDDEN, HIDDEN)
    states = torch.arange(WIDTH, dtype=torch.int32)
    weights, *rest, constants = layer(HIDDEN)
    weights = weights._replace(qkv=normal(HEADS * SIZE, HIDDEN), attention_norm=norm)
    constants = constants._replace(writes_cache=False)

    def step(tokens, rows, embedding, hidden, norm, before, after, *rest):
        x = assistant.enter(tokens, rows, embedding, 8.0, hidden, states, before)
        return assistant.leave(decoder_layer(x, *rest), norm, 1e-6, after)

    table, hidden = normal(VOCAB, 2 * HIDDEN), normal(KEPT, 2 * HIDDEN)
    return step, (ints(WIDTH), ints(WIDTH), table, hidden, norm, before, after, weights, *rest, constants)


def mtp_step():
    constants = mtp.PairConstants(norm_eps=1e-6, unit_offset=False, zeroes_first=True, hidden_first=False)
    weights, *rest = layer(HIDDEN)
    weights = weights._replace(attention_norm=normal(HIDDEN))
    return mtp.module_layer, (
        ints(WIDTH) + 3,
        ints(WIDTH),
        ints(WIDTH),
        normal(VOCAB, HIDDEN),
        normal(KEPT, HIDDEN),
        torch.arange(WIDTH, dtype=torch.int32),
        normal(2, HIDDEN),
        normal(HIDDEN, 2 * HIDDEN),
        constants,
        weights,
        *rest,
    )


STEPS = {"eagle": eagle_step, "eagle3": eagle3_step, "mtp": mtp_step, "assistant": assistant_step}
FUSED = (HEADS + 2 * KV_HEADS) * SIZE
PRODUCTS = {
    "eagle": [HIDDEN, FUSED, HIDDEN, 2 * INTERMEDIATE, HIDDEN],
    "eagle3": [HIDDEN, FUSED, HIDDEN, 2 * INTERMEDIATE, HIDDEN],
    "mtp": [HIDDEN, FUSED, HIDDEN, 2 * INTERMEDIATE, HIDDEN],
    # Queries alone, and the projection back.
    "assistant": [HIDDEN, HEADS * SIZE, HIDDEN, 2 * INTERMEDIATE, HIDDEN, 2 * HIDDEN],
}


def traced(step) -> torch.fx.GraphModule:
    function, arguments = step()
    flat, spec = tree_flatten(arguments)
    places = [index for index, value in enumerate(flat) if isinstance(value, torch.Tensor)]

    def call(*tensors):
        values = list(flat)
        for place, tensor in zip(places, tensors, strict=True):
            values[place] = tensor
        return function(*tree_unflatten(values, spec))

    return make_fx(call)(*[flat[place] for place in places])


@pytest.mark.parametrize("name", STEPS)
def test_a_step_has_one_projection_one_fused_qkv_and_copies_no_cache(name):
    graph = traced(STEPS[name])
    products = [node for node in graph.graph.nodes if str(node.target).startswith("draftgraph.linear")]
    rows = [node.meta["val"].shape[1] for node in products]
    assert rows == PRODUCTS[name]
    # The largest tensor that any op makes anew is the feed-forward's, not a cache.
    made = [n.meta["val"].numel() for n in graph.graph.nodes if str(n.target).startswith(("aten.cat", "aten.clone"))]
    assert all(size < 3 * KV_HEADS * CONTEXT * SIZE for size in made)
    written = [node for node in graph.graph.nodes if "rope_and_cache" in str(node.target)]
    assert len(written) == (name != "assistant")


def context_step(layers: int = 5):
    weights = ContextWeights(
        fc=normal(HIDDEN, 3 * HIDDEN),
        fc_bias=None,
        norm=normal(HIDDEN),
        key_value=normal(2 * layers * KV_HEADS * SIZE, HIDDEN),
        key_value_bias=None,
        key_norms=normal(layers, 1, SIZE),
    )
    window = Window(ints(WIDTH), ints(WIDTH), ints(WIDTH), ints(WIDTH), ints(2) + WIDTH, ints(1), ints(1))
    caches = [normal(3, layers * KV_HEADS, CONTEXT, SIZE) for _ in range(2)]
    states = torch.arange(WIDTH, dtype=torch.int32)
    angles = torch.randn(2, CONTEXT, SIZE // 2)
    return store_context, (normal(KEPT, 3 * HIDDEN), states, weights, 1e-6, *angles, window, *caches, layers, False)


def test_the_context_of_five_layers_is_one_product_one_norm_and_one_write():
    graph = traced(context_step)
    targets = [str(node.target) for node in graph.graph.nodes]
    products = [node for node in graph.graph.nodes if str(node.target).startswith("draftgraph.linear")]
    # The projection of the hidden states, and then the keys and values of all layers.
    assert [node.meta["val"].shape[1] for node in products] == [HIDDEN, 2 * 5 * KV_HEADS * SIZE]
    assert sum(target.startswith(("aten.mm", "aten.addmm", "aten.bmm", "aten.matmul")) for target in targets) == 0
    assert sum(target.startswith("aten.rsqrt") for target in targets) == 2, "of the context, and of all keys"
    assert sum(target.startswith("draftgraph.rope_and_cache") for target in targets) == 1


def test_the_context_compiles_to_two_products_and_what_lies_between():
    function, arguments = context_step()
    kinds = [op or "fused" for _, op in kernels_of(compiled(function, arguments))]
    assert [kind for kind in kinds if kind != "fused"] == ["linear", "linear"]
    # The gather; the norm; and then, inlined on the CPU, the norm, the rotation and the write of all layers.
    assert kinds[:4] == ["fused", "linear", "fused", "linear"]


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_a_correction_is_one_graph_of_the_markov_heads_products(kind):
    rank, projection = 8, {"vanilla": None, "gated": (8, HIDDEN + 8), "rnn": (24, HIDDEN + 16)}[kind]
    markov = MarkovWeights(
        normal(VOCAB, rank), normal(VOCAB, rank), None if projection is None else normal(*projection)
    )
    confidence = ConfidenceWeights(normal(HIDDEN + rank), normal(1))
    tensors = (ints(2), normal(2, HIDDEN), normal(2, VOCAB), normal(2, rank))
    graph = traced(lambda: (correct, (*tensors, markov, confidence, kind, 0, True)))
    products = [node for node in graph.graph.nodes if str(node.target).startswith("draftgraph.linear")]
    assert len(products) == (1 if kind == "vanilla" else 2)


def kernels_of(code: str) -> list[tuple[str, str]]:
    body = code[code.index("def call(") :]
    return re.findall(r"^ +(cpp_fused\w*)\(|torch\.ops\.draftgraph\.(\w+)\.default\(", body, re.MULTILINE)


def compiled(function, arguments) -> str:
    with torch.inference_mode():
        _, codes = run_and_get_code(torch.compile(function, fullgraph=True, dynamic=False), *arguments)
    return "\n".join(codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("normed", "zeroed", "scale"), [(True, True, 1.0), (True, False, 1.0), (False, False, 1.0), (False, False, 8.0)]
)
def test_eh_norm_is_one_kernel(dtype, normed, zeroed, scale):
    """Lookup, gather, scaling, zeroing at position 0, both norms and the concatenation: one loop nest before the
    product.
    """

    def projected(tokens, rows, embedding, hidden, states, norms, positions, fc):
        x = eh_norm(
            tokens,
            rows,
            embedding,
            hidden,
            states,
            norms=norms,
            eps=1e-6,
            zero_positions=positions,
            embedding_scale=scale,
        )
        return torch.ops.draftgraph.linear(x, fc)

    tokens, states = ints(WIDTH) + 3, torch.arange(WIDTH, dtype=torch.int32)
    tables = normal(VOCAB, HIDDEN).to(dtype), normal(KEPT, HIDDEN).to(dtype)
    norms, positions = normal(2, HIDDEN).to(dtype) if normed else None, ints(WIDTH) if zeroed else None
    fc = normal(HIDDEN, 2 * HIDDEN).to(dtype)
    code = compiled(projected, (tokens, ints(WIDTH), *tables, states, norms, positions, fc))
    found = kernels_of(code)
    assert [op for _, op in found if op] == ["linear"]
    assert [bool(fused) for fused, _ in found] == [True, False]
    source = code[code.index(f"{found[0][0]} = async_compile") :].split("''')", 1)[0]
    assert len(re.findall(r"for\(int64_t x0=", source)) == 1


def test_a_whole_eagle3_layer_normalises_its_input_in_one_kernel():
    function, arguments = eagle3_step()
    code = compiled(function, arguments)
    kinds = [op or "fused" for _, op in kernels_of(code)]
    # The gather before the projection, eh_norm before attention, and then the layer as any other.
    assert kinds[:5] == ["fused", "linear", "fused", "linear", "fused"]
    assert kinds[5:] == ["window_attention", "linear", "fused", "linear", "fused", "linear", "fused"]


def test_a_whole_module_joins_its_inputs_in_one_kernel():
    function, arguments = mtp_step()
    kinds = [op or "fused" for _, op in kernels_of(compiled(function, arguments))]
    # eh_norm, the projection, and then the layer as any other.
    assert kinds[:4] == ["fused", "linear", "fused", "linear"]
    assert kinds[4:] == ["fused", "window_attention", "linear", "fused", "linear", "fused", "linear", "fused"]


@pytest.mark.parametrize("zeroed", [False, True])
@pytest.mark.parametrize("hidden_first", [False, True])
def test_eh_norm_is_two_norms_side_by_side(zeroed, hidden_first):
    tokens, positions = torch.tensor([3, 7, 9, 1], dtype=torch.int32), torch.tensor([0, 1, 5, 5], dtype=torch.int32)
    rows = torch.tensor([0, 0, 1, -1], dtype=torch.int32)
    table, hidden, norms = normal(VOCAB, HIDDEN), normal(KEPT, HIDDEN), normal(2, HIDDEN)
    states = torch.tensor([4, 4, 1, 2], dtype=torch.int32)
    out = eh_norm(
        tokens,
        rows,
        table,
        hidden,
        states,
        norms=norms,
        eps=1e-6,
        zero_positions=positions if zeroed else None,
        hidden_first=hidden_first,
    )
    embedded, read = table[tokens.long()], hidden[states.long()]
    if zeroed:
        embedded = torch.cat((torch.zeros(1, HIDDEN), embedded[1:]))
    parts = (read, embedded) if hidden_first else (embedded, read)
    expected = torch.cat([rms_norm(part, norm, 1e-6) for part, norm in zip(parts, norms, strict=True)], 1)
    torch.testing.assert_close(out[:3], expected[:3])
    assert not out[3].any(), "padding"


def test_a_medusa_head_compiles_to_its_products_and_one_kernel_between():
    heads = MedusaHead((normal(HIDDEN, HIDDEN),), (normal(HIDDEN),), normal(VOCAB, HIDDEN))
    kinds = [op or "fused" for _, op in kernels_of(compiled(head_logits, (normal(WIDTH, HIDDEN), heads)))]
    assert kinds == ["linear", "fused", "linear"]


def test_an_ordered_vocabulary_has_the_logits_of_the_best_groups():
    head, centroids, hidden = normal(VOCAB, HIDDEN), normal(10, HIDDEN), normal(3, HIDDEN)
    ordering = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1)).view(10, 5)
    logits = assistant.ordered_logits(hidden, head, centroids, ordering, 2)
    best = (hidden @ centroids.T).topk(2).indices
    for row in range(3):
        some = ordering[best[row]].flatten()
        torch.testing.assert_close(logits[row, some], head[some] @ hidden[row])
        assert logits[row].isfinite().sum() == 10
