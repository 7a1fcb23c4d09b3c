"""Gemma 4: its config.json in the hub's words and in transformers', multimodal checkpoints, shared caches."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import SLOTS, pack, random_tokens, tiny_model

from draftgraph.model_zoo import UnsupportedModelError, load_model
from draftgraph.model_zoo.config import HeadsConfig
from draftgraph.model_zoo.registry import family_of
from draftgraph.model_zoo.rope import RopeConfig, inverse_frequencies


def _hf(name, **changes):
    return {**json.loads(tiny_model(name).config.to_json_string()), **changes}


def _logits(directory):
    model = load_model(directory, dtype=torch.float32)
    with torch.inference_mode():
        return model.logits(model.forward(pack([(random_tokens(20, 0), 0, 1)]), model.allocate_cache(SLOTS, 64)))


def test_the_hubs_words_and_transformers_mean_the_same() -> None:
    hf = _hf("gemma4-large")
    new = family_of(hf).read_config(hf)
    del hf["per_layer_config"]
    old = {**hf, "global_head_dim": 32, "num_global_key_value_heads": 1}
    assert family_of(old).read_config(old) == new
    assert new.full_heads == HeadsConfig(num_kv_heads=1, head_dim=32, keys_are_values=True)


def test_only_layers_with_caches_of_their_own_have_one(tmp_path) -> None:
    tiny_model("gemma4-small").save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=torch.float32)
    assert [model.config.cached_layer(layer) for layer in range(5)] == [0, 1, 2, 1, 1]
    cache = model.allocate_cache(SLOTS, 64)
    assert cache.key.shape == cache.value.shape == (3, SLOTS, 2, 128, 32)
    assert [model.layer_cache(cache, layer)[0].shape[3] for layer in range(5)] == [16, 32, 16, 32, 32]


def test_a_multimodal_checkpoint_with_unused_projections(tmp_path) -> None:
    tiny_model("gemma4-small").save_pretrained(tmp_path)
    expected = _logits(tmp_path)
    hf = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma4", "text_config": hf}))
    stored = load_file(tmp_path / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in stored.items()}
    tensors["model.vision_tower.patch.weight"] = torch.zeros(3, 3)
    tensors["model.embed_audio.weight"] = torch.zeros(3, 3)
    tensors["model.language_model.layers.4.self_attn.k_proj.weight"] = torch.zeros(64, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(_logits(tmp_path), expected)


def test_proportional_rotation_turns_the_first_pairs() -> None:
    rope = RopeConfig.from_parameters(
        {"rope_type": "proportional", "partial_rotary_factor": 0.25},
        head_dim=32,
        theta=100.0,
        max_position_embeddings=64,
    )
    turned = 100.0 ** (-torch.arange(4) / 16)
    assert torch.allclose(inverse_frequencies(rope), torch.cat((turned, torch.zeros(12))))
    with pytest.raises(ValueError, match="proportional turns an even number of its 32 dimensions, got 0"):
        RopeConfig(dim=32, theta=1e4, rope_type="proportional")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"use_bidirectional_attention": "all"}, UnsupportedModelError, "use_bidirectional_attention 'all'"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, UnsupportedModelError, "the same for all full_attention layers"),
        ({"per_layer_config": {"1": {"mlp": 8}, "2": {"mlp": 8}}}, UnsupportedModelError, "supported: head_dim"),
        ({"num_kv_shared_layers": 3}, ValueError, "num_kv_shared_layers must be 0 to 2, got 3"),
        ({"num_kv_shared_layers": 2}, ValueError, r"the last ones of type \['full_attention'\] read"),
        ({"num_global_key_value_heads": 3, "per_layer_config": None}, ValueError, "must be a multiple of 3"),
    ],
)
def test_what_cannot_be_read_is_refused(changes, error, message) -> None:
    hf = _hf("gemma4-large", **changes)
    with pytest.raises(error, match=message):
        family_of(hf).read_config(hf)
