"""Reads the config.json of an EAGLE-3 head, of the original layout or that of the speculators library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..config import DecoderConfig
from ..draft_config import AuxLayers, HeadConfig, layers_config, positive
from ..errors import CheckpointError, UnsupportedModelError
from ..safetensors_files import StoredTensor

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_DEFAULT_COUNT = 3
_MASK_TOKENS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(HeadConfig):
    """A head that reads several of the target's hidden states and has a head of its own."""

    method: ClassVar[str] = "eagle3"

    layers: DecoderConfig
    aux: AuxLayers
    has_fc: bool
    """A projection makes one hidden state of those of the target; without it there is one of the head's size."""
    fc_bias: bool
    input_norm: bool
    """One RMSNorm over all of them before the projection (`norm_before_fc`)."""
    fc_norm: bool
    """One RMSNorm over each of them before the projection (3.1)."""
    norm_before_residual: bool
    """The first layer's residual is the normalised hidden state."""
    norm_output: bool
    """The head reads its own output after the final norm (3.1)."""
    own_embedding: bool
    own_head: bool
    mask_token: int | None
    """What stands for unknown tokens when it drafts in parallel (P-EAGLE); None: it drafts one after another."""

    @property
    def state_size(self) -> int:
        """Columns of the target's hidden states side by side."""
        return self.aux.count * self.target_hidden_size

    def matrix_elements(self, *, of_target: bool) -> int:
        """The half of the first layer's queries, keys and values that reads the other input, and the projection."""
        hidden = self.layers.hidden_size
        return self.layers.qkv_size * hidden + (hidden * self.state_size if of_target and self.has_fc else 0)

    def states_of(self, target: DecoderConfig) -> tuple[int, ...]:
        """See `AuxLayers.of_target`."""
        return self.aux.of_target(target.num_layers)


def read_config(hf: Mapping[str, Any], tensors: Mapping[str, StoredTensor], numbering: str | None) -> Eagle3Config:
    """Makes the configuration.

    Args:
        hf: the contents of config.json.
        tensors: what the checkpoint has, by the names of `checkpoint.rename`.
        numbering: of the hidden states, one of `NUMBERINGS`, in place of the format's.

    Raises:
        CheckpointError: the two do not fit together.
        UnsupportedModelError: the layers or the format are of a kind that is not implemented.
    """
    published = hf.get("speculators_model_type")
    if published not in (None, "eagle3"):
        raise UnsupportedModelError(f"speculators_model_type {published!r}; supported: eagle3")
    nested = hf.get("eagle_config") or {}
    if nested.get("use_aux_hidden_state") is False:
        raise UnsupportedModelError("use_aux_hidden_state false; supported: true")
    layers = layers_config(hf.get("transformer_layer_config") if published else hf, tensors)
    draft_vocab = positive(hf, "draft_vocab_size") or layers.vocab_size
    if draft_vocab > layers.vocab_size:
        raise CheckpointError(f"draft_vocab_size {draft_vocab} exceeds the vocabulary of {layers.vocab_size}")
    if draft_vocab < layers.vocab_size and "d2t" not in tensors:
        raise CheckpointError(
            f"the eagle3 head drafts {draft_vocab} of {layers.vocab_size} tokens, but lacks d2t, which says which"
        )
    target_hidden = positive(hf, "target_hidden_size") or layers.hidden_size
    config = Eagle3Config(
        format="EAGLE-3, speculators" if published else "EAGLE-3, original",
        depth=None,
        vocab_size=layers.vocab_size,
        draft_vocab_size=draft_vocab,
        target_hidden_size=target_hidden,
        layers=layers,
        aux=_aux_layers(hf, nested, bool(published), numbering),
        has_fc="fc.weight" in tensors,
        fc_bias="fc.bias" in tensors,
        input_norm=_flag(hf, nested, "norm_before_fc") or "input_norm.weight" in tensors,
        fc_norm=_flag(hf, nested, "fc_norm") or "fc_norm.0.weight" in tensors,
        norm_before_residual=bool(hf.get("norm_before_residual", bool(published))),
        norm_output=_flag(hf, nested, "norm_output"),
        own_embedding="model.embed_tokens.weight" in tensors,
        own_head="lm_head.weight" in tensors or draft_vocab < layers.vocab_size,
        mask_token=_mask_token(hf, tensors),
    )
    _check(config, tensors)
    return config


def _flag(hf: Mapping[str, Any], nested: Mapping[str, Any], name: str) -> bool:
    return bool(hf.get(name, nested.get(name, False)))


def _aux_layers(
    hf: Mapping[str, Any], nested: Mapping[str, Any], speculators: bool, numbering: str | None
) -> AuxLayers:
    """The layers, and how they are numbered.

    Ids beside the other fields are read as hidden states, as vLLM does; SGLang, and the trainers that write an
    `eagle_config`, count layer outputs from 0.
    """
    ids, source, format_numbering = hf.get(_LAYER_IDS), "config.json", "hidden_states"
    if not ids and nested.get(_LAYER_IDS):
        ids, source, format_numbering = nested[_LAYER_IDS], "eagle_config", "layer_outputs"
    if not ids:
        return AuxLayers(stored=None, numbering="hidden_states", source="the default", count=_DEFAULT_COUNT)
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise CheckpointError(f"{_LAYER_IDS} must be a list of integers, got {ids!r}")
    if numbering is not None:
        source = "the option aux_layer_numbering"
    elif source == "config.json":
        source = f"the {'speculators' if speculators else 'original'} format"
    return AuxLayers(stored=tuple(ids), numbering=numbering or format_numbering, source=source, count=len(ids))


def _mask_token(hf: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> int | None:
    if not hf.get("parallel_drafting") and "mask_hidden" not in tensors:
        return None
    if "mask_hidden" not in tensors:
        raise CheckpointError("config.json says parallel_drafting, but the eagle3 head lacks mask_hidden")
    candidates = [(hf.get("dflash_config") or {}).get("mask_token_id"), *(hf.get(name) for name in _MASK_TOKENS)]
    for token in candidates:
        if isinstance(token, int):
            return token
    raise CheckpointError(
        f"the eagle3 head drafts in parallel, but config.json names no mask token: none of {', '.join(_MASK_TOKENS)}"
    )


def _check(config: Eagle3Config, tensors: Mapping[str, StoredTensor]) -> None:
    count, hidden, of_target = config.aux.count, config.layers.hidden_size, config.target_hidden_size
    fc = tensors.get("fc.weight")
    if fc is not None and fc.shape != (hidden, count * of_target):
        columns = (fc.shape or (0,))[-1] / of_target
        raise CheckpointError(
            f"fc.weight of the eagle3 head has shape {list(fc.shape)}, which reads {columns:g} hidden states of "
            f"{of_target}, but its configuration makes it {[hidden, count * of_target]}: {count} hidden states"
        )
    if fc is None and config.state_size != hidden:
        raise CheckpointError(
            f"the eagle3 head lacks fc.weight: {count} hidden states of {of_target} do not make one of {hidden}"
        )
    if config.mask_token is not None and not 0 <= config.mask_token < config.vocab_size:
        raise CheckpointError(
            f"the mask token is {config.mask_token}, but the eagle3 head's vocabulary has {config.vocab_size} tokens"
        )
    for missing, own in (("embed_tokens.weight", config.own_embedding), ("lm_head.weight", config.own_head)):
        if not own and hidden != of_target:
            raise CheckpointError(
                f"the eagle3 head lacks {missing}, and the target's of hidden size {of_target} does not fit its "
                f"hidden size of {hidden}"
            )
