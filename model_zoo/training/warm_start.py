"""Begins a head at one that was exported before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..draft_checkpoint import open_draft
from ..errors import CheckpointError, TrainingConfigError, UnsupportedModelError
from ..safetensors_files import read_header
from .export import WEIGHTS_NAME
from .trainee import Trainee


@dataclass(frozen=True)
class WarmStart:
    """What was taken over."""

    taken: tuple[str, ...]
    """Tensors that begin at those of the other head."""
    left: tuple[str, ...]
    """Tensors of the new head that begin as usual."""


def check_warm_start(planned: Trainee, directory: Path) -> None:
    """Looks at a head to begin with before anything is loaded: its config and the names and shapes of its tensors.

    Args:
        planned: the new head, with or without weights.
        directory: of an exported head.

    Raises:
        TrainingConfigError: it is no draft head, cannot be read, or nothing fits.
    """
    try:
        open_draft(directory)
        found = {name: tuple(tensor.shape) for name, tensor in read_header(directory / WEIGHTS_NAME).items()}
    except (CheckpointError, UnsupportedModelError) as error:
        raise TrainingConfigError(f"{str(directory)!r} is no head to begin with: {error}") from None
    own = planned.state_dict()
    if not any(found.get(name) == tuple(tensor.shape) for name, tensor in own.items()):
        raise _nothing_fits(directory, found, own)


@torch.no_grad()
def warm_start(trainee: Trainee, directory: Path) -> WarmStart:
    """Copies the tensors whose names and shapes match.

    Of a head that drafts other tokens, rows that stand for tokens are taken for those that both draft.

    Args:
        trainee: changed.
        directory: of an exported head.

    Raises:
        TrainingConfigError: it cannot be read, or nothing fits.
    """
    file = directory / WEIGHTS_NAME
    try:
        found = load_file(file)
    except (OSError, SafetensorError) as error:
        raise TrainingConfigError(f"the head to begin with, {str(file)!r}, cannot be read: {error}") from None
    own, exported = trainee.state_dict(), trainee.export_tensors()
    mine, theirs = _drafted(exported), _drafted(found)
    same_tokens = (mine is None and theirs is None) or (
        mine is not None and theirs is not None and torch.equal(mine, theirs)
    )
    taken = []
    for name, tensor in own.items():
        source = found.get(name)
        if source is None or not source.is_floating_point():
            continue
        if not same_tokens and mine is not None and tensor.shape[0] == len(mine):
            if theirs is None or source.shape != (len(theirs), *tensor.shape[1:]):
                continue
            to, of = _common(mine, theirs)
            tensor[to] = source[of].to(tensor)
        elif source.shape == tensor.shape:
            tensor.copy_(source.to(tensor.dtype))
        else:
            continue
        taken.append(name)
    if not taken:
        raise _nothing_fits(directory, found, own)
    return WarmStart(tuple(taken), tuple(name for name in own if name not in taken))


def _drafted(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """int64, the target's ids of the tokens that a head drafts; None: of all."""
    if "d2t" in tensors:
        return tensors["d2t"].cpu() + torch.arange(len(tensors["d2t"]))
    return tensors.get("token_map")


def _common(mine: torch.Tensor, theirs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Places in two lists of different tokens, of those that both have."""
    place = torch.full((int(max(mine.max(), theirs.max())) + 1,), -1)
    place[theirs] = torch.arange(len(theirs))
    of = place[mine]
    return (of >= 0).nonzero()[:, 0], of[of >= 0]


def _nothing_fits(directory: Path, found: Mapping[str, Any], own: Mapping[str, Any]) -> TrainingConfigError:
    return TrainingConfigError(
        f"nothing of the head in {str(directory)!r} fits this one: it has {_some(found)}, and this one {_some(own)}"
    )


def _some(tensors: Mapping[str, Any]) -> str:
    """Some names, with shapes."""
    shapes = {name: tuple(getattr(tensor, "shape", tensor)) for name, tensor in tensors.items()}
    shown = [f"{name} {list(shape)}" for name, shape in sorted(shapes.items()) if len(shape) > 1][:3]
    return ", ".join(shown) + (f" and {len(shapes) - len(shown)} more" if len(shapes) > len(shown) else "")
