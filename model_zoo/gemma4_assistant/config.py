"""Reads the config.json of a Gemma 4 assistant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..config import DecoderConfig
from ..draft_config import HeadConfig, positive
from ..errors import CheckpointError, UnsupportedModelError
from ..gemma4 import config as gemma4
from ..safetensors_files import StoredTensor

MODEL_TYPE = "gemma4_assistant"
_TARGET = "gemma4_text"

# What transformers' defaults are, which a config.json may leave out.
_BACKBONE_SIZE, _CENTROIDS, _CHOSEN = 1536, 2048, 32
_ABSENT = ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp")
"""Parts of Gemma 4 that assistants do not have."""


@dataclass(frozen=True, kw_only=True)
class Gemma4AssistantConfig(HeadConfig):
    """A decoder of queries alone between two projections, with a head of its own."""

    method: ClassVar[str] = "mtp"
    reads_target_cache: ClassVar[bool] = True

    layers: DecoderConfig
    """All of its layers share keys and values: those of the target."""
    own_head: bool
    """The head's weight is not the embedding table, which then serves nothing."""
    centroids: int
    """Into so many groups of equal size the vocabulary is ordered; 0: it is not, and every token can be drafted."""
    chosen_centroids: int
    """Of how many groups, those of the best centroids, the logits are computed."""

    @property
    def logits_per_token(self) -> int:
        """The tokens of the chosen groups, where the vocabulary is ordered."""
        return self.vocab_size // self.centroids * self.chosen_centroids if self.centroids else self.vocab_size

    def matrix_elements(self, *, of_target: bool) -> int:
        """Both projections, and the centroids."""
        return (3 * self.target_hidden_size + self.centroids) * self.layers.hidden_size

    def source_layers(self, target: DecoderConfig) -> tuple[int, ...]:
        """Of each layer, the target's layer whose keys and values it reads: the last of its type that has any.

        Raises:
            CheckpointError: the target has none, or its heads are others.
        """
        sources = []
        for layer, kind in enumerate(self.layers.layer_types):
            source = target.last_cached_layer(kind)
            if source < 0:
                kinds = ", ".join(sorted(set(target.layer_types)))
                raise CheckpointError(
                    f"the {self.method} head reads keys and values of a layer of type {kind}, but the target's types "
                    f"are {kinds}"
                )
            ours, theirs = self.layers.heads_of_layer(layer), target.heads_of_layer(source)
            for what, mine, other in (
                ("head size", ours.head_dim, theirs.head_dim),
                ("number of key heads", ours.num_kv_heads, theirs.num_kv_heads),
            ):
                if mine != other:
                    raise CheckpointError(
                        f"the {self.method} head was made for {kind} layers with a {what} of {mine}, but the target's "
                        f"is {other}"
                    )
            sources.append(source)
        return tuple(sources)

    def check_target(self, target: DecoderConfig) -> None:
        """Compares sizes, vocabularies, families and heads; see `HeadConfig.check_target`."""
        super().check_target(target)
        if target.model_type != _TARGET:
            raise CheckpointError(
                f"a Gemma 4 assistant drafts for models of type {_TARGET!r}, but this one's is {target.model_type!r}"
            )
        self.source_layers(target)


def read_config(
    hf: Mapping[str, Any], tensors: Mapping[str, StoredTensor], numbering: str | None
) -> Gemma4AssistantConfig:
    """Makes the configuration.

    Args:
        hf: config.json, with the layers in `text_config`.
        tensors: what the checkpoint has, by the names of `checkpoint.rename`.
        numbering: must be None: it reads the last hidden state only.

    Raises:
        CheckpointError: the two do not fit together, or a field is missing or wrong.
        UnsupportedModelError: it is of a kind that is not implemented.
    """
    if numbering is not None:
        raise CheckpointError("aux_layer_numbering is for eagle3 heads; an assistant reads the last hidden state only")
    if hf.get("model_type") != MODEL_TYPE:
        raise UnsupportedModelError(f"assistants of model type {hf.get('model_type')!r}; supported: {MODEL_TYPE}")
    text = hf.get("text_config")
    if not isinstance(text, Mapping):
        raise CheckpointError("config.json of the assistant lacks text_config, which describes its layers")
    wrong = [name for name in _ABSENT if text.get(name)]
    if wrong:
        raise UnsupportedModelError(f"{wrong[0]} {text[wrong[0]]!r} in an assistant; supported: none")
    try:
        layers = gemma4.text_config(_with_defaults(text))
    except (CheckpointError, UnsupportedModelError):
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"config.json does not describe the layers of an assistant: {reason}") from error
    centroids, chosen = 0, 0
    if hf.get("use_ordered_embeddings"):
        centroids = positive(hf, "num_centroids") or _CENTROIDS
        chosen = positive(hf, "centroid_intermediate_top_k") or _CHOSEN
        if layers.vocab_size % centroids or chosen > centroids:
            raise CheckpointError(
                f"{layers.vocab_size} tokens do not form {centroids} groups of equal size of which {chosen} are chosen"
            )
    return Gemma4AssistantConfig(
        format="Gemma 4 assistant",
        depth=None,
        vocab_size=layers.vocab_size,
        draft_vocab_size=layers.vocab_size,
        target_hidden_size=positive(hf, "backbone_hidden_size") or _BACKBONE_SIZE,
        layers=layers,
        own_head=not hf.get("tie_word_embeddings", True),
        centroids=centroids,
        chosen_centroids=chosen,
    )


def _with_defaults(text: Mapping[str, Any]) -> dict[str, Any]:
    count = text.get("num_hidden_layers") or gemma4.DEFAULTS["num_hidden_layers"]
    shared = text.get("num_kv_shared_layers") or count
    if shared != count:
        raise CheckpointError(
            f"num_kv_shared_layers of the assistant is {shared}, but all of its {count} layers must share"
        )
    fixed = {"model_type": "gemma4_text", "num_kv_shared_layers": count, "hidden_size_per_layer_input": 0}
    return {**gemma4.DEFAULTS, **text, **fixed}
