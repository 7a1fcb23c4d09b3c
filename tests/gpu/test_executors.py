"""On a CUDA device: the executors agree with each other and with the CPU, and the probe finds them."""

from __future__ import annotations

import pytest
import torch

from draftgraph import Engine, SamplingParams
from draftgraph.graphs.executors import EXECUTOR_NAMES
from draftgraph.graphs.probe import probe

pytestmark = pytest.mark.gpu

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "rejection_sample_method": "coupled"}
PROMPTS = [list(range(5, 40)), [7, 8, 9] * 6, [3, 1, 4, 1, 5, 9, 2, 6]]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("gpu") / "llama"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        initializer_range=0.15,
        eos_token_id=0,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    vocabulary = {f"t{i}": i for i in range(320)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t1"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t0").save_pretrained(path)
    return path


def answers(path, executor, spec, params, device="cuda"):
    options = {"dtype": "float32", "max_batch_size": 2, "max_model_len": 256, "compile": False}
    with Engine.from_pretrained(path, spec, device=device, executor=executor, **options) as engine:
        engine.warmup()
        return [r.token_ids for r in engine.generate(PROMPTS, params)]


def test_the_probe_finds_what_works():
    found = probe(torch.device("cuda", torch.cuda.current_device()))
    assert found["round"].works, found["round"].reason
    assert found["loop"].works, found["loop"].reason


@pytest.mark.parametrize("spec", [None, NGRAM], ids=["plain", "ngram"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_executors_agree(model_path, spec, temperature):
    params = SamplingParams(max_tokens=32, temperature=temperature, seed=3, ignore_eos=True)
    by_executor = {name: answers(model_path, name, spec, params) for name in EXECUTOR_NAMES}
    assert by_executor["round"] == by_executor["host"]
    assert by_executor["loop"] == by_executor["host"]
    if temperature == 0.0:
        assert by_executor["host"] == answers(model_path, "host", spec, params, device="cpu")
