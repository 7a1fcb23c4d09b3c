"""Reads the config.json of an EAGLE-1 or -2 head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..config import DecoderConfig
from ..draft_config import HeadConfig, layers_config
from ..errors import CheckpointError
from ..safetensors_files import StoredTensor


@dataclass(frozen=True, kw_only=True)
class EagleConfig(HeadConfig):
    """A head that reads the target's last hidden state, after its final norm, and writes another for its head."""

    method: ClassVar[str] = "eagle"

    layers: DecoderConfig
    fc_bias: bool
    own_embedding: bool
    own_head: bool

    def matrix_elements(self, *, of_target: bool) -> int:
        """The projection, of either."""
        return 2 * self.target_hidden_size**2


def read_config(hf: Mapping[str, Any], tensors: Mapping[str, StoredTensor], numbering: str | None) -> EagleConfig:
    """Makes the configuration.

    Args:
        hf: config.json: that of the layers, or one of model type "eagle" with that inside as `model`.
        tensors: what the checkpoint has, by the names of `checkpoint.rename`.
        numbering: must be None: the head reads no layer but the last.

    Raises:
        CheckpointError: the two do not fit together.
        UnsupportedModelError: the layers are of a kind that is not implemented.
    """
    if numbering is not None:
        raise CheckpointError("aux_layer_numbering is for eagle3 heads; an eagle head reads the last hidden state only")
    inner = hf.get("model")
    wrapped = isinstance(inner, Mapping)
    layers = layers_config(inner if isinstance(inner, Mapping) else hf, tensors)
    fc = tensors.get("fc.weight")
    if fc is None:
        raise CheckpointError("the eagle head lacks fc.weight")
    if fc.shape != (layers.hidden_size, 2 * layers.hidden_size):
        raise CheckpointError(
            f"fc.weight of the eagle head has shape {list(fc.shape)}, but config.json makes it "
            f"{[layers.hidden_size, 2 * layers.hidden_size]}"
        )
    return EagleConfig(
        format="EAGLE, wrapped" if wrapped else "EAGLE",
        depth=None,
        vocab_size=layers.vocab_size,
        draft_vocab_size=layers.vocab_size,
        target_hidden_size=layers.hidden_size,
        layers=layers,
        fc_bias="fc.bias" in tensors,
        own_embedding="model.embed_tokens.weight" in tensors,
        own_head="lm_head.weight" in tensors,
    )
