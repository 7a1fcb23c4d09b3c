"""Checkpoint directories: what loads, what is refused and with which words, and how much memory it takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import SLOTS, pack, random_tokens, tiny_model

from draftgraph.model_zoo import CheckpointError, UnsupportedModelError, load_model


@pytest.fixture
def directory(tmp_path):
    tiny_model("llama-biases").save_pretrained(tmp_path)
    return tmp_path


def _logits(model):
    with torch.inference_mode():
        return model.logits(model.forward(pack([(random_tokens(20, 0), 0, 1)]), model.allocate_cache(SLOTS, 64)))


def _rewrite(directory, change) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_shards_equal_one_file(tmp_path) -> None:
    reference = tiny_model("gemma3")
    reference.save_pretrained(tmp_path / "one")
    reference.save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    one, shards = (_logits(load_model(tmp_path / name, dtype=torch.float32)) for name in ("one", "shards"))
    assert torch.equal(one, shards)


@pytest.mark.parametrize(
    "prefixes", [("language_model.model.", "vision_tower."), ("model.language_model.", "model.vision_tower.")]
)
def test_text_part_of_a_multimodal_checkpoint(tmp_path, prefixes) -> None:
    tiny_model("gemma3").save_pretrained(tmp_path)
    expected = _logits(load_model(tmp_path, dtype=torch.float32))
    hf = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": hf}))

    def change(tensors) -> None:
        for name in list(tensors):
            tensors[name.replace("model.", prefixes[0], 1)] = tensors.pop(name)
        tensors[f"{prefixes[1]}patch.weight"] = torch.zeros(3, 3)

    _rewrite(tmp_path, change)
    assert torch.equal(_logits(load_model(tmp_path, dtype=torch.float32)), expected)


def test_stored_type_does_not_matter(directory) -> None:
    _rewrite(directory, lambda tensors: tensors.update({n: t.bfloat16() for n, t in tensors.items()}))
    bf16 = _logits(load_model(directory, dtype=torch.float32))
    _rewrite(directory, lambda tensors: tensors.update({n: t.float() for n, t in tensors.items()}))
    assert torch.equal(_logits(load_model(directory, dtype=torch.float32)), bf16)


def test_old_rotary_frequencies_and_a_tied_head_are_ignored(tmp_path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    expected = _logits(load_model(tmp_path, dtype=torch.float32))

    def change(tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
        tensors["lm_head.weight"] = torch.zeros_like(tensors["model.embed_tokens.weight"])

    _rewrite(tmp_path, change)
    assert torch.equal(_logits(load_model(tmp_path, dtype=torch.float32)), expected)


def test_context_beyond_the_tables(directory) -> None:
    model = load_model(directory, dtype=torch.float32, max_positions=100)
    assert model.allocate_cache(2, 100).key.shape[3] == 192
    with pytest.raises(ValueError, match="context 101 exceeds"):
        model.allocate_cache(2, 101)


def _fails(directory, message, error=CheckpointError) -> None:
    with pytest.raises(error, match=message):
        load_model(directory, dtype=torch.float32)


def test_missing_and_damaged_config(directory) -> None:
    (directory / "config.json").write_text("{")
    _fails(directory, "config.json is not valid JSON")
    (directory / "config.json").write_text("[]")
    _fails(directory, "does not hold a JSON object")
    (directory / "config.json").unlink()
    _fails(directory, "config.json does not exist")


def test_no_weights(directory) -> None:
    (directory / "model.safetensors").unlink()
    _fails(directory, "neither model.safetensors nor model.safetensors.index.json")


@pytest.mark.parametrize("keep", [4, 100, -1])
def test_truncated_file(directory, keep) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    _fails(directory, "model.safetensors is truncated")


def test_damaged_header(directory) -> None:
    path = directory / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[8:12] = b"oops"
    path.write_bytes(content)
    _fails(directory, "damaged safetensors header")


@pytest.mark.parametrize(
    "change",
    [
        {"shape": "ab"},
        {"shape": [-64]},
        {"shape": [64.0]},
        {"dtype": 5},
        {"data_offsets": [0, 10]},
        {"data_offsets": [-10, 10]},
    ],
)
def test_damaged_entry_of_a_header(directory, change) -> None:
    path = directory / "model.safetensors"
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["model.norm.weight"].update(change)
    written = json.dumps(header).encode()
    path.write_bytes(len(written).to_bytes(8, "little") + written + content[end:])
    _fails(directory, "damaged safetensors header")


def test_a_directory_in_place_of_a_file(directory) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").mkdir()
    _fails(directory, "model.safetensors cannot be read: Is a directory")


def test_index_disagrees(tmp_path) -> None:
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="60KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"]["model.norm.weight"] = next(
        name for name in files if name != index["weight_map"]["model.norm.weight"]
    )
    path.write_text(json.dumps(index))
    _fails(tmp_path, "holds model.norm.weight, but it does not")
    (tmp_path / files[1]).unlink()
    _fails(tmp_path, f"names files .*{files[1]}")
    path.write_text("{}")
    _fails(tmp_path, "no weight_map")


def test_missing_tensors(directory) -> None:
    _rewrite(directory, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.bias"))
    _fails(directory, "lacks tensors: model.layers.1.mlp.up_proj.bias")


def test_unexpected_tensors(directory) -> None:
    extra = {f"extra.{i}": torch.zeros(2) for i in range(7)}
    _rewrite(directory, lambda tensors: tensors.update(extra))
    _fails(directory, "no use for: extra.0, extra.1, extra.2, extra.3, extra.4 and 2 more")


def test_shape_disagrees(directory) -> None:
    _rewrite(directory, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(65)}))
    _fails(directory, r"model.norm.weight .* has shape \[65\], but config.json makes it \[64\]")


def test_quantized_type(directory) -> None:
    quantized = torch.zeros(64, dtype=torch.int8)
    _rewrite(directory, lambda tensors: tensors.update({"model.norm.weight": quantized}))
    _fails(directory, "model.norm.weight .* stored as I8; accepted: BF16, F16, F32")


def test_unknown_family(directory) -> None:
    hf = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**hf, "model_type": "mamba"}))
    _fails(directory, "'mamba'; supported: deepseek_v2, .*gemma3", UnsupportedModelError)


_MEASURE = """
import re, sys, torch
from pathlib import Path
from draftgraph.model_zoo import load_model

def memory(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

dtype = getattr(torch, sys.argv[3])
load_model(sys.argv[1], dtype=dtype)  # what imports and oneDNN take once
before = memory("VmRSS")
model = load_model(sys.argv[2], dtype=dtype)
print(before, memory("VmHWM"))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize(("stored", "dtype"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_peak_memory(tmp_path, stored, dtype) -> None:
    sizes = {
        "vocab_size": 8192,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    model = tiny_model("llama", **sizes, tie_word_embeddings=False).to(getattr(torch, stored))
    model.save_pretrained(tmp_path / "model", max_shard_size="40MB")
    tiny_model("llama").save_pretrained(tmp_path / "tiny")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    shard = max(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors"))
    command = [sys.executable, "-c", _MEASURE, str(tmp_path / "tiny"), str(tmp_path / "model"), dtype]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    before, peak = map(int, output.split())
    weights = parameters * getattr(torch, dtype).itemsize
    print((peak - before) / weights, shard / weights)
    assert peak - before < 1.3 * weights + shard, ((peak - before) / weights, shard / weights)
