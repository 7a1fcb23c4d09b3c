"""Reads the config.json of a DFlash drafter, of the original layout or that of the speculators library."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..config import DecoderConfig
from ..draft_config import AuxLayers, HeadConfig, layers_config, object_in, positive
from ..errors import CheckpointError, UnsupportedModelError
from ..safetensors_files import StoredTensor

MOST_QUERIES = 64
"""Of a row: which of them see each other is told by the bits of one integer."""
_MASK_TOKENS = ("mask_token_id", "dspark_noise_token_id")
_UNSUPPORTED = ("attention_sink_bias", "add_swa_attention_sink_bias", "attn_output_gate")


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(HeadConfig):
    """A drafter whose queries, an anchor and masks, read context that is made of several of the target's states."""

    method: ClassVar[str] = "dflash"

    layers: DecoderConfig
    aux: AuxLayers
    block_size: int
    """Queries of a row that it was trained with, the anchor's included."""
    from_anchor: bool
    """The anchor's query drafts too: each query tells the token after its own (`sample_from_anchor`). Otherwise each
    mask tells the token at its own place, and the anchor's query tells none."""
    causal: tuple[bool, ...]
    """Of each layer: a query sees those before it only. Otherwise all of a row's see each other."""
    mask_token: int
    num_target_layers: int | None
    """Layers of the target that it was trained with, where it says so."""
    fc_bias: bool
    own_mask: bool
    """It has an embedding of the mask token of its own (`mask_embedding.pt`)."""
    own_embedding: bool
    own_head: bool

    @property
    def state_size(self) -> int:
        """Columns of the target's hidden states side by side."""
        return self.aux.count * self.target_hidden_size

    @property
    def most_drafts(self) -> int:
        """The most drafts of a row in a round."""
        return self.block_size - (not self.from_anchor)

    @property
    def context_size(self) -> int:
        """Columns of the keys and values of all layers side by side."""
        return self.layers.num_layers * 2 * self.layers.num_kv_heads * self.layers.head_dim

    def queries(self, num_drafts: int) -> int:
        """Queries of a row that drafts so many tokens."""
        return num_drafts + (not self.from_anchor)

    def matrix_elements(self, *, of_target: bool) -> int:
        """The projection, and the one that makes the context's keys and values."""
        return self.layers.hidden_size * (self.state_size + self.context_size) if of_target else 0

    def states_of(self, target: DecoderConfig) -> tuple[int, ...]:
        """See `AuxLayers.of_target`."""
        try:
            return self.aux.of_target(target.num_layers)
        except CheckpointError as error:
            assert self.aux.stored is not None
            raise CheckpointError(
                f"target_layer_ids {list(self.aux.stored)} of the {self.method} head, read as {self.aux.numbering}, "
                f"lie outside of the target: {error}"
            ) from None

    def check_target(self, target: DecoderConfig) -> None:
        """See `HeadConfig.check_target`; also compares the number of layers, where the head says it."""
        if self.num_target_layers is not None and self.num_target_layers != target.num_layers:
            raise CheckpointError(
                f"the {self.method} head was made for a target of {self.num_target_layers} layers, but this one has "
                f"{target.num_layers}"
            )
        super().check_target(target)


class Fields:
    """The fields of a config.json, in the part that is for the drafter or beside it."""

    def __init__(self, hf: Mapping[str, Any]) -> None:
        """Raises `CheckpointError` where the drafter's own part is none."""
        self._parts = (object_in(hf, "dflash_config"), hf)

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of some names that is given, of the drafter's own part first."""
        for name in names:
            for part in self._parts:
                if part.get(name) is not None:
                    return part[name]
        return default

    def integer(self, *names: str) -> int:
        """A field that must be an integer; raises `CheckpointError` if it is missing or none."""
        value = self.get(*names)
        if not isinstance(value, int) or isinstance(value, bool):
            raise CheckpointError(f"config.json of the draft head must give {names[0]} as an integer, got {value!r}")
        return value

    def size(self, name: str, default: int) -> int:
        """A positive integer; raises `CheckpointError` for anything else."""
        value = self.get(name, default=default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{name} of the draft head must be a positive integer, got {value!r}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """True or false; raises `CheckpointError` for anything else."""
        value = self.get(name, default=default)
        if value not in (True, False):
            raise CheckpointError(f"{name} of the draft head must be true or false, got {value!r}")
        return bool(value)


def read_config(hf: Mapping[str, Any], tensors: Mapping[str, StoredTensor], numbering: str | None) -> DFlashConfig:
    """Makes the configuration.

    Args:
        hf: the contents of config.json.
        tensors: what the checkpoint has, by the names of `checkpoint.rename`.
        numbering: of the hidden states, one of `NUMBERINGS`, in place of the format's.

    Raises:
        CheckpointError: the two do not fit together.
        UnsupportedModelError: the layers or the format are of a kind that is not implemented.
    """
    if Fields(hf).get("projector_type", default="dflash") != "dflash":
        raise UnsupportedModelError(f"projector_type {Fields(hf).get('projector_type')!r}; supported: dflash")
    common = block_fields(hf, tensors, numbering, method="dflash", from_anchor=False)
    return checked(DFlashConfig(**common), tensors)


def block_fields(
    hf: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
    numbering: str | None,
    *,
    method: str,
    from_anchor: bool,
) -> dict[str, Any]:
    """The fields that all drafters of blocks have.

    Args:
        hf: the contents of config.json.
        tensors: see `read_config`.
        numbering: see `read_config`.
        method: whose checkpoint it is.
        from_anchor: what holds where `sample_from_anchor` is not given.
    """
    fields, published = Fields(hf), hf.get("speculators_model_type")
    if published not in (None, method):
        raise UnsupportedModelError(f"speculators_model_type {published!r}; supported: {method}")
    for name in _UNSUPPORTED:
        if fields.get(name, default=False):
            raise UnsupportedModelError(f"{name} {fields.get(name)!r} in a draft head; supported: false")
    from_anchor = fields.flag("sample_from_anchor", from_anchor)
    if fields.flag("shift_label", False) and not from_anchor:
        raise UnsupportedModelError("shift_label true without sample_from_anchor; supported: false")
    inner = hf.get("transformer_layer_config") if published else hf
    layers = _sliding(layers_config(inner, tensors), fields)
    _require_uniform(layers)
    draft_vocab = fields.size("draft_vocab_size", layers.vocab_size)
    block = fields.integer("block_size")
    return {
        "format": f"{method}, {'speculators' if published else 'original'}",
        "depth": block - (not from_anchor),
        "vocab_size": layers.vocab_size,
        "draft_vocab_size": draft_vocab,
        "target_hidden_size": fields.size("target_hidden_size", layers.hidden_size),
        "layers": layers,
        "aux": _aux_layers(fields, hf, layers, numbering),
        "block_size": block,
        "from_anchor": from_anchor,
        "causal": _causal(fields, layers, bool(published)),
        "mask_token": fields.integer(*_MASK_TOKENS),
        "num_target_layers": positive(hf, "num_target_layers"),
        "fc_bias": "fc.bias" in tensors,
        "own_mask": "mask_embedding" in tensors,
        "own_embedding": "model.embed_tokens.weight" in tensors,
        "own_head": "lm_head.weight" in tensors or draft_vocab < layers.vocab_size,
    }


def _require_uniform(layers: DecoderConfig) -> None:
    """Refuses layers whose keys and values cannot be made in one go."""
    for what, found in (
        ("rotary embeddings that differ between layers", len({rope for _, rope in layers.rope}) > 1),
        ("heads that differ between layers", layers.full_heads is not None),
        ("layers that share keys and values", layers.num_shared_layers > 0),
        ("norms on values", layers.value_norm),
        ("norms that multiply with 1 + weight, or follow attention", layers.norm_unit_offset or layers.post_norms),
    ):
        if found:
            raise UnsupportedModelError(f"{what} in a draft head of blocks; supported: layers like Qwen3's or Llama's")


def _sliding(layers: DecoderConfig, fields: Fields) -> DecoderConfig:
    """With `use_swa` layers slide over `swa_window_size` positions: those that layer_types names, or else all."""
    if not fields.flag("use_swa", False):
        return layers
    window = fields.get("swa_window_size", default=layers.sliding_window)
    if not isinstance(window, int) or window < 1:
        raise CheckpointError(f"use_swa needs swa_window_size, a positive integer, got {window!r}")
    if "sliding_attention" in layers.layer_types:
        return dataclasses.replace(layers, sliding_window=window)
    kinds = ("sliding_attention",) * layers.num_layers
    rope = tuple(("sliding_attention", rope) for _, rope in layers.rope[:1])
    return dataclasses.replace(layers, layer_types=kinds, sliding_window=window, rope=rope)  # type: ignore[arg-type]


def _causal(fields: Fields, layers: DecoderConfig, speculators: bool) -> tuple[bool, ...]:
    """Which layers are causal.

    The original layout has one flag for all of them. In that of speculators full layers never are, and sliding ones
    are unless `sliding_window_non_causal` says otherwise.
    """
    if fields.get("causal") is not None:
        return (fields.flag("causal", False),) * layers.num_layers
    sliding = speculators and not fields.flag("sliding_window_non_causal", False)
    return tuple(sliding and kind == "sliding_attention" for kind in layers.layer_types)


def _aux_layers(fields: Fields, hf: Mapping[str, Any], layers: DecoderConfig, numbering: str | None) -> AuxLayers:
    """The layers, and how they are numbered: by their outputs, -1 being the embedding; or as hidden states."""
    ids, format_numbering, source = hf.get("aux_hidden_state_layer_ids"), "hidden_states", "the speculators format"
    if ids is None:
        ids, format_numbering, source = fields.get("target_layer_ids"), "layer_outputs", "the original format"
    if ids is None:
        of_target = positive(hf, "num_target_layers")
        if of_target is None or of_target < 4:
            raise CheckpointError("config.json of the draft head gives neither target_layer_ids nor num_target_layers")
        ids, source = _evenly_spaced(of_target, layers.num_layers), "the default"
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) for i in ids):
        raise CheckpointError(f"target_layer_ids must be a list of integers, got {ids!r}")
    if numbering is not None:
        source = "the option aux_layer_numbering"
    return AuxLayers(stored=tuple(ids), numbering=numbering or format_numbering, source=source, count=len(ids))


def _evenly_spaced(of_target: int, count: int) -> list[int]:
    """The published default: as many of the target's layers as the drafter has, from the second to the third last."""
    if count == 1:
        return [of_target // 2]
    return [round(1 + i * (of_target - 4) / (count - 1)) for i in range(count)]


def checked(config: Any, tensors: Mapping[str, StoredTensor]) -> Any:
    """The configuration itself, once it was compared with the tensors.

    Raises:
        CheckpointError: they do not fit together.
        UnsupportedModelError: a block of a kind that is not implemented.
    """
    name, layers, hidden = config.method, config.layers, config.layers.hidden_size
    if config.draft_vocab_size > config.vocab_size:
        raise CheckpointError(
            f"draft_vocab_size {config.draft_vocab_size} exceeds the vocabulary of {config.vocab_size}"
        )
    if config.draft_vocab_size < config.vocab_size and "d2t" not in tensors:
        raise CheckpointError(
            f"the {name} head drafts {config.draft_vocab_size} of {config.vocab_size} tokens, but lacks d2t, which "
            "says which"
        )
    if not 0 <= config.mask_token < config.vocab_size:
        raise CheckpointError(
            f"the mask token is {config.mask_token}, but the {name} head's vocabulary has {config.vocab_size} tokens"
        )
    if config.most_drafts < 1:
        raise CheckpointError(f"block_size is {config.block_size}, in which the {name} head has no place for a draft")
    slides = "sliding_attention" in layers.layer_types and not all(config.causal)
    if slides and layers.sliding_window < config.block_size:
        raise UnsupportedModelError(
            f"a sliding window of {layers.sliding_window} positions, less than the block_size of {config.block_size}; "
            "supported: windows that hold a block"
        )
    fc = tensors.get("fc.weight")
    if fc is not None and fc.shape != (hidden, config.state_size):
        columns = (fc.shape or (0,))[-1] / config.target_hidden_size
        raise CheckpointError(
            f"fc.weight of the {name} head has shape {list(fc.shape)}, which reads {columns:g} hidden states of "
            f"{config.target_hidden_size}, but its configuration makes it {[hidden, config.state_size]}: "
            f"{config.aux.count} hidden states"
        )
    for missing, own in (("embed_tokens.weight", config.own_embedding), ("lm_head.weight", config.own_head)):
        if not own and hidden != config.target_hidden_size:
            raise CheckpointError(
                f"the {name} head lacks {missing}, and the target's of hidden size {config.target_hidden_size} does "
                f"not fit its hidden size of {hidden}"
            )
    return config
