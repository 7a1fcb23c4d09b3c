"""Trained draft heads that come with draftgraph: which there are, and whether one was trained for a given target.

`model_zoo/heads/TARGET/METHOD/` holds config.json, model.safetensors and head.json, the note that says how the head was
made. TARGET is an alias of a model, METHOD a key of `METHODS`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import model_zoo
from ..model_zoo.errors import CheckpointError
from ..model_zoo.json_text import parse_json
from .cache import entry_path
from .errors import ConfigError, ModelNotFoundError
from .models import ALIASES, resolve_model
from .progress import ProgressCallback
from .speculative_config import SpeculativeConfig
from .speculative_methods import METHODS

HEADS_DIRECTORY = Path(model_zoo.__path__[0]) / "heads"
"""Where they lie."""

NOTE_NAME = "head.json"

_NAME = re.compile(r"(?P<method>[a-z0-9]+)@(?P<target>[\w.-]+)")


@dataclass(frozen=True)
class ShippedHead:
    """A head that comes with draftgraph."""

    method: str
    """A key of `METHODS`."""
    target: str
    """The alias of the model that it was trained for."""
    directory: Path

    @property
    def name(self) -> str:
        """As `model` of a speculative config names it."""
        return f"{self.method}@{self.target}"

    @property
    def note(self) -> Mapping[str, Any]:
        """Its head.json.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        note = read_note(self.directory)
        if note is None:
            raise CheckpointError(f"{self.directory / NOTE_NAME} is missing or holds no JSON object")
        return note

    @property
    def target_weights(self) -> tuple[str, ...]:
        """The `weights_identity` of the target that it was trained for, one for each form of it that is known."""
        return tuple((self.note.get("target") or {}).get("weights") or ())

    @property
    def rank(self) -> tuple[float, float]:
        """What makes one head of a target better than another: the speed-up that was measured, and then the mean
        acceptance length; 0 where the note does not say.
        """
        held_out = self.note.get("held_out") or {}
        return float(held_out.get("speed_up") or 0.0), float(held_out.get("mean_acceptance_length") or 0.0)


def shipped_heads() -> tuple[ShippedHead, ...]:
    """All of them, by target and method."""
    found = sorted(HEADS_DIRECTORY.glob("*/*/config.json"))
    heads = (ShippedHead(file.parent.name, file.parent.parent.name, file.parent) for file in found)
    return tuple(head for head in heads if head.method in METHODS)


def shipped_head(target: str, method: str) -> ShippedHead | None:
    """The head of a method for the model with the alias `target`, or None if there is none."""
    return next((head for head in shipped_heads() if (head.target, head.method) == (target, method)), None)


def heads_for(name: str | Path, directory: Path) -> tuple[ShippedHead, ...]:
    """The heads that were trained for a target.

    A target is known by its alias or its hub id, by lying where the alias's model is cached, or by its weights. Sizes
    do not tell: a head for another model of the same sizes would draft in vain.

    Args:
        name: as the user gave it.
        directory: where it lies.

    Raises:
        CheckpointError: the weights, by which it must be known, cannot be read; or a head's note cannot.
    """
    heads = shipped_heads()
    known = tuple(head for head in heads if _is_alias(head.target, str(name), directory))
    if known or not heads:
        return known
    # Seconds of import, which only targets without an alias need.
    from ..model_zoo.weights_identity import weights_identity

    identity = weights_identity(directory)
    return tuple(head for head in heads if identity in head.target_weights)


def with_shipped_head(config: SpeculativeConfig, name: str | Path, directory: Path) -> SpeculativeConfig:
    """The config with the head that comes with draftgraph for the target, where the method needs one and none is named.

    Args:
        config: of the user.
        name: the target, as the user gave it.
        directory: where the target lies.

    Raises:
        ConfigError: there is no such head for this target; says for which targets there are.
        CheckpointError: see `heads_for`.
    """
    wanting = [method for method in config.methods if METHODS[method].ships_heads]
    if config.model is not None or not wanting:
        return config
    (method,) = wanting  # a list has at most one method with weights
    fitting = heads_for(name, directory)
    head = next((head for head in fitting if head.method == method), None)
    if head is not None:
        return dataclasses.replace(config, model=head.name)
    if fitting:
        what = f"for {name} there are only {', '.join(repr(one.name) for one in fitting)}"
    else:
        what = f"{name} is not the model that any of them was trained for"
    raise ConfigError(
        f"method {method!r} needs model, the draft's directory or hub id: heads come with draftgraph for "
        f"{_described()}, and {what}"
    )


def resolve_head(name: str, progress: ProgressCallback | None = None) -> Path:
    """The directory of a draft head.

    Args:
        name: a directory, "METHOD@TARGET" for a head that comes with draftgraph, or a hub id.
        progress: told about downloads.

    Raises:
        ModelNotFoundError, FetchError: there is no such model, or it could not be brought here.
    """
    return shipped_directory(name) or resolve_model(name, progress=progress, pickles=True)


def shipped_directory(name: str) -> Path | None:
    """The directory of a head that comes with draftgraph, "METHOD@TARGET"; None for a name of another form.

    A directory of that name in the current folder comes before the head.

    Raises:
        ModelNotFoundError: it has that form, and there is no such head.
    """
    match = _NAME.fullmatch(name)
    if match is None or Path(name).is_dir():
        return None
    head = shipped_head(match["target"], match["method"])
    if head is None:
        raise ModelNotFoundError(f"no draft head {name!r} comes with draftgraph; there are heads for {_described()}")
    return head.directory


def read_note(directory: Path) -> dict[str, Any] | None:
    """What head.json says of how a head was made; None of a directory without one, or with a broken one."""
    try:
        note = parse_json((directory / NOTE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return note if isinstance(note, dict) else None


def _is_alias(alias: str, name: str, directory: Path) -> bool:
    if alias not in ALIASES:
        return False
    if name in (alias, ALIASES[alias].repository):
        # A directory of that name in the current folder comes before the alias.
        return not Path(name).is_dir()
    return directory.resolve() == entry_path(alias).resolve()


def _described() -> str:
    """The targets that have heads, and which, for messages."""
    targets: dict[str, list[str]] = {}
    for head in shipped_heads():
        targets.setdefault(head.target, []).append(head.method)
    return "; ".join(f"{target} ({', '.join(methods)})" for target, methods in targets.items()) or "no model"
