"""Where the tensors of a DFlash drafter go."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ...kernels.linear import pack_weight
from ..decoder import CompileRegion, DecoderModel
from ..draft_files import MASK_EMBEDDING, DraftTensors
from ..draft_weights import HeadBuilder, layer_placements, own_or_shared
from ..eagle3.checkpoint import target_ids
from ..llama.checkpoint import LAYER_NORMS
from ..placement import Placement
from .config import DFlashConfig
from .model import ContextWeights, DFlashModel, DFlashWeights

_FLOATS = ("BF16", "F16", "F32")
_ARCHITECTURES = {"DFlashDraftModel", "DFlashSpeculator"}


def recognises(hf: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Whether a checkpoint is one."""
    found = set(names)
    if hf.get("speculators_model_type") is not None:
        return bool(hf["speculators_model_type"] == "dflash")
    named = bool(_ARCHITECTURES & set(hf.get("architectures") or ()))
    shaped = {"fc.weight", "hidden_norm.weight", "norm.weight"} <= found
    return (named or shaped) and not any(name.startswith("markov_head.") for name in found)


def rename(name: str) -> str | None:
    """The name that the shared loader knows a tensor by; None for one that is not needed."""
    if name.endswith("rotary_emb.inv_freq") or name.startswith("verifier_"):
        return None
    name = re.sub(r"^model\.", "", name)
    return f"model.{name}" if name.startswith(("layers.", "embed_tokens.")) else name


def placements(config: DFlashConfig) -> dict[str, Placement]:
    """Every tensor by name."""
    hidden = config.layers.hidden_size
    found = layer_placements(config.layers, LAYER_NORMS)
    found["fc.weight"] = Placement("fc", None, 0, (hidden, config.state_size))
    if config.fc_bias:
        found["fc.bias"] = Placement("fc_bias", None, 0, (hidden,))
    found["hidden_norm.weight"] = Placement("hidden_norm", None, 0, (hidden,))
    found["norm.weight"] = Placement("final_norm", None, 0, (hidden,))
    if config.own_embedding:
        found["model.embed_tokens.weight"] = Placement("embedding", None, 0, (config.vocab_size, hidden))
    if config.own_head:
        found["lm_head.weight"] = Placement("head", None, 0, (config.draft_vocab_size, hidden))
    return found


def extras(config: DFlashConfig) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Tensors that are no weights, by name: their shapes and the types that are accepted."""
    integers = ("I64", "I32")
    return {
        "d2t": ((config.draft_vocab_size,), integers),
        "t2d": ((config.vocab_size,), ("BOOL", "U8", *integers)),
        MASK_EMBEDDING: ((config.layers.hidden_size,), _FLOATS),
    }


def build(
    config: DFlashConfig,
    builder: HeadBuilder,
    tensors: DraftTensors,
    names: Mapping[str, str],
    target: DecoderModel,
    *,
    max_positions: int,
    compile_region: CompileRegion,
    attention_backend: str | None = None,
) -> DFlashModel:
    """The drafter, its weights read, beside its target.

    Raises:
        CheckpointError: d2t points outside of the vocabulary, or contradicts t2d.
    """
    return DFlashModel(
        config,
        target,
        block_weights(config, builder, tensors, names, target),
        target_ids=reduced_vocabulary(config, tensors, names, target),
        max_positions=max_positions,
        compile_region=compile_region,
        attention_backend=attention_backend,
    )


def block_weights(
    config: DFlashConfig, builder: HeadBuilder, tensors: DraftTensors, names: Mapping[str, str], target: DecoderModel
) -> DFlashWeights:
    """The weights of what drafts a block.

    The keys' and values' projections of all layers are stored twice: in the layers, for the queries, and on top of each
    other, for the context.
    """
    hidden_norm, final_norm, fc = builder.weight("hidden_norm"), builder.weight("final_norm"), builder.matrix("fc")
    assert hidden_norm is not None
    assert final_norm is not None
    assert fc is not None
    layers = builder.layers()

    def stacked(part: str) -> torch.Tensor:
        every = (f"model.layers.{i}.self_attn.{kind}_proj.{part}" for kind in "kv" for i in range(len(layers)))
        return torch.cat([tensors.get(names[name]).to(target.device, target.dtype) for name in every])

    norms = [layer.key_norm for layer in layers if layer.key_norm is not None]
    mask = tensors.get(names[MASK_EMBEDDING]).to(target.device, target.dtype) if config.own_mask else None
    return DFlashWeights(
        embedding=own_or_shared(builder.weight("embedding"), target),
        layers=layers,
        final_norm=final_norm,
        head=builder.weight("head"),
        context=ContextWeights(
            fc=fc,
            fc_bias=builder.weight("fc_bias"),
            norm=hidden_norm,
            key_value=pack_weight(stacked("weight")),
            key_value_bias=stacked("bias") if config.layers.qkv_bias else None,
            key_norms=torch.stack(norms)[:, None] if norms else None,
        ),
        mask_embedding=mask,
    )


def reduced_vocabulary(
    config: DFlashConfig, tensors: DraftTensors, names: Mapping[str, str], target: DecoderModel
) -> torch.Tensor | None:
    """int32 [Vd], the target's id of each token; None where it drafts all of the target's tokens."""
    if "d2t" not in names or config.draft_vocab_size == config.vocab_size:
        return None
    known = tensors.get(names["t2d"]) if "t2d" in names else None
    return target_ids(tensors.get(names["d2t"]), known, config.vocab_size).to(target.device)
