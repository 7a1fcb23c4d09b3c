"""A draft model changes nothing but the speed: token for token, at every depth, bucket and rule."""

from __future__ import annotations

import logging

import pytest
import torch
from draft_models import save_noisy_copy

from draftgraph import Engine, SamplingParams
from draftgraph.runtime.errors import ConfigError, NotAvailableError

LONG = "The steam engine changed how people worked. " * 30  # past one prefill chunk


@pytest.fixture(scope="module")
def draft_path(tiny_model_path, tmp_path_factory):
    return save_noisy_copy(tiny_model_path, tmp_path_factory.mktemp("tiny") / "draft", 0.25)


def prompts(tokenizer) -> list[list[int]]:
    texts = ["a", "The steam engine", "one two three, one two three, one", LONG]
    return [tokenizer(text)["input_ids"] for text in texts]


def drafting(path, depth: int, **options: object) -> dict[str, object]:
    return {"method": "draft_model", "model": str(path), "num_speculative_tokens": depth, **options}


def load(path, spec=None, batch: int = 2, **options: object) -> Engine:
    settings: dict = {"dtype": "float32", "compile": False, "max_batch_size": batch, "max_model_len": 1024}
    return Engine.from_pretrained(path, spec, **{**settings, **options})


@pytest.mark.parametrize(("depth", "batch"), [(1, 4), (2, 1), (3, 2), (4, 4), (5, 1), (6, 2), (7, 4), (8, 1), (8, 4)])
def test_greedy_equals_transformers(tiny_model_path, draft_path, reference, depth, batch):
    with load(tiny_model_path, drafting(draft_path, depth), batch) as engine:
        ids = prompts(engine.tokenizer)
        results = engine.generate(ids, SamplingParams(max_tokens=40))
    for prompt, result in zip(ids, results, strict=True):
        assert list(result.token_ids) == reference(prompt, 40)
    accepted = sum(r.metrics.accepted_tokens for r in results)
    assert 0 < accepted < sum(r.metrics.proposed_tokens for r in results), "some must stand and some must fall"


def test_drafts_equal_transformers_after_any_acceptance(tiny_model_path, draft_path):
    """Its assisted generation drafts with the same model from the same text, with no cache kept from round to round."""
    from transformers import GenerationConfig, LlamaForCausalLM
    from transformers.generation.candidate_generator import AssistedCandidateGenerator

    depth = 4
    rates = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.8, 0.6, 0.5, 0.4]}
    found: list[tuple[list[int], list[int]]] = []
    with load(tiny_model_path, drafting(draft_path, depth, **rates), metrics="detailed") as engine:
        speculator = engine._core._speculator
        propose = speculator.propose

        def recorded(state, bucket):
            propose(state, bucket)
            for slot in state.slot_of_row[:bucket].tolist():
                count = int(state.draft_count[slot])
                if count and not state.finished[slot]:
                    tokens = state.tokens[slot, : state.length[slot]].tolist()
                    found.append((tokens, state.draft_tokens[slot, :count].tolist()))

        speculator.propose = recorded
        results = engine.generate(prompts(engine.tokenizer), SamplingParams(max_tokens=14, ignore_eos=True, seed=5))
    assert {pair[1] for r in results for pair in r.metrics.round_pairs} >= {0, 1, depth}, "every kind of round"
    assert len(found) > 15
    drafter = LlamaForCausalLM.from_pretrained(draft_path).eval()
    drafter.generation_config.update(
        num_assistant_tokens=depth, assistant_confidence_threshold=0.0, num_assistant_tokens_schedule="constant"
    )
    for tokens, drafts in found:
        ids = torch.tensor([tokens])
        config = GenerationConfig(max_length=10_000, min_length=0, eos_token_id=None)
        generator = AssistedCandidateGenerator(ids, drafter, config, {"attention_mask": torch.ones_like(ids)})
        candidates, _ = generator.get_candidates(ids)
        theirs = candidates[0, len(tokens) :].tolist()
        assert len(theirs) == depth or theirs[-1] == 0, "theirs may stop at the end"
        assert theirs[: len(drafts)] == drafts[: len(theirs)]


@pytest.mark.parametrize("sampling", ["greedy", "probabilistic"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_coupled_text_depends_on_the_seed_alone(tiny_model_path, draft_path, sampling, temperature):
    params = SamplingParams(temperature=temperature, top_p=0.95, seed=5, max_tokens=32)
    outputs = []
    with load(tiny_model_path, {"method": "none", "rejection_sample_method": "coupled"}, 1) as engine:
        ids = prompts(engine.tokenizer)
        outputs.append([r.token_ids for r in engine.generate(ids, params)])
    for depth, batch in ((1, 1), (4, 2), (8, 4)):
        spec = drafting(draft_path, depth, rejection_sample_method="coupled", draft_sample_method=sampling)
        with load(tiny_model_path, spec, batch) as engine:
            outputs.append([r.token_ids for r in engine.generate(ids, params)])
    assert outputs[1:] == outputs[:1] * 3


@pytest.mark.parametrize("depth", [1, 2, 5, 8])
@pytest.mark.parametrize(
    ("rule", "sampling", "temperature"),
    [("standard", "greedy", 0.0), ("coupled", "probabilistic", 0.8), ("standard", "probabilistic", 0.8)],
)
def test_a_model_that_drafts_for_itself_is_always_right(tiny_model_path, depth, rule, sampling, temperature):
    spec = drafting(tiny_model_path, depth, rejection_sample_method=rule, draft_sample_method=sampling)
    with load(tiny_model_path, spec, metrics="detailed") as engine:
        params = SamplingParams(max_tokens=45, ignore_eos=True, temperature=temperature, seed=1)
        results = engine.generate(prompts(engine.tokenizer), params)
    for result in results:
        pairs = result.metrics.round_pairs
        assert all(proposed == accepted for proposed, accepted in pairs)
        assert [proposed for proposed, _ in pairs[:-1]] == [depth] * (len(pairs) - 1)


def test_a_slot_is_reused_without_what_the_drafter_has_not_seen(tiny_model_path, reference):
    """A follow-up prompt over generated tokens: were stale KV of the drafter kept, it would not draft for itself."""
    spec = drafting(tiny_model_path, 3)
    for first in (8, 9, 10, 11):  # so that the last round ends at each number of accepted drafts
        with load(tiny_model_path, spec, 1, metrics="detailed") as engine:
            ids = prompts(engine.tokenizer)[1]
            answer = engine.generate(ids, SamplingParams(max_tokens=first, ignore_eos=True)).token_ids
            again = [*ids, *answer, 7, 8, 9]
            result = engine.generate(again, SamplingParams(max_tokens=16, ignore_eos=True))
        assert result.metrics.reused_prompt_tokens == len(ids) + first - 2
        assert list(result.token_ids) == reference(again, 16, eos=None)
        assert all(proposed == accepted for proposed, accepted in result.metrics.round_pairs)


def test_stop_tokens_inside_a_window(tiny_model_path, draft_path, reference):
    with load(tiny_model_path, drafting(draft_path, 6), 1) as engine:
        for ids in prompts(engine.tokenizer):
            expected = reference(ids, 24, eos=None)
            stop = expected[7]
            params = SamplingParams(max_tokens=24, ignore_eos=True, stop_token_ids=(stop,))
            assert list(engine.generate(ids, params).token_ids) == expected[: expected.index(stop) + 1]


def test_requests_that_join_and_leave(tiny_model_path, draft_path, reference):
    with load(tiny_model_path, drafting(draft_path, 4), 2) as engine:
        ids = prompts(engine.tokenizer) * 2
        lengths = [3, 40, 7, 25, 1, 12, 30, 5]
        streams = [engine.stream(i, SamplingParams(max_tokens=n)) for i, n in zip(ids, lengths, strict=True)]
        next(streams[1])
        streams[1].close()
        tokens = [[t for chunk in stream for t in chunk.token_ids] for stream in streams]
    for index, (prompt, length) in enumerate(zip(ids, lengths, strict=True)):
        if index != 1:
            assert tokens[index] == reference(prompt, length)


def test_the_end_of_the_context(tiny_model_path, draft_path, reference):
    with load(tiny_model_path, drafting(draft_path, 8), 2, max_model_len=40) as engine:
        ids = [list(range(20, 56)), list(range(30, 69))]
        results = engine.generate(ids, SamplingParams(max_tokens=30, ignore_eos=True))
    for prompt, result in zip(ids, results, strict=True):
        assert list(result.token_ids) == reference(prompt, 40 - len(prompt), eos=None)
        assert result.finish_reason == "length"


@pytest.mark.slow
def test_exact_and_compiled_give_the_same(tiny_model_path, draft_path):
    outputs = []
    for spec, options in (
        (None, {"exact": True}),
        (drafting(draft_path, 4), {"exact": True}),
        (drafting(draft_path, 4), {"exact": True, "compile": True}),
    ):
        with load(tiny_model_path, spec, 1, **options) as engine:
            ids = prompts(engine.tokenizer)[:3]
            outputs.append([r.token_ids for r in engine.generate(ids, SamplingParams(max_tokens=24))])
    assert outputs[1:] == outputs[:1] * 2


def test_confidence_is_a_probability_of_every_draft(tiny_model_path, draft_path):
    with load(tiny_model_path, drafting(draft_path, 3), 1) as engine:
        stream = engine.stream(prompts(engine.tokenizer)[1], SamplingParams(max_tokens=40, ignore_eos=True))
        next(stream)
        state = engine._core.state
        confidence = state.confidence[:-1][state.draft_tokens[:-1] >= 0]
        stream.close()
    assert len(confidence) == 3
    assert ((confidence > 0) & (confidence <= 1)).all()


def test_a_drafter_without_finite_numbers_proposes_nothing(tiny_model_path, tmp_path, reference):
    broken = save_noisy_copy(tiny_model_path, tmp_path / "broken", float("nan"))
    with load(tiny_model_path, drafting(broken, 3), 1) as engine:
        ids = prompts(engine.tokenizer)[1]
        result = engine.generate(ids, SamplingParams(max_tokens=12))
    assert list(result.token_ids) == reference(ids, 12)
    assert result.metrics.accepted_tokens == 0


class TestBadInput:
    def test_a_draft_model_that_does_not_exist(self, tiny_model_path):
        with pytest.raises(ValueError, match="no model 'no-such-model'"):
            load(tiny_model_path, drafting("no-such-model", 3))

    def test_another_vocabulary_size(self, tiny_model_path, tmp_path):
        import json
        import shutil

        other = shutil.copytree(tiny_model_path, tmp_path / "other")
        config = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps(config | {"vocab_size": 77}))
        with pytest.raises(ConfigError, match=r"the draft model's 77: use .* or set use_heterogeneous_vocab"):
            load(tiny_model_path, drafting(other, 3))

    def test_too_long_for_the_draft_model(self, tiny_model_path, tmp_path, caplog):
        short = save_noisy_copy(tiny_model_path, tmp_path / "short", 0.1, max_position_embeddings=128)
        with pytest.raises(ConfigError, match=r"max_model_len is 200, but the draft model .* at most 128 tokens"):
            load(tiny_model_path, drafting(short, 3), max_model_len=200)
        with caplog.at_level(logging.WARNING), load(tiny_model_path, drafting(short, 3), max_model_len=None) as engine:
            assert engine._target.max_model_len == 128
        assert "sequences have at most 128 tokens" in caplog.text

    def test_a_draft_model_as_large_as_the_target_is_warned_of(self, tiny_model_path, draft_path, caplog):
        with caplog.at_level(logging.WARNING), load(tiny_model_path, drafting(draft_path, 3)):
            pass
        assert "each of its 3 drafts per round reads 1.00 times the weights" in caplog.text
        assert "1.00 times the plain speed if every draft were accepted, and at 0.74" in caplog.text

    def test_options_of_this_version(self, tiny_model_path, draft_path):
        with pytest.raises(NotAvailableError, match="use_local_argmax_reduction is not available"):
            load(tiny_model_path, drafting(draft_path, 3, use_local_argmax_reduction=True))


def test_another_tokenizer_of_the_same_size_is_warned_of(tiny_model_path, tmp_path, caplog):
    import json

    other = save_noisy_copy(tiny_model_path, tmp_path / "swapped", 0.1)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with caplog.at_level(logging.WARNING), load(tiny_model_path, drafting(other, 3)):
        pass
    assert "another tokenizer than the target: 2 of the target's" in caplog.text


def test_no_graph_is_kept_for_autograd(tiny_model_path, draft_path):
    with load(tiny_model_path, drafting(draft_path, 2), 1) as engine:
        engine.generate([5, 6, 7], SamplingParams(max_tokens=4))
        assert not any(tensor.requires_grad for tensor in engine._core.state.tensors().values())
    assert torch.is_grad_enabled()
