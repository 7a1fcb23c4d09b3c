"""Where the tensors of Medusa heads go."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ...kernels.linear import pack_weight
from ..decoder import CompileRegion, DecoderModel
from ..draft_files import DraftTensors
from ..draft_weights import HeadBuilder
from ..errors import CheckpointError
from ..placement import Placement
from .config import HEAD, MedusaConfig
from .model import MedusaHead, MedusaModel

_NUMBERED_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_NUMBERED_HEAD = re.compile(r"(\d+)\.\d+\.weight")


def recognises(hf: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Whether a checkpoint is one."""
    return hf.get("model_type") == "medusa" or any(HEAD.fullmatch(name) for name in names)


def rename(name: str) -> str | None:
    """The name that the shared loader knows a tensor by, those of the layout that has names; None for one that is not
    needed: models merged with their heads have the base model's too.
    """
    if name.startswith(("model.", "lm_head.")):
        return None
    name = name.removeprefix("medusa_heads.").removeprefix("medusa_head.")
    if match := _NUMBERED_BLOCK.fullmatch(name):
        return f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"
    if match := _NUMBERED_HEAD.fullmatch(name):
        return f"lm_heads.{match[1]}.weight"
    return name


def placements(config: MedusaConfig) -> dict[str, Placement]:
    """Every tensor by name."""
    hidden, found = config.target_hidden_size, {}
    for head in range(config.num_heads):
        for layer in range(config.num_layers):
            name = f"blocks.{head}.layers.{layer}"
            found[f"{name}.weight"] = Placement(name, None, 0, (hidden, hidden))
            if config.bias:
                found[f"{name}.bias"] = Placement(f"{name}.bias", None, 0, (hidden,))
        name = f"lm_heads.{head}"
        found[f"{name}.weight"] = Placement(name, None, 0, (config.draft_vocab_size, hidden))
    return found


def extras(config: MedusaConfig) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Tensors that are no weights, by name: their shapes and the types that are accepted."""
    return {"token_map": ((config.draft_vocab_size,), ("I64", "I32"))} if config.mapped else {}


def build(
    config: MedusaConfig,
    builder: HeadBuilder,
    tensors: DraftTensors,
    names: Mapping[str, str],
    target: DecoderModel,
    *,
    max_positions: int,
    compile_region: CompileRegion,
) -> MedusaModel:
    """The heads, their weights read.

    Raises:
        CheckpointError: token_map points outside of the vocabulary.
    """

    def packed(field: str) -> torch.Tensor:
        weight = builder.weight(field)
        assert weight is not None
        return pack_weight(weight)

    heads = []
    for head in range(config.num_heads):
        blocks = [f"blocks.{head}.layers.{layer}" for layer in range(config.num_layers)]
        heads.append(
            MedusaHead(
                blocks=tuple(packed(name) for name in blocks),
                biases=tuple(builder.weight(f"{name}.bias") for name in blocks),
                head=packed(f"lm_heads.{head}"),
            )
        )
    ids = None
    if config.mapped:
        ids = tensors.get(names["token_map"])
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= config.vocab_size:
            raise CheckpointError(
                f"token_map holds ids from {low} to {high}, but the vocabulary has {config.vocab_size} tokens"
            )
        ids = ids.to(target.device, torch.int32)
    return MedusaModel(config, tuple(heads), target_ids=ids, compile_region=compile_region)
