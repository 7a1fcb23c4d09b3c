"""Where the tensors of prediction modules go."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from ...kernels.linear import pack_weight
from ..decoder import CompileRegion, DecoderModel
from ..draft_files import DraftTensors
from ..draft_weights import HeadBuilder, own_or_shared
from ..placement import Placement, decoder_placements
from ..registry import family_of
from .config import SHARED_EMBEDDING, SHARED_HEAD, TARGET_MARK, MtpConfig
from .layout import EMBEDDING, EMBEDDING_NORM, FINAL_NORM, HEAD, HIDDEN_NORM, LAYOUTS, PROJECTION, layout_of
from .model import MtpModel, MtpModule

_LAYER = "model.layers.0."


def recognises(hf: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Whether a checkpoint holds prediction modules."""
    return layout_of(set(names)) is not None


def names(hf: Mapping[str, Any], stored: Collection[str]) -> dict[str, str]:
    """The names of the modules' tensors in the files, by the names that `placements` uses.

    Those of a target, in whose checkpoint the modules lie, are left out. A checkpoint that holds modules alone is
    taken whole.
    """
    key = layout_of(stored)
    if key is None:
        return {}
    layout, rename, found = LAYOUTS[key], family_of(hf).rename, {}
    numbers, alone = layout.numbers(stored), TARGET_MARK not in stored
    for name in stored:
        place = layout.place(name, numbers)
        if place is None:
            if alone:
                found[name] = name
            continue
        known, rest = place
        if rest is not None:
            renamed = rename(_LAYER + rest)
            if renamed is None:
                continue
            known += renamed.removeprefix(_LAYER)
        found[known] = name
    return found


def placements(config: MtpConfig) -> dict[str, Placement]:
    """Every tensor by name."""
    layout, hidden = config.style, config.target_hidden_size
    family = family_of({"model_type": config.layers.model_type})
    found: dict[str, Placement] = {}
    for name, placement in decoder_placements(
        config.layers, family.layer_norms, fused_experts=config.fused_experts
    ).items():
        if placement.layer is not None:
            prefix = layout.layer.format(config.numbers[placement.layer])
            found[prefix + name.removeprefix(f"model.layers.{placement.layer}.")] = placement
    shapes = {
        EMBEDDING_NORM: (hidden,),
        HIDDEN_NORM: (hidden,),
        PROJECTION: (hidden, 2 * hidden),
        FINAL_NORM: (hidden,),
        EMBEDDING: (config.vocab_size, hidden),
        HEAD: (config.vocab_size, hidden),
    }
    for index, number in enumerate(config.numbers):
        absent = {EMBEDDING: not config.own_embeddings[index], HEAD: not config.own_heads[index]}
        for part, name in layout.parts.items():
            if not absent.get(part, False):
                # A part that the modules share has no number: the last one's entry stands for all.
                found[name.format(number)] = Placement(_field(part, name, index), None, 0, shapes[part])
    if config.shared_embedding:
        found[SHARED_EMBEDDING] = Placement(EMBEDDING, None, 0, shapes[EMBEDDING])
    if config.shared_head:
        found[SHARED_HEAD] = Placement(f"shared {HEAD}", None, 0, shapes[HEAD])
    return found


def _field(part: str, name: str, index: int) -> str:
    return f"{part} {index}" if "{}" in name else part


def extras(config: MtpConfig) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Tensors that are no weights: none."""
    return {}


def build(
    config: MtpConfig,
    builder: HeadBuilder,
    tensors: DraftTensors,
    names: Mapping[str, str],
    target: DecoderModel,
    *,
    max_positions: int,
    compile_region: CompileRegion,
) -> MtpModel:
    """The modules, their weights read, beside their target."""
    layout = config.style

    def part(kind: str, index: int) -> torch.Tensor | None:
        name = layout.parts.get(kind)
        return None if name is None else builder.weight(_field(kind, name, index))

    embedding = own_or_shared(builder.weight(EMBEDDING), target)
    head = _own_head(builder.weight(f"shared {HEAD}"), target)
    sides = (HIDDEN_NORM, EMBEDDING_NORM) if layout.hidden_first else (EMBEDDING_NORM, HIDDEN_NORM)
    modules = []
    for index in range(config.num_modules):
        norms, projection = [part(side, index) for side in sides], part(PROJECTION, index)
        assert norms[0] is not None
        assert norms[1] is not None
        assert projection is not None
        own_table, own_head = part(EMBEDDING, index), part(HEAD, index)
        modules.append(
            MtpModule(
                embedding=embedding if own_table is None else own_or_shared(own_table, target),
                pair_norms=torch.stack((norms[0], norms[1])),
                projection=pack_weight(projection),
                final_norm=part(FINAL_NORM, index),
                head=head if own_head is None else _own_head(own_head, target),
            )
        )
    return MtpModel(
        config,
        target,
        modules=tuple(modules),
        layers=builder.layers(),
        max_positions=max_positions,
        compile_region=compile_region,
    )


def _own_head(own: torch.Tensor | None, target: DecoderModel) -> torch.Tensor | None:
    """A head of the modules', packed; None where they have none or one that equals the target's."""
    if own is None:
        return None
    shared = target.weights.head
    plain = shared.to_dense() if shared.is_mkldnn else shared
    return None if own.shape == plain.shape and torch.equal(own, plain) else pack_weight(own)
