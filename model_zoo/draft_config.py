"""What the configurations of all draft heads have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .config import DecoderConfig
from .errors import CheckpointError, UnsupportedModelError
from .hf_config import object_in
from .registry import family_of

NUMBERINGS = ("hidden_states", "layer_outputs")
"""How checkpoints number the target's hidden states: as transformers' `hidden_states`, where 0 is the embedding and i
the output of layer i - 1; or by layers, where i is the output of layer i."""


@dataclass(frozen=True, kw_only=True)
class AuxLayers:
    """Which of the target's hidden states a head reads besides the last, and where that was found."""

    stored: tuple[int, ...] | None
    """As the checkpoint numbers them; None: it does not say, and the published default holds."""
    numbering: str
    """One of `NUMBERINGS`."""
    source: str
    """Where the numbering comes from, for people."""
    count: int

    def __post_init__(self) -> None:
        if self.numbering not in NUMBERINGS:
            raise ValueError(f"numbering must be one of {', '.join(NUMBERINGS)}, got {self.numbering!r}")

    def of_target(self, num_layers: int) -> tuple[int, ...]:
        """Indices into transformers' `hidden_states` for a target of so many layers.

        The default is the outputs of an early, a middle and a late layer (Li et al. 2025, arXiv 2503.01840, and the
        published code).

        Raises:
            CheckpointError: the target has too few layers.
        """
        if self.stored is None:
            ids: tuple[int, ...] = (2, num_layers // 2, num_layers - 3)
        else:
            ids = tuple(i + (self.numbering == "layer_outputs") for i in self.stored)
        wrong = [i for i in ids if not 0 <= i < num_layers]
        if wrong:
            raise CheckpointError(
                f"the draft head reads the target's hidden states {list(ids)} (0 is the embedding), but a target of "
                f"{num_layers} layers has 0 to {num_layers - 1} before its last"
            )
        return ids


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """A draft head: what it reads of the target, and what it writes."""

    method: ClassVar[str]
    reads_target_cache: ClassVar[bool] = False
    """It has queries alone, which read the target's keys and values; all drafts of a round stand at one position."""

    format: str
    """The layout of the checkpoint, for people."""
    depth: int | None
    """Drafts per round that it was made for, where it says so."""
    vocab_size: int
    """Of the target."""
    draft_vocab_size: int
    """Tokens that it can draft."""
    target_hidden_size: int

    def states_of(self, target: DecoderConfig) -> tuple[int, ...]:
        """The hidden states that it reads: indices into transformers' `hidden_states`. Here, the last."""
        return (target.num_layers,)

    @property
    def logits_per_token(self) -> int:
        """Of how many tokens the logits are computed for one draft."""
        return self.draft_vocab_size

    def matrix_elements(self, *, of_target: bool) -> int:
        """Elements of the matrices that a forward reads besides those of its decoder layers and its head to the
        vocabulary; `of_target`: of one that reads the target's hidden states, not its own.
        """
        return 0

    def check_target(self, target: DecoderConfig) -> None:
        """Compares the head with a target's configuration.

        Raises:
            CheckpointError: they do not match; the message has both numbers.
        """
        for what, ours, theirs in (
            ("hidden size", self.target_hidden_size, target.hidden_size),
            ("vocabulary", self.vocab_size, target.vocab_size),
        ):
            if ours != theirs:
                raise CheckpointError(
                    f"the {self.method} head was made for a target with a {what} of {ours}, but this one's is {theirs}"
                )
        self.states_of(target)


_OBJECTS = ("speculators_config", "eagle_config", "dflash_config", "text_config")
_NAMES = ("model_type", "speculators_model_type")


def check_fields(hf: Mapping[str, Any]) -> None:
    """Compares the types of those fields of a draft head's config.json in which formats keep others.

    Raises:
        CheckpointError: one is of another type.
    """
    for name in _OBJECTS:
        object_in(hf, name)
    for name in _NAMES:
        if hf.get(name) is not None and not isinstance(hf[name], str):
            raise CheckpointError(f"{name} in config.json must be a string, got {hf[name]!r}")
    inner = object_in(hf, "speculators_config")
    for name, source, kind, what in (
        ("architectures", hf, str, "strings"),
        ("proposal_methods", inner, Mapping, "objects"),
    ):
        value = source.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(entry, kind) for entry in value)):
            raise CheckpointError(f"{name} in config.json must be a list of {what}, got {value!r}")


def positive(hf: Mapping[str, Any], name: str) -> int | None:
    """An integer of a config.json, if it is there and positive."""
    value = hf.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def layers_config(hf: object, names: Mapping[str, object]) -> DecoderConfig:
    """The decoder layers inside a head, whose config.json describes them as it would a model.

    Biases of queries, keys and values are those that the checkpoint has: what families and trainers assume differs.

    Args:
        hf: the contents of config.json, or of the part of it that describes the layers.
        names: the tensors that there are, by the names of the shared loader.

    Raises:
        CheckpointError: a field is missing or wrong.
        UnsupportedModelError: the layers are of a kind that is not implemented.
    """
    if not isinstance(hf, Mapping):
        raise CheckpointError(f"transformer_layer_config of the draft head must describe its layers, got {hf!r}")
    # Heads are not tied to anything: what they share with the target is decided by what they lack.
    try:
        config = family_of(hf).read_config({**hf, "tie_word_embeddings": True})
        kinds = tuple(hf.get("layer_types") or config.layer_types)[: config.num_layers]
        if config.mla is not None or config.moe is not None:
            raise UnsupportedModelError(
                f"draft heads with layers of {config.model_type!r} (latent attention, mixtures of experts); supported: "
                "dense layers with heads of keys and values"
            )
        rope = config.rope[0][1]
        return dataclasses.replace(
            config,
            qkv_bias="model.layers.0.self_attn.q_proj.bias" in names,
            layer_types=kinds,
            sliding_window=hf.get("sliding_window") or 0,
            rope=tuple((kind, config.rope_by_type.get(kind, rope)) for kind in sorted(set(kinds))),
        )
    except (CheckpointError, UnsupportedModelError):
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"config.json does not describe the layers of a draft head: {reason}") from error
