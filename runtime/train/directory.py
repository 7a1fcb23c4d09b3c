"""The directory that a head is trained into."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import filelock

from ...model_zoo.training.checkpoints import file_in
from ...model_zoo.training.export import WEIGHTS_NAME
from ...model_zoo.training.files import remove_unfinished
from ...model_zoo.training.loop import STATE_NAME
from ..errors import ConfigError

RUN_NAME = "run.json"
RESULT_NAME = "result.json"


def check_directory(out: Path) -> None:
    """Refuses a directory that cannot take a run, before anything is loaded.

    Raises:
        ConfigError: it is no directory, takes no file, or holds a model that no run there made.
    """
    check_takes_files("--out", out)
    begun = (out / STATE_NAME / RUN_NAME).exists()
    found = [name for name in ("config.json", "model.safetensors") if (out / name).exists()]
    if found and not begun:
        raise ConfigError(
            f"--out {str(out)!r} holds {' and '.join(found)} that no training run there made, and that would be "
            "replaced: name another directory"
        )


def check_takes_files(flag: str, directory: Path) -> None:
    """Refuses a directory that could not be made, or written to, before anything is loaded. It need not exist.

    Args:
        flag: what messages call it.
        directory: not touched.

    Raises:
        ConfigError: it, or what is to hold it, is a file or takes no file.
    """
    try:
        there = next(place for place in (directory, *directory.absolute().parents) if place.exists())
        if there == directory and not there.is_dir():
            raise ConfigError(f"{flag} {str(directory)!r} is a file; a directory is expected")
        if not there.is_dir():
            raise ConfigError(f"{flag} {str(directory)!r} cannot be made: {str(there)!r} is a file")
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ConfigError(f"{flag} {str(directory)!r} cannot be written: {error.strerror}") from None


def check_room(out: Path, parameters: int, learning: int) -> None:
    """Refuses a disk on which the head and its checkpoints could not be replaced by later ones.

    Args:
        out: of the run.
        parameters: of the head.
        learning: of them, those that learn.

    Raises:
        ConfigError: there is no room; says how much is needed and how much is free.
    """
    checkpoint, head = 4 * (parameters + learning), 2 * parameters  # with a momentum, in float32; in bfloat16
    need = max(2 * checkpoint + head, checkpoint + 2 * head)
    there = [file_in(out / STATE_NAME), out / WEIGHTS_NAME]
    need -= sum(file.stat().st_size for file in there if file.is_file())
    free = shutil.disk_usage(next(place for place in (out, *out.absolute().parents) if place.is_dir())).free
    if free < need:
        raise ConfigError(
            f"--out {str(out)!r} needs {need:,} bytes for the head and its checkpoints, one beside the one before, and "
            f"{free:,} are free: make room, or name a directory elsewhere"
        )


@contextlib.contextmanager
def one_run_at_a_time(out: Path) -> Iterator[None]:
    """Keeps a second run out of a directory, and removes what a killed one was writing there.

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
        for place in (out, state):
            remove_unfinished(place)
        yield
    finally:
        lock.release()
