"""Reads what a config.json and the names of tensors say of prediction modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..config import DecoderConfig, LayerType
from ..draft_config import HeadConfig, positive
from ..errors import CheckpointError, UnsupportedModelError
from ..registry import family_of
from ..safetensors_files import StoredTensor
from .layout import EMBEDDING, FINAL_NORM, HEAD, LAYOUTS, Layout, layout_of

COUNT_KEYS = ("n_predict", "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Where config.json files give the number of modules, the first that is there."""
SHARED_EMBEDDING, SHARED_HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""A checkpoint that holds modules alone may have the target's embedding and head beside them."""
TARGET_MARK = "model.norm.weight"
"""A tensor that every target has and modules have not."""


@dataclass(frozen=True, kw_only=True)
class MtpConfig(HeadConfig):
    """One module, applied again and again, or several, each applied at its own step."""

    method: ClassVar[str] = "mtp"

    layers: DecoderConfig
    """The modules' decoder layers, as if they were those of one model."""
    layout: str
    """A key of `LAYOUTS`."""
    numbers: tuple[int, ...]
    """Of the modules, in the names of their tensors."""
    final_norm: bool
    """A norm follows the layer: its output goes to the head and to the next step."""
    own_embeddings: tuple[bool, ...]
    """Which modules have an embedding table of their own."""
    own_heads: tuple[bool, ...]
    """Which have a head of their own."""
    shared_embedding: bool = False
    """The checkpoint has an embedding table beside its modules."""
    shared_head: bool = False
    """The checkpoint has a head beside its modules."""
    fused_experts: bool = False
    """All experts of a mixture lie in two tensors."""

    @property
    def num_modules(self) -> int:
        """How many modules there are: `n_predict`."""
        return self.layers.num_layers

    @property
    def style(self) -> Layout:
        """How the modules are wired."""
        return LAYOUTS[self.layout]

    def matrix_elements(self, *, of_target: bool) -> int:
        """A module's projection."""
        return 2 * self.target_hidden_size**2


def read_config(hf: Mapping[str, Any], tensors: Mapping[str, StoredTensor], numbering: str | None) -> MtpConfig:
    """Makes the configuration.

    Args:
        hf: config.json, of the target or a copy of it.
        tensors: what the checkpoint has for its modules, by the names of `checkpoint.names`.
        numbering: must be None: modules read no layer but the last.

    Raises:
        CheckpointError: the two do not fit together.
        UnsupportedModelError: the layers are of a kind that is not implemented.
    """
    if numbering is not None:
        raise CheckpointError("aux_layer_numbering is for eagle3 heads; prediction modules read the last state only")
    key = layout_of(tensors)
    if key is None:
        raise CheckpointError("the checkpoint has no prediction modules")
    layout = LAYOUTS[key]
    found = layout.numbers(tensors)
    count = next((number for name in COUNT_KEYS if (number := positive(hf, name))), None) or max(len(found), 1)
    first = found[0] if found else 0
    numbers = tuple([*found, *range((found or [first - 1])[-1] + 1, first + count)][:count])
    layers = _layers(hf, layout, numbers, tensors)

    def has(part: str) -> tuple[bool, ...]:
        name = layout.parts.get(part)
        return tuple(name is not None and name.format(number) in tensors for number in numbers)

    modules = "1 module" if count == 1 else f"{count} modules"
    return MtpConfig(
        format=f"MTP, {layout.title}, {modules}",
        depth=count,
        vocab_size=layers.vocab_size,
        draft_vocab_size=layers.vocab_size,
        target_hidden_size=layers.hidden_size,
        layers=layers,
        layout=key,
        numbers=numbers,
        final_norm=FINAL_NORM in layout.parts,
        own_embeddings=has(EMBEDDING),
        own_heads=has(HEAD),
        shared_embedding=SHARED_EMBEDDING in tensors,
        shared_head=SHARED_HEAD in tensors,
        fused_experts=any(name.endswith(".experts.gate_up_proj") for name in tensors),
    )


def _layers(
    hf: Mapping[str, Any], layout: Layout, numbers: tuple[int, ...], names: Mapping[str, StoredTensor]
) -> DecoderConfig:
    """The modules' layers: like the target's, dense or mixtures as the tensors tell."""
    prefixes = [layout.layer.format(number) for number in numbers]
    count = len(prefixes)
    if layout.full_attention:
        hf = {**hf, "layer_types": ["full_attention"] * (positive(hf, "num_hidden_layers") or 1)}
    try:
        config = family_of(hf).read_config(hf)
        if config.per_layer_input is not None or config.full_heads is not None or config.num_shared_layers:
            raise UnsupportedModelError(
                f"prediction modules with layers of {config.model_type!r}; supported: layers that are all alike"
            )
        kind: LayerType = "full_attention"
        if kind not in config.rope_by_type:
            kind = config.layer_types[-1]
        mixed = tuple(i for i, prefix in enumerate(prefixes) if f"{prefix}mlp.gate.weight" in names)
        heads: dict[str, Any] = {}
        if config.mla is None:
            heads = {
                "qkv_bias": f"{prefixes[0]}self_attn.q_proj.bias" in names,
                "qk_norm": f"{prefixes[0]}self_attn.q_norm.weight" in names,
            }
        return dataclasses.replace(
            config,
            num_layers=count,
            layer_types=(kind,) * count,
            rope=((kind, config.rope_by_type[kind]),),
            moe=dataclasses.replace(config.moe, layers=mixed) if config.moe is not None and mixed else None,
            norm_unit_offset=config.norm_unit_offset or layout.unit_offset,
            num_next_token_layers=0,
            **heads,
        )
    except (CheckpointError, UnsupportedModelError):
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"config.json does not describe the layers of prediction modules: {reason}") from error
