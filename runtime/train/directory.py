"""The directory that a head is trained into."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import filelock

from ...model_zoo.training.loop import STATE_NAME
from ..errors import ConfigError

RUN_NAME = "run.json"
RESULT_NAME = "result.json"


def check_directory(out: Path) -> None:
    """Refuses a directory that cannot take a run, before anything is loaded.

    Raises:
        ConfigError: it is no directory, takes no file, or holds a model that no run there made.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {str(out)!r} is a file; a directory is expected")
    parent = next(place for place in (out, *out.resolve().parents) if place.is_dir())
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"--out {str(out)!r} cannot be written: {str(parent)!r} takes no file: {error.strerror}"
        ) from None
    begun = (out / STATE_NAME / RUN_NAME).exists()
    found = [name for name in ("config.json", "model.safetensors") if (out / name).exists()]
    if found and not begun:
        raise ConfigError(
            f"--out {str(out)!r} holds {' and '.join(found)} that no training run there made, and that would be "
            "replaced: name another directory"
        )


@contextlib.contextmanager
def one_run_at_a_time(out: Path) -> Iterator[None]:
    """Keeps a second run out of a directory.

    Raises:
        ConfigError: there is one.
    """
    state = out / STATE_NAME
    try:
        state.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the directory {str(state)!r} cannot be made: {error.strerror}") from None
    lock = filelock.FileLock(state / "lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise ConfigError(f"another process is training into {str(out)!r}") from None
    try:
        yield
    finally:
        lock.release()
