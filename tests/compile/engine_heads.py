"""Draft heads without data, at the sizes of a target: for the sweep of what an engine launches."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import torch

from draftgraph.model_zoo.config import DecoderConfig
from draftgraph.model_zoo.decoder import DecoderModel, identity
from draftgraph.model_zoo.dflash.config import DFlashConfig
from draftgraph.model_zoo.draft_checkpoint import HEAD_FAMILIES
from draftgraph.model_zoo.draft_config import AuxLayers, HeadConfig
from draftgraph.model_zoo.draft_files import DraftTensors
from draftgraph.model_zoo.draft_weights import HeadBuilder
from draftgraph.model_zoo.dspark.config import DSparkConfig
from draftgraph.model_zoo.eagle.config import EagleConfig
from draftgraph.model_zoo.eagle3.config import Eagle3Config
from draftgraph.model_zoo.gemma4_assistant.config import Gemma4AssistantConfig
from draftgraph.model_zoo.medusa.config import MedusaConfig
from draftgraph.model_zoo.mtp import checkpoint as mtp_checkpoint
from draftgraph.model_zoo.mtp.config import MtpConfig
from draftgraph.model_zoo.mtp.model import MtpModel

FAMILIES = {
    "eagle": "eagle",
    "eagle3": "eagle3",
    "p-eagle": "eagle3",
    "medusa": "medusa",
    "assistant": "gemma4_assistant",
    "dflash": "dflash",
    "dspark": "dspark",
}
"""The families of the kinds of heads."""
METHODS = {kind: HEAD_FAMILIES[family].method or family for kind, family in FAMILIES.items()}
_REDUCED = 32_000


def _config(kind: str, target: DecoderConfig) -> HeadConfig:
    vocab, hidden = target.vocab_size, target.hidden_size
    common: dict[str, Any] = {"format": "", "depth": None, "vocab_size": vocab, "target_hidden_size": hidden}
    if kind == "medusa":
        return MedusaConfig(**common, draft_vocab_size=vocab, num_heads=5, num_layers=1, bias=True, mapped=False)
    if kind == "assistant":
        # A layer for each of the target's, with queries alone.
        layers = dataclasses.replace(
            target, hidden_size=256, num_shared_layers=target.num_layers, moe=None, intermediate_size=2048
        )
        return Gemma4AssistantConfig(
            **common, draft_vocab_size=vocab, layers=layers, own_head=False, centroids=0, chosen_centroids=0
        )
    if kind in ("dflash", "dspark"):
        return _block_config(kind, target, common)
    layers = dataclasses.replace(target, num_layers=1, layer_types=("full_attention",))
    if kind == "eagle":
        own = {"fc_bias": False, "own_embedding": False, "own_head": False}
        return EagleConfig(**common, draft_vocab_size=vocab, layers=layers, **own)
    return Eagle3Config(
        **common,
        draft_vocab_size=min(_REDUCED, vocab),
        layers=layers,
        aux=AuxLayers(stored=(0,) * 3, numbering="hidden_states", source="", count=3),
        has_fc=True,
        fc_bias=False,
        input_norm=False,
        fc_norm=False,
        norm_before_residual=False,
        norm_output=False,
        own_embedding=False,
        own_head=True,
        mask_token=None,
    )


def _block_config(kind: str, target: DecoderConfig, common: dict[str, Any]) -> HeadConfig:
    """A drafter of blocks of two layers like the target's, of which the second slides and is causal."""
    rope, kinds = target.rope[0][1], ("full_attention", "sliding_attention")
    layers = dataclasses.replace(
        target, num_layers=2, layer_types=kinds, rope=tuple((name, rope) for name in kinds), sliding_window=512
    )
    block: dict[str, Any] = {
        **common,
        "draft_vocab_size": min(_REDUCED, target.vocab_size),
        "layers": layers,
        "aux": AuxLayers(stored=(0,) * 5, numbering="hidden_states", source="", count=5),
        "block_size": 32,
        "from_anchor": kind == "dspark",
        "causal": (False, True),
        "mask_token": 3,
        "num_target_layers": None,
        "fc_bias": False,
        "own_mask": False,
        "own_embedding": False,
        "own_head": True,
    }
    if kind == "dflash":
        return DFlashConfig(**block)
    heads = {"markov_head": "vanilla", "markov_rank": 256, "markov_bias": False, "confidence_bias": True}
    return DSparkConfig(**block, **heads, has_confidence=True, confidence_with_markov=True)


def fake_head(kind: str, target: DecoderModel, context: int) -> tuple[Any, tuple[int, ...]]:
    """A head of one of the `FAMILIES` for a target, and which of its hidden states it reads."""
    family, config = HEAD_FAMILIES[FAMILIES[kind]], _config(kind, target.config)
    placements, device = family.placements(config), target.device
    layers = getattr(config, "layers", target.config)
    builder = HeadBuilder(layers, placements, dtype=target.dtype, device=str(device))
    tensors = {
        name: torch.empty(placement.shape, dtype=target.dtype, device=device) for name, placement in placements.items()
    }
    for name, tensor in tensors.items():
        builder.add(name, tensor)
    options = {"max_positions": context, "compile_region": identity}
    head = family.build(config, builder, DraftTensors({}, tensors), {name: name for name in tensors}, target, **options)
    if config.draft_vocab_size < config.vocab_size:
        head.target_ids = torch.empty(config.draft_vocab_size, dtype=torch.int32, device=device)
    if kind == "p-eagle":
        head.mask_state = torch.empty(head.state_size, dtype=target.dtype, device=device)
    return head, config.states_of(target.config)


def fake_modules(target: DecoderModel, count: int, context: int) -> MtpModel:
    """Prediction modules without data, with layers like the target's last."""
    config = target.config
    moe = config.moe and replace(config.moe, layers=tuple(range(count)))
    layers = replace(config, num_layers=count, layer_types=config.layer_types[-1:] * count, moe=moe)
    modules = MtpConfig(
        format="",
        depth=count,
        vocab_size=config.vocab_size,
        draft_vocab_size=config.vocab_size,
        target_hidden_size=config.hidden_size,
        layers=layers,
        layout="deepseek",
        numbers=tuple(range(count)),
        final_norm=True,
        own_embeddings=(False,) * count,
        own_heads=(False,) * count,
    )
    placements = mtp_checkpoint.placements(modules)
    builder = HeadBuilder(layers, placements, dtype=target.dtype, device=str(target.device))
    for name, placement in placements.items():
        builder.add(name, torch.empty(placement.shape, dtype=target.dtype, device=target.device))
    return mtp_checkpoint.build(
        modules, builder, DraftTensors({}), {}, target, max_positions=context, compile_region=identity
    )
