"""Where the tensors of an EAGLE-1 or -2 head go."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..decoder import CompileRegion, DecoderModel
from ..draft_files import DraftTensors
from ..draft_weights import HeadBuilder, layer_placements, own_or_shared, own_or_shared_head
from ..llama.checkpoint import LAYER_NORMS
from ..placement import Placement
from .config import EagleConfig
from .model import EagleModel

_INNER = re.compile(r"(?:model\.)?(layers\.\d+\.|embed_tokens\.)")


def recognises(hf: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Whether a checkpoint is one."""
    found = set(names)
    return "fc.weight" in found and "model.layers.0.self_attn.q_proj.weight" in found


def rename(name: str) -> str | None:
    """The name that the shared loader knows a tensor by; None for one that is not needed."""
    if name.endswith("rotary_emb.inv_freq"):
        return None
    name = re.sub(r"^model\.fc\.", "fc.", name)
    return _INNER.sub(r"model.\1", name, count=1)


def placements(config: EagleConfig) -> dict[str, Placement]:
    """Every tensor by name."""
    hidden = config.layers.hidden_size
    found = layer_placements(config.layers, LAYER_NORMS)
    del found["model.layers.0.input_layernorm.weight"]
    found["fc.weight"] = Placement("fc", None, 0, (hidden, 2 * hidden))
    if config.fc_bias:
        found["fc.bias"] = Placement("fc_bias", None, 0, (hidden,))
    if config.own_embedding:
        found["model.embed_tokens.weight"] = Placement("embedding", None, 0, (config.vocab_size, hidden))
    if config.own_head:
        found["lm_head.weight"] = Placement("head", None, 0, (config.vocab_size, hidden))
    return found


def extras(config: EagleConfig) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Tensors that are no weights: none."""
    return {}


def build(
    config: EagleConfig,
    builder: HeadBuilder,
    tensors: DraftTensors,
    names: Mapping[str, str],
    target: DecoderModel,
    *,
    max_positions: int,
    compile_region: CompileRegion,
) -> EagleModel:
    """The head, its weights read, beside its target."""
    fc = builder.matrix("fc")
    assert fc is not None
    return EagleModel(
        config,
        target,
        embedding=own_or_shared(builder.weight("embedding"), target),
        fc=fc,
        fc_bias=builder.weight("fc_bias"),
        layers=builder.layers(),
        head=own_or_shared_head(builder.weight("head"), target),
        max_positions=max_positions,
        compile_region=compile_region,
    )
