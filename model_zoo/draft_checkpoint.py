"""Recognises, checks and loads the checkpoints of draft heads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .checkpoint import ACCEPTED_DTYPES
from .decoder import CompileRegion, DecoderModel, identity
from .dflash import checkpoint as dflash_checkpoint
from .dflash import config as dflash_config
from .draft_config import HeadConfig, check_fields
from .draft_files import MASK_EMBEDDING, DraftTensors, open_tensors
from .draft_weights import HeadBuilder
from .dspark import checkpoint as dspark_checkpoint
from .dspark import config as dspark_config
from .eagle import checkpoint as eagle_checkpoint
from .eagle import config as eagle_config
from .eagle3 import checkpoint as eagle3_checkpoint
from .eagle3 import config as eagle3_config
from .errors import CheckpointError
from .gemma4_assistant import checkpoint as gemma4_assistant_checkpoint
from .gemma4_assistant import config as gemma4_assistant_config
from .medusa import checkpoint as medusa_checkpoint
from .medusa import config as medusa_config
from .mtp import checkpoint as mtp_checkpoint
from .mtp import config as mtp_config
from .mtp.config import TARGET_MARK
from .placement import Placement
from .safetensors_files import StoredTensor, read_json

Extras = dict[str, tuple[tuple[int, ...], tuple[str, ...]]]


class HeadFamily(NamedTuple):
    """How the checkpoints of one method are read."""

    recognises: Callable[[Mapping[str, Any], Iterable[str]], bool]
    rename: Callable[[str], str | None]
    read_config: Callable[[Mapping[str, Any], Mapping[str, StoredTensor], str | None], Any]
    placements: Callable[[Any], dict[str, Placement]]
    extras: Callable[[Any], Extras]
    """Tensors that are no weights: their shapes and accepted types."""
    optional: frozenset[str]
    """Those of them that a checkpoint may lack."""
    build: Callable[..., Any]
    """Also takes `attention_backend` where the method's trait `own_attention` says so."""
    names: Callable[[Mapping[str, Any], Collection[str]], dict[str, str]] | None = None
    """In place of `rename`, for tensors that lie among those of a target: the names in the files by those that the
    shared loader knows, of config.json and all names in the files."""
    method: str | None = None
    """Of the speculative config, where it is not the family's name."""


def _as_it_is(name: str) -> str:
    return name


HEAD_FAMILIES: dict[str, HeadFamily] = {
    "medusa": HeadFamily(
        medusa_checkpoint.recognises,
        medusa_checkpoint.rename,
        medusa_config.read_config,
        medusa_checkpoint.placements,
        medusa_checkpoint.extras,
        frozenset(),
        medusa_checkpoint.build,
    ),
    "dspark": HeadFamily(
        dspark_checkpoint.recognises,
        dspark_checkpoint.rename,
        dspark_config.read_config,
        dspark_checkpoint.placements,
        dspark_checkpoint.extras,
        frozenset({"d2t", "t2d", MASK_EMBEDDING}),
        dspark_checkpoint.build,
    ),
    "dflash": HeadFamily(
        dflash_checkpoint.recognises,
        dflash_checkpoint.rename,
        dflash_config.read_config,
        dflash_checkpoint.placements,
        dflash_checkpoint.extras,
        frozenset({"d2t", "t2d", MASK_EMBEDDING}),
        dflash_checkpoint.build,
    ),
    "eagle3": HeadFamily(
        eagle3_checkpoint.recognises,
        eagle3_checkpoint.rename,
        eagle3_config.read_config,
        eagle3_checkpoint.placements,
        eagle3_checkpoint.extras,
        frozenset({"d2t", "t2d"}),
        eagle3_checkpoint.build,
    ),
    "eagle": HeadFamily(
        eagle_checkpoint.recognises,
        eagle_checkpoint.rename,
        eagle_config.read_config,
        eagle_checkpoint.placements,
        eagle_checkpoint.extras,
        frozenset(),
        eagle_checkpoint.build,
    ),
    "gemma4_assistant": HeadFamily(
        gemma4_assistant_checkpoint.recognises,
        gemma4_assistant_checkpoint.rename,
        gemma4_assistant_config.read_config,
        gemma4_assistant_checkpoint.placements,
        gemma4_assistant_checkpoint.extras,
        frozenset(),
        gemma4_assistant_checkpoint.build,
        method=gemma4_assistant_config.Gemma4AssistantConfig.method,
    ),
    "mtp": HeadFamily(
        mtp_checkpoint.recognises,
        _as_it_is,
        mtp_config.read_config,
        mtp_checkpoint.placements,
        mtp_checkpoint.extras,
        frozenset(),
        mtp_checkpoint.build,
        mtp_checkpoint.names,
    ),
}
"""By name, the most particular first."""


@dataclass(frozen=True)
class DraftCheckpoint:
    """A draft head's checkpoint, before its weights are read."""

    directory: Path
    hf: Mapping[str, Any]
    """Its config.json."""
    config: HeadConfig
    tensors: DraftTensors
    names: Mapping[str, str]
    """Names in the files, by the names that the placements use."""
    placements: Mapping[str, Placement]
    extras: Extras
    family: HeadFamily

    @property
    def inside_target(self) -> bool:
        """Whether the tensors of a target, which it has no use for, lie in the same files."""
        return TARGET_MARK in self.tensors.stored and TARGET_MARK not in self.names.values()

    @property
    def missing(self) -> list[str]:
        """Tensors that it should have and has not, by the names that the placements use."""
        wanted = [*self.placements, *(name for name in self.extras if name not in self.family.optional)]
        return [name for name in wanted if name not in self.names]

    @property
    def unexpected(self) -> list[str]:
        """Tensors that its configuration has no use for, as they are named in the files."""
        known = {*self.placements, *self.extras}
        return [stored for name, stored in self.names.items() if name not in known]

    def check(self) -> None:
        """Compares the tensors with the configuration.

        Raises:
            CheckpointError: one is missing, unexpected, or of another shape or type.
        """
        for what, names in (("lacks tensors", self.missing), ("has tensors without use", self.unexpected)):
            if names:
                more = f" and {len(names) - 5} more" if len(names) > 5 else ""
                raise CheckpointError(f"{self.directory} {what}: {', '.join(sorted(names)[:5])}{more}")
        weights = {name: (placement.shape, ACCEPTED_DTYPES) for name, placement in self.placements.items()}
        for name, (shape, dtypes) in {**weights, **self.extras}.items():
            if name not in self.names:
                continue
            stored = self.tensors.stored[self.names[name]]
            if stored.dtype not in dtypes:
                raise CheckpointError(
                    f"{self.names[name]} in {stored.file} is stored as {stored.dtype}; accepted: {', '.join(dtypes)}"
                )
            if stored.shape != shape:
                raise CheckpointError(
                    f"{self.names[name]} in {stored.file} has shape {list(stored.shape)}, "
                    f"but its configuration makes it {list(shape)}"
                )


def open_draft(directory: str | Path, method: str | None = None, *, numbering: str | None = None) -> DraftCheckpoint:
    """Reads what a draft checkpoint says of itself, and the names and shapes of its tensors.

    Args:
        directory: holds config.json and the weights.
        method: which kind it should be; None: whichever recognises it.
        numbering: of the hidden states that it reads, in place of its format's; see `draft_config.NUMBERINGS`.

    Raises:
        CheckpointError: files are missing or damaged, it is of another kind, or its config.json contradicts it.
        UnsupportedModelError: it is of a kind that is not implemented.
    """
    directory = Path(directory)
    hf = read_json(directory / "config.json")
    check_fields(hf)
    tensors = open_tensors(directory)
    methods = {name: family.method or name for name, family in HEAD_FAMILIES.items()}
    named = {name: _names(family, hf, tensors) for name, family in HEAD_FAMILIES.items()}
    kinds = [name for name, family in HEAD_FAMILIES.items() if family.recognises(hf, named[name])]
    fitting = [name for name in kinds if method in (None, methods[name])]
    known = ", ".join(dict.fromkeys(methods.values()))
    if method is not None and not fitting:
        what = f"looks like one of method {methods[kinds[0]]!r}" if kinds else f"is none that {known} know"
        raise CheckpointError(f"{directory} holds no draft head of method {method!r}: it {what}")
    if not fitting:
        raise CheckpointError(f"{directory} holds no draft head of a known layout; known methods: {known}")
    family, names = HEAD_FAMILIES[fitting[0]], named[fitting[0]]
    config = family.read_config(hf, {name: tensors.stored[stored] for name, stored in names.items()}, numbering)
    placements, extras = family.placements(config), family.extras(config)
    return DraftCheckpoint(directory, hf, config, tensors, names, placements, extras, family)


def _names(family: HeadFamily, hf: Mapping[str, Any], tensors: DraftTensors) -> dict[str, str]:
    if family.names is not None:
        return family.names(hf, tensors.stored)
    named = ((family.rename(stored), stored) for stored in tensors.stored)
    return {name: stored for name, stored in named if name is not None}


def load_head(
    checkpoint: DraftCheckpoint,
    target: DecoderModel,
    *,
    max_positions: int,
    compile_region: CompileRegion = identity,
    progress: Callable[[int, int, str], None] | None = None,
    attention_backend: str | None = None,
) -> Any:
    """Reads the weights of a draft head, in the target's type and on its device.

    Args:
        checkpoint: from `open_draft`.
        target: that it drafts for; they share what the head has not of its own.
        max_positions: the longest context that will be used.
        compile_region: see `DecoderModel`.
        progress: called with the tensors read, their number, and "loading draft weights".
        attention_backend: of a drafter that has a choice, see `DecoderModel`; None: the device's own.

    Returns:
        The method's model: a `DraftHead`, a `MedusaModel`, or a `DFlashModel`.

    Raises:
        CheckpointError: its tensors do not fit its configuration, or it does not fit the target.
    """
    checkpoint.check()
    checkpoint.config.check_target(target.config)
    family, config = checkpoint.family, checkpoint.config
    layers = getattr(config, "layers", target.config)
    builder = HeadBuilder(layers, checkpoint.placements, dtype=target.dtype, device=str(target.device))
    by_file = {checkpoint.names[name]: name for name in checkpoint.placements}
    with torch.inference_mode(False):
        for done, (stored, tensor) in enumerate(checkpoint.tensors.read(list(by_file))):
            if progress is not None:
                progress(done, len(by_file), "loading draft weights")
            builder.add(by_file[stored], tensor)
    if progress is not None:
        progress(len(by_file), len(by_file), "loading draft weights")
    return family.build(
        config,
        builder,
        checkpoint.tensors,
        checkpoint.names,
        target,
        max_positions=max_positions,
        compile_region=compile_region,
        **({} if attention_backend is None else {"attention_backend": attention_backend}),
    )
