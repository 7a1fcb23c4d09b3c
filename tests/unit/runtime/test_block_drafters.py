"""DFlash and DSpark: their drafts equal the plain mathematics after any acceptance, and transformers' own generator."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from draft_blocks import MASK, dflash, dspark, markov_drafts
from draft_heads import HIDDEN, INTERMEDIATE, drafted
from test_draft_heads import ExtraRounds, Lab, record_proposals
from test_executor_identity import engine_with, make

from draftgraph import SamplingParams
from draftgraph.profiling.floor import RoundShape

HEADS = {
    "dflash": lambda vocab: dflash(vocab),
    "dflash, causal, sliding, mask embedding, no norms": lambda vocab: dflash(
        vocab, causal=True, sliding=9, mask_embedding=True, norms=False, nested=False
    ),
    "dflash, use_swa": lambda vocab: dflash(vocab, swa=8, block=5),
    "dflash, sliding both ways": lambda vocab: dflash(vocab, sliding=24, ids=[-1, 4], layers=3),
    "dflash, speculators, reduced vocabulary": lambda vocab: dflash(
        vocab, speculators=True, draft_vocab=60, own=True, sliding=10, ids=[2, 6]
    ),
    "dflash, speculators, from the anchor": lambda vocab: dflash(
        vocab, speculators=True, from_anchor=True, sliding=12, non_causal=True, block=5
    ),
    "dspark": lambda vocab: dspark(vocab, ids=[-1, 2, 5], block=4),
    "dspark, gated, nested, reduced vocabulary": lambda vocab: dspark(
        vocab, "gated", nested=True, draft_vocab=60, with_markov=False
    ),
    "dspark, recurrent, speculators, fill-in": lambda vocab: dspark(vocab, "rnn", speculators=True, draft_vocab=60),
    "dspark, top-k, fill-in": lambda vocab: dspark(vocab, competing=5, from_anchor=False, confidence=False),
}
BRIEF = ["dflash", "dspark, recurrent, speculators, fill-in"]
RATES = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.8, 0.6, 0.5, 0.4]}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("blocks"), HEADS)


@pytest.mark.parametrize("name", HEADS)
def test_drafts_equal_the_plain_mathematics_after_any_acceptance(lab, name):
    """Synthetic acceptance leaves 0 to K drafts standing; rows differ in length, and one prompt has several chunks."""
    depth, head = 4, lab.head(name)
    with lab.engine(lab.spec(name, depth, **RATES), metrics="detailed") as engine:
        found = record_proposals(engine)
        params = SamplingParams(max_tokens=14, ignore_eos=True, seed=5)
        results = engine.generate(lab.prompts, params)
        # A prompt that shares its beginning with what a slot still holds, the answer included.
        first = engine.generate(lab.prompts[0], params)
        again = [*lab.prompts[0], *first.token_ids, 5, 6]
        reusing = engine.generate(again, SamplingParams(max_tokens=4, ignore_eos=True))
    assert reusing.metrics.reused_prompt_tokens > 0
    assert {pair[1] for r in results for pair in r.metrics.round_pairs} >= {0, 1, depth}, "every kind of round"
    assert {len(tokens) for tokens, _, _ in found} >= {1}, "a row with no context yet"
    assert len(found) > 20
    for tokens, drafts, logits in found:
        hidden = lab.states(tokens[:-1], head.states) if len(tokens) > 1 else [torch.zeros(0, 32)] * len(head.states)
        expected = head.drafts(head, lab.tensors, tokens, hidden, depth)[: len(drafts)]
        for step, (ours, theirs) in enumerate(zip(logits, expected, strict=True)):
            torch.testing.assert_close(
                ours, theirs, rtol=2e-3, atol=2e-3, msg=f"draft {step} after {len(tokens)} tokens"
            )
        assert drafts == [drafted(head, values) for values in expected]


@pytest.mark.parametrize("name", ["dspark", "dspark, recurrent, speculators, fill-in"])
def test_the_confidence_head_is_exposed_by_row(lab, name):
    depth, head = 4, lab.head(name)
    with lab.engine(lab.spec(name, depth, **RATES)) as engine:
        speculator, state = engine._core._speculator, engine._core.state
        found, propose = [], speculator.propose

        def recorded(s, bucket):
            propose(s, bucket)
            for row, slot in enumerate(s.slot_of_row[:bucket].tolist()):
                if not s.finished[slot] and s.draft_count[slot] == depth:
                    assert torch.equal(speculator.draft_confidence[row], s.confidence[slot])
                    tokens = s.tokens[slot, : s.length[slot]].tolist()
                    found.append((tokens, speculator.draft_confidence[row].tolist()))
                elif s.finished[slot]:
                    assert not speculator.draft_confidence[row].any()

        speculator.propose = recorded
        engine.generate(lab.prompts[:2], SamplingParams(max_tokens=12, ignore_eos=True, seed=5))
    assert speculator.draft_confidence.shape == (2, depth)
    assert speculator.draft_confidence.dtype == torch.float32
    assert state.confidence.shape[1] == depth
    assert len(found) > 4
    for tokens, confidences in found:
        expected: list[float] = []
        markov_drafts(head, lab.tensors, tokens, lab.states(tokens[:-1], head.states), depth, expected)
        assert confidences == pytest.approx(expected, abs=1e-4)


def test_without_a_confidence_head_there_is_none(lab):
    with lab.engine(lab.spec("dspark, top-k, fill-in", 3)) as engine:
        assert engine._core._speculator.draft_confidence is None


@pytest.mark.parametrize("name", ["dflash, sliding both ways", "dflash, speculators, reduced vocabulary"])
def test_the_drafter_has_an_attention_backend_of_its_own(lab, name):
    """Synthetic acceptance emits drafts, so the text tells them all."""
    texts, params = [], SamplingParams(max_tokens=10, ignore_eos=True, seed=5)
    for backend in (None, "TORCH_SDPA", "reference"):
        with lab.engine(lab.spec(name, 4, **RATES, attention_backend=backend)) as engine:
            texts.append([r.token_ids for r in engine.generate(lab.prompts[:3], params)])
            target, drafter = engine._target.model, engine._core._speculator._drafter
            assert target._constants[0].attention_backend is None
            assert drafter._decoder._constants[0].attention_backend == {"TORCH_SDPA": "sdpa"}.get(backend, backend)
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["extra rounds", "loop", "loop worker", "round worker"])
@pytest.mark.parametrize("name", BRIEF)
def test_drafts_do_not_depend_on_the_executor(lab, name, executor):
    """Rows join and leave, loops end with rows under way, and graphs are captured in the middle of requests."""
    texts, params = [], SamplingParams(max_tokens=14, ignore_eos=True, seed=5)
    for kind, limits in (("host", {}), (executor, {"ring": 11, "rounds_per_launch": 3})):
        options = {"max_batch_size": 2, "max_model_len": 512, **limits}
        made = ExtraRounds() if kind == "extra rounds" else make(kind)
        with engine_with(lab.path / "target", made, lab.spec(name, 4, **RATES), **options) as engine:
            texts.append([r.token_ids for r in engine.generate(lab.prompts, params)])
    assert texts[0] == texts[1]
    assert not isinstance(made, ExtraRounds) or made.extra > 3


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        # Two layers; projection of three states; the context's keys and values; the target's head.
        ("dflash", [(2, "layer"), (1, 3 * 32 * 32), (1, 2 * 2 * 16 * 32), (1, 320 * 32)]),
        ("dspark", [(2, "layer"), (1, 3 * 32 * 32), (1, 2 * 2 * 16 * 32), (1, 320 * 32), (4, 320 * 6)]),
        ("dspark, top-k, fill-in", [(2, "layer"), (1, 3 * 32 * 32), (1, 2048), (1, 320 * 32), (4, 5 * 6)]),
    ],
)
def test_the_floor_of_a_step_counts_its_weights(lab, name, elements):
    layer = (32 + 2 * 16 + 32) * 32 + 3 * 32 * 48
    with lab.engine(lab.spec(name, 4)) as engine:
        cost = engine._core.propose_cost(RoundShape(rows=1, width=8, window=5, context=100, num_drafts=4))
    least = 4 * sum(times * (layer if size == "layer" else size) for times, size in elements)
    # Besides: norms, embeddings and the cache.
    assert least <= cost.bytes_read <= least + 2 * 4 * (2 * 16 * 100 + 1000)
    assert cost.operations >= least / 2


def test_drafts_equal_those_of_transformers_candidate_generator(lab, tmp_path):
    """The same weights in transformers' generator and in an engine; sliding windows count one position more there."""
    from transformers import GenerationConfig, MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
    from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

    window, block, ids = 24, 6, [1, 3, 5]
    draft = dflash(lab.vocab, layers=3, sliding=window, block=block, ids=ids)
    config = MuseGlimmerAssistantConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        sliding_window=window - 1,
        layer_types=draft.config["layer_types"],
        block_size=block,
        mask_token_id=MASK,
        target_layer_ids=ids,
    )
    assistant = MuseGlimmerAssistantModel(config).eval()
    named = {"fc": "encoder.fc", "hidden_norm": "encoder.output_norm_enc"}
    parts = ((name.split(".", 1), tensor) for name, tensor in draft.tensors.items())
    assistant.load_state_dict({f"{named.get(first, first)}.{rest}": tensor for (first, rest), tensor in parts})
    spec = {**draft.spec, "model": str(draft.save(tmp_path)), "num_speculative_tokens": block - 1, **RATES}
    spec["synthetic_acceptance_rates"] = [0.8, 0.6, 0.5, 0.4, 0.3]
    with lab.engine(spec, max_batch_size=1) as engine:
        found = record_proposals(engine)
        engine.generate(lab.prompts[0], SamplingParams(max_tokens=40, ignore_eos=True, seed=5))
    assert len(found) > 8
    generator = DFlashTokenCandidateGenerator(
        assistant,
        lab.model.get_input_embeddings(),
        lab.model.get_output_embeddings(),
        GenerationConfig(max_length=1000, do_sample=False),
    )
    before = None
    with torch.no_grad():
        for index, (tokens, drafts, _) in enumerate(found):
            length = len(tokens)
            # What the target saw last: the whole prompt, then the last anchor and the drafts that stand.
            states = lab.model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
            first = 0 if before is None else before - 1
            outputs = SimpleNamespace(hidden_states=[s[:, first:] for s in states])
            candidates, _ = generator.get_candidates(
                torch.tensor([tokens]),
                {
                    "position_ids": torch.arange(length)[None],
                    "attention_mask": torch.ones(1, length, dtype=torch.long),
                },
                outputs,
                is_first_iteration=False,
                n_last_matches=0 if before is None else length - before - 1,
            )
            assert candidates[0, length:].tolist()[: len(drafts)] == drafts, f"round {index}"
            before = length


@pytest.mark.parametrize("name", ["dflash, speculators, reduced vocabulary", "dspark, recurrent, speculators, fill-in"])
def test_the_whole_draft_is_one_graph(lab, name):
    """From the target's hidden states to the drafts nothing leaves the graph, and every product is there once."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    depth = 4
    with lab.engine(lab.spec(name, depth)) as engine:
        core = engine._core
        with torch.inference_mode(), core._builder.workspaces:
            torch.compile(core._speculator.propose, fullgraph=True, backend=keep)(core.state, 1)
    assert len(graphs) == 1
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    counts = {op: sum(op in target for target in called) for op in ("linear", "project_logits", "pack_block")}
    # The projection, the context's keys and values, and four products of each of two layers; then, of each draft, the
    # recurrent head's two.
    corrections = 2 * depth if name.startswith("dspark") else 0
    assert counts == {"linear": 2 + 2 * 4 + corrections, "project_logits": 1, "pack_block": 1}
    assert sum("advance_draft" in target for target in called) == depth
