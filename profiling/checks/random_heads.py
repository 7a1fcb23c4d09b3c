"""Draft heads with random weights for a random target: what they draft is mostly wrong, and must change no token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ...graphs import eager_region
from ...model_zoo.config import DecoderConfig
from ...model_zoo.decoder import CompileRegion, DecoderModel
from ...model_zoo.draft_checkpoint import HEAD_FAMILIES
from ...model_zoo.draft_files import DraftTensors
from ...model_zoo.draft_weights import HeadBuilder
from ...model_zoo.safetensors_files import StoredTensor
from ...runtime.head_loading import LoadedHead

_Shapes = dict[str, tuple[int, ...]]


def _layer_like(target: DecoderConfig) -> dict[str, Any]:
    """The config.json of a Llama-like layer of the target's sizes."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": target.norm_eps,
        "rope_theta": 10_000.0,
        "max_position_embeddings": target.max_position_embeddings,
    }


def _eagle(target: DecoderConfig) -> tuple[dict[str, Any], _Shapes]:
    return _layer_like(target), {"fc.weight": (target.hidden_size, 2 * target.hidden_size)}


def _eagle3(target: DecoderConfig) -> tuple[dict[str, Any], _Shapes]:
    states = [0, target.num_layers - 1]
    config = {**_layer_like(target), "eagle_aux_hidden_state_layer_ids": states}
    return config, {
        "fc.weight": (target.hidden_size, len(states) * target.hidden_size),
        "lm_head.weight": (target.vocab_size, target.hidden_size),
    }


def _medusa(target: DecoderConfig) -> tuple[dict[str, Any], _Shapes]:
    head, block = (target.vocab_size, target.hidden_size), (target.hidden_size, target.hidden_size)
    shapes: _Shapes = {}
    for number in range(MOST_DRAFTS):
        shapes |= {f"lm_heads.{number}.weight": head, f"blocks.{number}.layers.0.weight": block}
    return {"model_type": "medusa", "vocab_size": target.vocab_size}, shapes


def _mtp(target: DecoderConfig) -> tuple[dict[str, Any], _Shapes]:
    prefix, hidden = "model.layers.{}.", target.hidden_size
    shapes: _Shapes = {}
    for number in range(1, 1 + MODULES):
        shapes |= {
            prefix.format(number) + "enorm.weight": (hidden,),
            prefix.format(number) + "hnorm.weight": (hidden,),
            prefix.format(number) + "eh_proj.weight": (hidden, 2 * hidden),
            prefix.format(number) + "shared_head.norm.weight": (hidden,),
        }
    return {**_layer_like(target), "num_nextn_predict_layers": MODULES}, shapes


def _dflash(target: DecoderConfig) -> tuple[dict[str, Any], _Shapes]:
    part = {"target_layer_ids": [-1, target.num_layers - 2], "mask_token_id": 1}
    shape = (target.hidden_size, 2 * target.hidden_size)
    return {**_layer_like(target), "block_size": MOST_DRAFTS + 1, "dflash_config": part}, {"fc.weight": shape}


def _dspark(target: DecoderConfig) -> tuple[dict[str, Any], _Shapes]:
    config, shapes = _dflash(target)
    rank, shape = 16, (target.vocab_size, target.hidden_size)
    config |= {"block_size": MOST_DRAFTS, "markov_rank": rank, "markov_head_type": "rnn"}
    confidence = {"confidence_head.proj.weight": (1, target.hidden_size + rank)}
    return config, {**shapes, **confidence, "lm_head.weight": shape}


MOST_DRAFTS = 5
"""Drafts per round that every one of these heads can make."""
MODULES = 5
"""Prediction modules of the `mtp` head."""

HEADS: Mapping[str, Callable[[DecoderConfig], tuple[dict[str, Any], _Shapes]]] = {
    "eagle": _eagle,
    "eagle3": _eagle3,
    "mtp": _mtp,
    "medusa": _medusa,
    "dflash": _dflash,
    "dspark": _dspark,
}
"""By method: the config.json of a head for a target, and the tensors from whose shapes the rest of it follows."""


def random_head(
    method: str,
    target: DecoderModel,
    *,
    max_positions: int,
    compile_region: CompileRegion = eager_region,
    seed: int = 2,
) -> LoadedHead:
    """A head whose weights are drawn from a seed, on the CPU, so that every device gets the same.

    Args:
        method: of `HEADS`.
        target: that it drafts for.
        max_positions: the longest context that will be used.
        compile_region: see `DecoderModel`.
        seed: of the weights.
    """
    hf, shapes = HEADS[method](target.config)
    family = HEAD_FAMILIES[method]
    known = {name: StoredTensor(Path("random"), "F32", shape) for name, shape in shapes.items()}
    config = family.read_config(hf, known, None)
    placements = family.placements(config)
    layers = getattr(config, "layers", target.config)
    builder = HeadBuilder(layers, placements, dtype=target.dtype, device=str(target.device))
    generator, again = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for name, placement in placements.items():
        if len(placement.shape) == 1:
            value = torch.ones(placement.shape)
        else:
            value = torch.randn(placement.shape, generator=generator) / placement.shape[-1] ** 0.5
        builder.add(name, value.to(target.dtype))
        if ".k_proj." in name or ".v_proj." in name:
            again[name] = value  # drafters of blocks have them a second time, stacked
    options: dict[str, Any] = {"max_positions": max_positions, "compile_region": compile_region}
    names = {name: name for name in again}
    model = family.build(config, builder, DraftTensors({}, again), names, target, **options)
    return LoadedHead(model, config.states_of(target.config))
