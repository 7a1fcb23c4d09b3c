"""A draft model with another vocabulary: the same text, and drafts that are worth something."""

from __future__ import annotations

import pytest
from draft_models import save_noisy_copy, save_translated_copy, sentencepiece_tokenizer

from draftgraph import Engine, SamplingParams
from draftgraph.runtime.errors import ConfigError
from draftgraph.runtime.models import cached_model

CORPUS = [
    "The steam engine changed how people worked. def add(a, b):\n    return a + b\n",
    "Repeat after me: one two three, one two three. Wiederhole: eins zwei drei. 你好，世界。",
]
LONG = "The steam engine changed how people worked. " * 30


@pytest.fixture(scope="module")
def draft_path(tiny_model_path, tmp_path_factory):
    """The target over a SentencePiece vocabulary: it drafts what the target says wherever it has the tokens."""
    path = tmp_path_factory.mktemp("tiny") / "translated"
    return save_translated_copy(tiny_model_path, path, sentencepiece_tokenizer(CORPUS))


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch, request):
    if not request.node.get_closest_marker("models"):
        monkeypatch.setenv("DRAFTGRAPH_CACHE", str(tmp_path))


def drafting(path, depth: int, **options: object) -> dict[str, object]:
    spec = {"method": "draft_model", "model": str(path), "num_speculative_tokens": depth}
    return {**spec, "use_heterogeneous_vocab": True, **options}


def load(path, spec=None, batch: int = 2, **options: object) -> Engine:
    settings: dict = {"dtype": "float32", "compile": False, "max_batch_size": batch, "max_model_len": 1024}
    return Engine.from_pretrained(path, spec, **{**settings, **options})


def prompts(tokenizer) -> list[list[int]]:
    texts = ["a", "The steam engine", "one two three, one two three, one", LONG]
    return [tokenizer(text)["input_ids"] for text in texts]


@pytest.mark.parametrize(("depth", "batch"), [(1, 4), (3, 1), (5, 2), (8, 4)])
def test_greedy_equals_transformers(tiny_model_path, draft_path, reference, depth, batch):
    with load(tiny_model_path, drafting(draft_path, depth), batch) as engine:
        ids = prompts(engine.tokenizer)
        results = engine.generate(ids, SamplingParams(max_tokens=32))
    for prompt, result in zip(ids, results, strict=True):
        assert list(result.token_ids) == reference(prompt, 32)
    # The draft model is the target itself where it has the tokens, so its drafts stand there.
    accepted = sum(r.metrics.accepted_tokens for r in results)
    assert accepted > 0.1 * sum(r.metrics.proposed_tokens for r in results)


def test_coupled_text_depends_on_the_seed_alone(tiny_model_path, draft_path):
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=24)
    outputs = []
    for spec in (
        {"method": "none", "rejection_sample_method": "coupled"},
        drafting(draft_path, 4, rejection_sample_method="coupled"),
    ):
        with load(tiny_model_path, spec) as engine:
            outputs.append([r.token_ids for r in engine.generate(prompts(engine.tokenizer), params)])
    assert outputs[1] == outputs[0]


def test_the_same_vocabulary_through_a_mapping_is_itself(tiny_model_path):
    """Every token is mapped to itself, so a model that drafts for itself is always right."""
    with load(tiny_model_path, drafting(tiny_model_path, 4), metrics="detailed") as engine:
        result = engine.generate(prompts(engine.tokenizer)[1], SamplingParams(max_tokens=30, ignore_eos=True))
    assert all(proposed == accepted for proposed, accepted in result.metrics.round_pairs)


class TestBadInput:
    def test_without_the_option(self, tiny_model_path, draft_path):
        with pytest.raises(ConfigError, match="set use_heterogeneous_vocab"):
            load(tiny_model_path, drafting(draft_path, 3, use_heterogeneous_vocab=False))

    def test_probabilistic(self, tiny_model_path, draft_path):
        with pytest.raises(ConfigError, match="use_heterogeneous_vocab needs draft_sample_method 'greedy'"):
            load(tiny_model_path, drafting(draft_path, 3, draft_sample_method="probabilistic"))

    def test_nothing_in_common(self, tiny_model_path, tmp_path, monkeypatch):
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        other = save_noisy_copy(tiny_model_path, tmp_path / "other", 0.1)
        foreign = Tokenizer(models.WordLevel({"\u4e00\u4e8c": 0, "\u4e09\u56db": 1}, unk_token="\u4e00\u4e8c"))
        PreTrainedTokenizerFast(tokenizer_object=foreign, unk_token="\u4e00\u4e8c").save_pretrained(other)
        monkeypatch.setattr("draftgraph.runtime.loading.load_model", lambda *a, **k: pytest.fail("read weights"))
        with pytest.raises(ConfigError, match="have no token in common"):
            load(tiny_model_path, drafting(other, 3))


@pytest.mark.models
@pytest.mark.slow
def test_smollm2_drafts_for_gemma(smollm2_path, record_property):
    gemma = cached_model("gemma3-270m")
    if gemma is None:
        pytest.skip("Gemma 3 270M is not in the cache: run `draftgraph fetch gemma3-270m`")
    texts = [
        "The history of the steam engine begins with",
        "def fibonacci(n):\n",
        "The capital of France is Paris. The capital of Spain is",
        "1, 2, 3, 4, 5, 6,",
        "Once upon a time, there was a little girl named Anna. She",
    ]
    params = SamplingParams(max_tokens=24)
    with load(gemma, None, 1, max_model_len=128) as engine:
        plain = [r.token_ids for r in engine.generate(texts, params)]
    with load(gemma, drafting(smollm2_path, 4), 1, max_model_len=128) as engine:
        results = engine.generate(texts, params)
    assert [r.token_ids for r in results] == plain
    lengths = [r.metrics.mean_acceptance_length for r in results]
    record_property("mean_acceptance_lengths", lengths)
    mean = sum(lengths) / len(lengths)
    print(f"mean acceptance length of SmolLM2-135M for Gemma 3 270M, K = 4: {mean:.2f}")
    assert mean > 2.0
