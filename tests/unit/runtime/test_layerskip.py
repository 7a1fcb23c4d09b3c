"""Early exit: the first layers draft, verification begins above them, and the text is plain decoding's."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from draftgraph import Engine, SamplingParams
from draftgraph.runtime.errors import ConfigError

LONG = "The steam engine changed how people worked. " * 30  # past one prefill chunk
LAYERS = 3


@pytest.fixture(scope="module")
def target_path(tiny_model_path, tmp_path_factory):
    """The tiny model with a third layer, so that there are two places to leave off in the middle."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny_model_path)
    config = model.config
    config.num_hidden_layers = LAYERS
    torch.manual_seed(1)
    deeper = LlamaForCausalLM(config)
    deeper.load_state_dict(model.state_dict(), strict=False)
    deeper.generation_config.eos_token_id = 0
    path = tmp_path_factory.mktemp("layers") / "llama"
    deeper.save_pretrained(path)
    AutoTokenizer.from_pretrained(tiny_model_path).save_pretrained(path)
    return path


def prompts(tokenizer) -> list[list[int]]:
    texts = ["a", "The steam engine", "one two three, one two three, one", LONG]
    return [tokenizer(text)["input_ids"] for text in texts]


def skipping(depth: int, exit_layer: int = 1, **options: object) -> dict[str, object]:
    return {"method": "layerskip", "exit_layer": exit_layer, "num_speculative_tokens": depth, **options}


def load(path, spec=None, batch: int = 2, **options: object) -> Engine:
    settings: dict = {"dtype": "float32", "compile": False, "max_batch_size": batch, "max_model_len": 1024}
    return Engine.from_pretrained(path, spec, **{**settings, **options})


@pytest.fixture(scope="module")
def plain(target_path):
    """Plain greedy token ids, without an end."""
    with load(target_path) as engine:
        ids = prompts(engine.tokenizer)
        results = engine.generate(ids, SamplingParams(max_tokens=40, ignore_eos=True))
        return ids, [r.token_ids for r in results]


@pytest.mark.parametrize(
    ("depth", "batch", "exit_layer"),
    [(1, 4, 1), (2, 1, 1), (3, 2, 2), (4, 4, 1), (5, 1, 2), (6, 2, 1), (7, 4, 1), (8, 1, 1), (8, 4, 2)],
)
def test_greedy_equals_plain_decoding(target_path, plain, depth, batch, exit_layer):
    ids, wanted = plain
    with load(target_path, skipping(depth, exit_layer), batch) as engine:
        results = engine.generate(ids, SamplingParams(max_tokens=40, ignore_eos=True))
    assert [r.token_ids for r in results] == wanted
    accepted = sum(r.metrics.accepted_tokens for r in results)
    assert 0 < accepted < sum(r.metrics.proposed_tokens for r in results), "some must stand and some must fall"


@pytest.mark.parametrize("sampling", ["greedy", "probabilistic"])
def test_coupled_text_depends_on_the_seed_alone(target_path, sampling):
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=5, max_tokens=32)
    outputs = []
    with load(target_path, {"method": "none", "rejection_sample_method": "coupled"}, 1) as engine:
        ids = prompts(engine.tokenizer)
        outputs.append([r.token_ids for r in engine.generate(ids, params)])
    for depth, batch in ((1, 1), (4, 2), (8, 4)):
        spec = skipping(depth, rejection_sample_method="coupled", draft_sample_method=sampling)
        with load(target_path, spec, batch) as engine:
            outputs.append([r.token_ids for r in engine.generate(ids, params)])
    assert outputs[1:] == outputs[:1] * 3


@pytest.mark.parametrize("depth", [1, 5, 8])
@pytest.mark.parametrize(("sampling", "temperature"), [("greedy", 0.0), ("probabilistic", 0.8)])
def test_all_layers_are_always_right(target_path, depth, sampling, temperature):
    spec = skipping(depth, LAYERS, draft_sample_method=sampling)
    with load(target_path, spec, metrics="detailed") as engine:
        params = SamplingParams(max_tokens=45, ignore_eos=True, temperature=temperature, seed=1)
        results = engine.generate(prompts(engine.tokenizer), params)
    for result in results:
        pairs = result.metrics.round_pairs
        assert all(proposed == accepted for proposed, accepted in pairs)
        assert [proposed for proposed, _ in pairs[:-1]] == [depth] * (len(pairs) - 1)


def test_the_end_of_the_context(target_path):
    """The last windows are cut short, and the last draft of one has nothing after it."""
    ids = [list(range(20, 56)), list(range(30, 69)), list(range(40, 52))]
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    outputs = []
    for spec in (None, skipping(8), skipping(8, LAYERS), skipping(3, 2)):
        with load(target_path, spec, max_model_len=40) as engine:
            outputs.append([(r.token_ids, r.finish_reason) for r in engine.generate(ids, params)])
    assert outputs[1:] == outputs[:1] * 3


def test_fewer_drafts_may_be_verified_than_made(target_path, plain):
    ids, wanted = plain
    spec = skipping(6, num_speculative_tokens_per_batch_size=[[1, 1, 2], [2, 2, 0]])
    with load(target_path, spec, metrics="detailed") as engine:
        results = engine.generate(ids, SamplingParams(max_tokens=40, ignore_eos=True))
    assert [r.token_ids for r in results] == wanted
    assert {proposed for r in results for proposed, _ in r.metrics.round_pairs} >= {0, 2}


def test_requests_that_join_leave_and_reuse_slots(target_path, plain):
    ids, wanted = plain
    lengths = [3, 40, 7, 25, 1, 12, 30, 5]
    with load(target_path, skipping(4), 2) as engine:
        streams = [
            engine.stream(i, SamplingParams(max_tokens=n, ignore_eos=True))
            for i, n in zip(ids * 2, lengths, strict=True)
        ]
        next(streams[1])
        streams[1].close()
        tokens = [tuple(t for chunk in stream for t in chunk.token_ids) for stream in streams]
        again = [*ids[1], *wanted[1][:20]]
        follow_up = engine.generate(again, SamplingParams(max_tokens=20, ignore_eos=True))
    for index, length in enumerate(lengths):
        if index != 1:
            assert tokens[index] == wanted[index % 4][:length]
    assert follow_up.token_ids == wanted[1][20:]


def test_exact_in_bfloat16(target_path):
    outputs = []
    for spec in (None, skipping(4), skipping(4, LAYERS)):
        with load(target_path, spec, dtype="bfloat16", exact=True) as engine:
            ids = prompts(engine.tokenizer)
            outputs.append([r.token_ids for r in engine.generate(ids, SamplingParams(max_tokens=40))])
    assert outputs[1:] == outputs[:1] * 2


class CountLayers(TorchDispatchMode):
    """Counts the attention ops: one per layer that runs."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.draftgraph.window_attention.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("exit_layer", [1, 2, LAYERS])
def test_verification_does_not_run_the_lower_layers_again(target_path, exit_layer):
    depth = 4
    with load(target_path, skipping(depth, exit_layer)) as engine:
        engine.generate([5, 6, 7], SamplingParams(max_tokens=4))
        program = next(p for p in engine._core.programs() if p.name == "round[1]")
        counts = {}
        with torch.inference_mode():
            for step in program.steps():
                with CountLayers() as layers:
                    step.fn(engine._core.state)
                counts[step.name] = layers.count
    assert counts.pop("propose") == (depth + 1) * exit_layer
    verified = {name: count for name, count in counts.items() if name.startswith("verify")}
    assert verified
    assert set(verified.values()) == {LAYERS - exit_layer}


def test_the_compiled_graph_has_the_upper_layers_only(target_path):
    """Traced whole by the compiler's front end, with attention left as it is."""
    with load(target_path, skipping(4, 2)) as engine:
        program = next(p for p in engine._core.programs() if p.name == "round[1]")
        step = next(s for s in program.steps() if s.name.startswith("verify"))
        graphs = []

        def keep(module, inputs):
            graphs.append(module.graph)
            return module.forward

        torch._dynamo.reset()
        try:
            with torch.inference_mode():
                torch.compile(step.fn, backend=keep, dynamic=False)(engine._core.state)
        finally:
            torch._dynamo.reset()
    attended = [n for graph in graphs for n in graph.nodes if "window_attention" in str(n.target)]
    embedded = [n for graph in graphs for n in graph.nodes if "embed_tokens" in str(n.target)]
    assert len(attended) == LAYERS - 2
    assert not embedded


def test_what_a_round_costs(target_path):
    from draftgraph.profiling.floor import RoundShape

    shape = RoundShape(rows=1, width=8, window=5, context=100, num_drafts=4, dtype=torch.float32)
    with load(target_path, None) as engine:
        whole = engine.round_costs(shape)["verify"]
    costs = {}
    for exit_layer in (1, 2, LAYERS):
        with load(target_path, skipping(4, exit_layer)) as engine:
            costs[exit_layer] = engine.round_costs(shape)
    reads = [costs[layer]["verify"].bytes_read for layer in (1, 2, LAYERS)]
    assert whole.bytes_read - reads[0] == pytest.approx(reads[0] - reads[1])
    assert reads[1] - reads[2] == pytest.approx(reads[0] - reads[1])
    assert costs[2]["propose"].bytes_read > costs[1]["propose"].bytes_read


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (skipping(3, 4), "exit_layer must be from 1 to 3, the target's layers, got 4"),
        (skipping(3, 0), "exit_layer must be at least 1, got 0"),
        (skipping(3, True), "exit_layer must be an integer, got True"),
        ({"method": "layerskip", "num_speculative_tokens": 3}, "method 'layerskip' needs exit_layer"),
        ({"method": "ngram", "num_speculative_tokens": 3, "exit_layer": 1}, "exit_layer needs method 'layerskip'"),
        ({"method": "layerskip", "exit_layer": 1}, "needs num_speculative_tokens"),
    ],
)
def test_bad_input(target_path, spec, message):
    with pytest.raises(ConfigError, match=message):
        load(target_path, spec)


@pytest.mark.models
def test_half_of_smollm2_is_lossless(smollm2_path):
    prompt = "The capital of France is Paris. The capital of Spain is"
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    outputs = []
    for spec in (None, skipping(3, 15)):
        with load(smollm2_path, spec, 1, max_model_len=256) as engine:
            outputs.append(engine.generate(prompt, params).token_ids)
    assert outputs[0] == outputs[1]
