"""A tiny random model on disk, with a real tokenizer, for engine tests that need no download."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

ENGINE_SPEC = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
CORPUS = [
    "The steam engine changed how people worked. def add(a, b):\n    return a + b\n",
    "Repeat after me: one two three, one two three. Wiederhole: eins zwei drei. 你好，世界。",
]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<eos>", "<|user|>", "<|assistant|>", "<|system|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 2 layers whose greedy text often repeats itself, so that lookups hit, and often breaks off."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("tiny") / "llama"
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=0,
        bos_token_id=None,
        initializer_range=0.15,
    )
    model = LlamaForCausalLM(config).eval()
    # The likeliest next token follows the current one in a cycle of 7, unless what came before outweighs it.
    embedding, head = model.model.embed_tokens.weight.data, model.lm_head.weight.data
    embedding *= 4
    token = torch.arange(config.vocab_size)
    following = (token // 7 * 7 + (token + 1 - token // 7 * 7) % 7).clamp(max=config.vocab_size - 1)
    head[following] = 0.5 * embedding + 2 * head[following]
    model.generation_config.eos_token_id = 0
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def reference(tiny_model_path: Path):
    """The same model in transformers: prompt ids and a length to greedy token ids."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny_model_path).eval()

    def greedy(prompt_ids: list[int], max_tokens: int, eos: int | None = 0) -> list[int]:
        out = model.generate(
            torch.tensor([prompt_ids]),
            attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=eos if eos is not None else -1,
            pad_token_id=0,
        )
        return out[0, len(prompt_ids) :].tolist()

    return greedy


@pytest.fixture(scope="module")
def engine(tiny_model_path: Path):
    """An engine of two rows that drafts by lookup and keeps detailed metrics."""
    from draftgraph import Engine

    with Engine.from_pretrained(
        tiny_model_path,
        ENGINE_SPEC,
        dtype="float32",
        compile=False,
        max_batch_size=2,
        metrics="detailed",
        max_model_len=512,
    ) as engine:
        yield engine
