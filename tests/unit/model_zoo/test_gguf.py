"""A tiny GGUF file, written here, through the conversion and into a model."""

from __future__ import annotations

import json
import logging

import gguf
import numpy as np
import pytest
import torch
import transformers
from tiny_models import SLOTS, pack
from transformers.convert_slow_tokenizer import bytes_to_unicode

from draftgraph.model_zoo import CheckpointError, load_model
from draftgraph.model_zoo.gguf import convert_gguf

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS = 64, 96, 2, 4, 2
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def _vocabulary() -> tuple[list[str], list[str]]:
    """Special tokens, every byte, and a few merges."""
    letters = list(bytes_to_unicode().values())
    merges = ["t h", "th e", "i n", "Ġ the"]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return special + letters + [merge.replace(" ", "") for merge in merges], merges


def _write(path) -> None:
    tokens, merges = _vocabulary()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)

    random = np.random.default_rng(0)

    def add(name: str, *shape: int, quantize: bool = True) -> None:
        value = (random.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)
        if quantize:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value + 1)

    kv = HIDDEN // HEADS * KV_HEADS
    add("token_embd.weight", len(tokens), HIDDEN)
    add("output_norm.weight", HIDDEN, quantize=False)
    for layer in range(LAYERS):
        prefix = f"blk.{layer}."
        add(f"{prefix}attn_norm.weight", HIDDEN, quantize=False)
        add(f"{prefix}ffn_norm.weight", HIDDEN, quantize=False)
        add(f"{prefix}attn_q.weight", HIDDEN, HIDDEN)
        add(f"{prefix}attn_k.weight", kv, HIDDEN)
        add(f"{prefix}attn_v.weight", kv, HIDDEN)
        add(f"{prefix}attn_output.weight", HIDDEN, HIDDEN)
        add(f"{prefix}ffn_gate.weight", INTERMEDIATE, HIDDEN)
        add(f"{prefix}ffn_up.weight", INTERMEDIATE, HIDDEN)
        add(f"{prefix}ffn_down.weight", HIDDEN, INTERMEDIATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """The GGUF file, its directory, and what the conversion told."""
    place = tmp_path_factory.mktemp("gguf")
    source = place / "tiny.gguf"
    _write(source)
    messages: list[str] = []
    directory = convert_gguf(source, place / "tiny", dtype=torch.float32, progress=messages.append)
    return source, directory, messages


def test_directory(converted) -> None:
    source, directory, messages = converted
    names = {path.name for path in directory.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    assert "quantization_config" not in json.loads((directory / "config.json").read_text())
    assert [path.name for path in source.parent.iterdir() if path.name.startswith(".")] == []
    assert messages == ["reading tiny.gguf", f"writing {directory}"]


def test_logits_and_tokenizer(converted) -> None:
    source, directory, _ = converted
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    tokens = tokenizer("in the thing")["input_ids"]
    assert tokenizer.decode(tokens) == "in the thing"
    assert "<|im_end|>" in tokenizer.apply_chat_template([{"content": "x"}], tokenize=False)

    reference = transformers.AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name)
    model = load_model(directory, dtype=torch.float32)
    assert model.config.tie_word_embeddings
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
        result = model.logits(model.forward(pack([(tokens, 0, 0)]), model.allocate_cache(SLOTS, 64)))
    assert (result - expected).abs().max() / expected.abs().max() < 1e-4


def test_is_quiet(converted, tmp_path, capfd, caplog, recwarn) -> None:
    with caplog.at_level(logging.INFO):
        convert_gguf(converted[0], tmp_path / "again")
    assert capfd.readouterr() == ("", "")
    assert [str(warning.message) for warning in recwarn] == []


def test_failure_leaves_nothing(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        convert_gguf(tmp_path / "none.gguf", tmp_path / "out")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(CheckpointError, match=r"broken\.gguf cannot be read as GGUF"):
        convert_gguf(broken, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["broken.gguf"]


def test_target_in_use(tmp_path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    (tmp_path / "tiny.gguf").touch()
    with pytest.raises(CheckpointError, match="not an empty directory"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
