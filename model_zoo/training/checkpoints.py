"""A training run on disk, so that it can be killed at any moment."""

from __future__ import annotations

import json
import math
import pickle
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from ..safetensors_files import read_json
from .files import replace_file

_NAME, _IDENTITY = "checkpoint.pt", "run.json"
_CALLED = "called"
"""In the noted identity, what the user called some of its values."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """How far a run is. What comes next follows from it and the seed."""

    epoch: int = 0
    batch: int = 0
    """Batches of this epoch that were trained on."""
    step: int = 0
    """Updates of the weights."""
    tokens: int = 0
    """Tokens that were trained on."""
    seconds: float = 0.0
    """Time that was spent."""
    best: float = 0.0
    """The best acceptance length on the held-out texts."""
    best_loss: float = math.inf
    """The loss there; the lower one is better where lengths are equal."""
    stale: int = 0
    """Evaluations since it was reached."""


@dataclass(frozen=True)
class Difference:
    """One value in which two runs differ."""

    name: str
    was: Any
    now: Any
    only: str | None = None
    """"was" or "now" where only that run has a value of this name."""
    names: tuple[str | None, str | None] = (None, None)
    """What the user called it then and now, where that was noted."""

    def text(self) -> str:
        """For people, by its own name."""
        return f"{self.name} was {self.was!r} and is {self.now!r}"


def check_identity(
    directory: Path,
    identity: Mapping[str, Any],
    *,
    partly: bool = False,
    names: Mapping[str, str] | None = None,
    describe: Callable[[Difference], str] = Difference.text,
) -> None:
    """Compares what a run is with what was begun in its directory, and notes it if nothing was.

    Args:
        directory: of the run's state; made if needed.
        identity: plain values by name, whatever the result depends on.
        partly: only these values are known yet: they are compared, and nothing is noted.
        names: what the user called some of the values, for messages; noted, and not compared.
        describe: how the message tells a difference.

    Raises:
        CheckpointError: another run was begun there; the message has every difference.
    """
    path, names = directory / _IDENTITY, names or {}
    plain = json.loads(json.dumps(identity))
    if not path.exists():
        if partly:
            return
        directory.mkdir(parents=True, exist_ok=True)
        with replace_file(path) as part:
            part.write_text(json.dumps({**plain, _CALLED: dict(names)}, indent=2) + "\n", encoding="utf-8")
        return
    try:
        found = read_json(path)
        called = found.pop(_CALLED, {})
        if not isinstance(called, dict):
            raise CheckpointError(f"{_CALLED!r} in it is no JSON object")
    except CheckpointError as error:
        raise CheckpointError(f"{path} is damaged ({error}): remove {directory} to begin anew") from None
    different = [
        Difference(
            name,
            found.get(name),
            plain.get(name),
            None if name in found and name in plain else "was" if name in found else "now",
            (called.get(name), names.get(name)),
        )
        for name in sorted(plain if partly else {*found, *plain})
        if found.get(name) != plain.get(name)
    ]
    if different:
        raise CheckpointError(
            f"{directory} holds a run of another kind: {'; '.join(map(describe, different))}; ask for the same, or "
            "train into another directory"
        )


def save(directory: Path, model: Mapping[str, Any], optimizer: Mapping[str, Any], position: Position) -> None:
    """Puts a checkpoint in the place of the one before, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    content = {"model": dict(model), "optimizer": dict(optimizer), "position": asdict(position)}
    # A file of Python's own, so that a full disk is told as such.
    with replace_file(directory / _NAME, _tensor_bytes(content)) as part, part.open("wb") as file:
        torch.save(content, file)


def file_in(directory: Path) -> Path:
    """The checkpoint of a run, which need not be there."""
    return directory / _NAME


def exists(directory: Path) -> bool:
    """Whether something was saved."""
    return file_in(directory).exists()


def check(directory: Path) -> None:
    """Compares what was saved with its checksums.

    Raises:
        CheckpointError: it is damaged.
    """
    path = file_in(directory)
    if not path.exists():
        return
    try:
        with zipfile.ZipFile(path) as content:  # which is what torch writes
            wrong = content.testzip()
    except Exception as error:  # what is damaged can look encrypted, compressed in an unknown way, or anything else
        raise _damaged(path, str(error)) from None
    if wrong is not None:
        raise _damaged(path, f"{wrong} in it has another checksum")


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged ({' '.join(reason.split())[:80]}): remove it to begin anew")


def _tensor_bytes(value: Any) -> int:
    """Of all tensors in it, which is about what it takes on disk."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return sum(map(_tensor_bytes, parts))


def load(directory: Path) -> tuple[dict[str, Any], dict[str, Any], Position] | None:
    """What was saved last: model, optimiser and position; None where nothing was.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = file_in(directory)
    if not path.exists():
        return None
    check(directory)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        return content["model"], content["optimizer"], Position(**content["position"])
    except (pickle.UnpicklingError, RuntimeError, KeyError, TypeError, EOFError, OSError) as error:
        raise _damaged(path, str(error)) from None
