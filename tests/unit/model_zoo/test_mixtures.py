"""Mixtures of experts and latent attention: routing, checkpoint formats, what is refused."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import MODELS, SLOTS, pack, random_tokens, tiny_model

from draftgraph.model_zoo import CheckpointError, UnsupportedModelError, load_model
from draftgraph.model_zoo.config import MlaConfig, MoeConfig
from draftgraph.model_zoo.feedforward import route
from draftgraph.model_zoo.registry import family_of
from draftgraph.model_zoo.weights import RouterConstants

SOFTMAX = RouterConstants(
    experts_per_token=2,
    scoring="softmax",
    num_groups=1,
    groups_per_token=1,
    group_members=1,
    normalize=False,
    normalize_min=0.0,
    scale=1.0,
)


def _logits(model):
    with torch.inference_mode():
        return model.logits(model.forward(pack([(random_tokens(20, 0), 0, 1)]), model.allocate_cache(SLOTS, 64)))


def _rewrite(directory, change) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")


def test_weights_are_shares_of_all_or_of_the_chosen() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    shares = torch.softmax(logits, 1)[0]
    experts, weights = route(logits, None, SOFTMAX)
    assert experts.tolist() == [[1, 2]]
    assert torch.allclose(weights[0], shares[[1, 2]])
    _, weights = route(logits, None, SOFTMAX._replace(normalize=True, scale=3.0))
    assert torch.allclose(weights[0], 3.0 * shares[[1, 2]] / shares[[1, 2]].sum())


def test_a_bias_counts_in_the_choice_alone() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    constants = SOFTMAX._replace(scoring="sigmoid")
    experts, weights = route(logits, torch.tensor([0.0, 0.0, 0.0, 1.0]), constants)
    assert experts.tolist() == [[3, 1]]
    assert torch.allclose(weights[0], torch.sigmoid(torch.tensor([-1.0, 2.0])))


@pytest.mark.parametrize(("members", "expected"), [(1, {0, 1}), (2, {2, 3})])
def test_experts_come_from_the_best_groups(members, expected) -> None:
    # The first group has the best expert, the second the best two.
    logits = torch.tensor([[3.0, -5.0, 2.0, 1.9, 0.0, 0.0]])
    constants = SOFTMAX._replace(scoring="sigmoid", num_groups=3, groups_per_token=1, group_members=members)
    assert set(route(logits, None, constants)[0][0].tolist()) == expected


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_fused_experts_equal_single_ones(name, tmp_path) -> None:
    reference = tiny_model(name)
    reference.save_pretrained(tmp_path)
    expected = _logits(load_model(tmp_path, dtype=torch.float32))
    layers = [layer for layer, block in enumerate(reference.model.layers) if hasattr(block.mlp, "experts")]
    assert 0 < len(layers) < 3

    def change(tensors) -> None:
        for single in [key for key in tensors if ".mlp.experts." in key]:
            del tensors[single]
        for layer in layers:
            experts, prefix = reference.model.layers[layer].mlp.experts, f"model.layers.{layer}.mlp.experts."
            tensors[f"{prefix}gate_up_proj"] = experts.gate_up_proj.detach()
            tensors[f"{prefix}down_proj"] = experts.down_proj.detach()

    _rewrite(tmp_path, change)
    assert torch.equal(_logits(load_model(tmp_path, dtype=torch.float32)), expected)


def test_a_missing_expert_is_named(tmp_path) -> None:
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    _rewrite(tmp_path, lambda tensors: tensors.pop("model.layers.2.mlp.experts.4.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"lacks tensors: model.layers.2.mlp.experts.4.up_proj.weight"):
        load_model(tmp_path, dtype=torch.float32)


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("glm4_moe", "model.layers.3."),
        ("deepseek_v3", "model.layers.3."),
        ("ernie4_5_moe", "model.mtp_block.0."),
        ("mimo", "model.mtp_layers.0."),
    ],
)
def test_layers_for_multi_token_prediction_are_left_to_the_drafter(name, prefix, tmp_path) -> None:
    tiny_model("qwen2" if name == "mimo" else name).save_pretrained(tmp_path)
    if name == "mimo":
        _retype(tmp_path, "mimo")
    expected = _logits(load_model(tmp_path, dtype=torch.float32))
    _rewrite(tmp_path, lambda tensors: tensors.update({f"{prefix}input_layernorm.weight": torch.ones(64)}))
    assert torch.equal(_logits(load_model(tmp_path, dtype=torch.float32)), expected)


def _retype(directory, model_type) -> None:
    hf = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**hf, "model_type": model_type}))


def test_mimo_is_qwen2(tmp_path) -> None:
    reference = tiny_model("qwen2")
    reference.save_pretrained(tmp_path)
    _retype(tmp_path, "mimo")
    tokens = random_tokens(20, 0)
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    assert torch.allclose(_logits(load_model(tmp_path, dtype=torch.float32)), expected, atol=1e-4)


def test_a_router_stays_in_float32(tmp_path) -> None:
    tiny_model("deepseek_v3").save_pretrained(tmp_path)
    mixture = load_model(tmp_path, dtype=torch.bfloat16).weights.layers[1].mixture
    assert mixture.router.dtype == mixture.choice_bias.dtype == torch.float32
    assert mixture.gate_up.dtype == torch.bfloat16


def test_latents_are_cached_once(tmp_path) -> None:
    tiny_model("deepseek_v3").save_pretrained(tmp_path)
    cache = load_model(tmp_path, dtype=torch.float32).allocate_cache(SLOTS, 64)
    assert cache.key.shape == (3, SLOTS, 1, 128, 16 + 48)
    assert cache.value.numel() == 0


def _hf(name, **changes):
    return {**json.loads(tiny_model(name).config.to_json_string()), **changes}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax'; supported: sigmoid"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method 'greedy'; supported: noaux_tc"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "quant_method 'fp8'"),
        ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True}, "attention_bias True without q_lora_rank"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq 2; supported: 1"),
        (
            "qwen3_next",
            {"layer_types": None},
            r"layer types \['linear_attention'\] of 'qwen3_next'; supported: full_att",
        ),
        ("qwen3_next", {"attention_bias": True}, "attention_bias True of 'qwen3_next'; supported: False"),
        ("glm4_moe", {"scoring_func": "tanh"}, "scoring_func 'tanh'; supported: sigmoid"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'; supported: greedy"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob True"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias True"),
        ("ernie4_5_moe", {"moe_num_experts": [64, 64]}, r"moe_num_experts \[64, 64\]"),
        ("qwen3_moe", {"hidden_act": "relu"}, "'relu'; supported: silu"),
    ],
)
def test_what_is_not_implemented_is_refused(name, changes, message) -> None:
    hf = _hf(name, **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        family_of(hf).read_config(hf)


def test_published_keys_of_qwen3_moe() -> None:
    """The hub's files say `num_experts`, those of transformers 5 `num_local_experts`."""
    hf = _hf("qwen3_moe")
    new = family_of(hf).read_config(hf)
    hf["num_experts"] = hf.pop("num_local_experts")
    assert family_of(hf).read_config(hf) == new
    assert new.moe is not None
    assert (new.moe.num_experts, new.moe.layers) == (6, (0, 2))


MOE = MoeConfig(layers=(1,), num_experts=8, experts_per_token=2, intermediate_size=4)
MLA = MlaConfig(query_rank=0, kv_rank=8, nope_dim=4, rope_dim=4, value_dim=4)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (MOE, {"num_experts": 0}, "num_experts of the mixture must be a positive integer, got 0"),
        (MOE, {"num_groups": 3}, "8 experts do not form 3 groups"),
        (MOE, {"groups_per_token": 2}, r"groups_per_token \(2\) exceeds num_groups \(1\)"),
        (MOE, {"num_groups": 8}, r"experts_per_token \(2\) exceeds the 1 experts"),
        (MOE, {"group_members": 9}, "group_members must be 1 to 8"),
        (MOE, {"shared_size": -1}, "shared_size must not be negative"),
        (MOE, {"scoring": "tanh"}, "router scoring 'tanh'; supported: softmax, sigmoid"),
        (MLA, {"rope_dim": 0}, "rope_dim of latent attention must be a positive integer, got 0"),
        (MLA, {"query_rank": -1}, "query_rank of latent attention must be an integer from 0 on, got -1"),
    ],
)
def test_validation(config, changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, **changes)


def test_every_family_of_mixtures_is_compared_with_transformers() -> None:
    assert {"qwen3_moe", "glm4_moe", "deepseek_v3", "deepseek_v2", "ernie4_5_moe"} <= set(MODELS)
