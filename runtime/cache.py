"""The user's cache directory: where it is, whether it can be written to, and entries, whole or absent."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock

from .errors import FetchError

logger = logging.getLogger(__name__)

ENVIRONMENT_VARIABLE = "DRAFTGRAPH_CACHE"
NOTE_NAME = "draftgraph.json"
"""The file in a cached model that says where it came from and how long its files are."""


def cache_directory() -> Path:
    """`$DRAFTGRAPH_CACHE`, or the user's cache directory; it need not exist."""
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    if named:
        return Path(named).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("draftgraph"))


def device_rates_directory() -> Path:
    """Where what devices were measured to reach is kept, for all commands alike; it need not exist."""
    return cache_directory() / "device-rates"


def entry_path(key: str) -> Path:
    """The directory of the cached model `key`; it need not exist."""
    return cache_directory() / "models" / key


def read_note(directory: Path) -> dict[str, Any] | None:
    """The note of a cached model, or None for a directory that has none or a broken one."""
    try:
        note = json.loads((directory / NOTE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return note if isinstance(note, dict) else None


def complete_entry(key: str) -> Path | None:
    """The cached model `key`, or None if it is absent or a file of it is missing or has another length."""
    directory = entry_path(key)
    note = read_note(directory)
    if note is None:
        return None
    for name, size in note.get("files", {}).items():
        file = directory / name
        if not file.is_file() or file.stat().st_size != size:
            logger.warning("the cached file %s is missing or damaged: fetching the model again", file)
            return None
    return directory


@contextlib.contextmanager
def new_entry(key: str, *, need_bytes: int, note: Mapping[str, Any]) -> Iterator[tuple[Path, Path] | None]:
    """Makes the cached model `key`, so that it is either whole or absent whatever happens.

    Gives two empty directories: one for the model's files, which becomes the entry when the block ends, and
    one for anything else, which is removed. Gives None when another process made the entry meanwhile.

    Args:
        key: name of the entry.
        need_bytes: room that the block needs.
        note: what to write about the entry, besides the lengths of its files.

    Raises:
        FetchError: the cache cannot be written to or has not enough room, before or during the block.
    """
    root = cache_directory()
    check_writable(root)
    with _locked(root, key):
        if complete_entry(key) is not None:
            yield None
            return
        staging = root / "staging" / key
        try:
            # Leftovers of a process that was killed: nobody else is at work here under the lock.
            shutil.rmtree(staging, ignore_errors=True)
            check_room(root, need_bytes)
            model, scratch = staging / "model", staging / "scratch"
            model.mkdir(parents=True)
            scratch.mkdir()
            yield model, scratch
            files = {path.name: path.stat().st_size for path in sorted(model.iterdir()) if path.is_file()}
            text = json.dumps({**note, "files": files}, indent=2) + "\n"
            (model / NOTE_NAME).write_text(text, encoding="utf-8")
            final = entry_path(key)
            final.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(final, ignore_errors=True)
            model.rename(final)
        except OSError as error:
            raise FetchError(f"cannot write {key!r} to the cache {root}: {error.strerror or error}") from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def check_writable(root: Path) -> None:
    """Checks that files can be made in the cache, and makes it if needed.

    Raises:
        FetchError: they cannot.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        raise FetchError(
            f"the cache directory {root} cannot be written to ({error.strerror or error}): set "
            f"{ENVIRONMENT_VARIABLE} to a directory that can"
        ) from error


def check_room(root: Path, need_bytes: int) -> None:
    """Checks that the cache's file system has `need_bytes` free.

    Raises:
        FetchError: it has not.
    """
    free = shutil.disk_usage(root).free
    if free < need_bytes:
        raise FetchError(
            f"the cache directory {root} has {free / 1e6:.0f} MB free, and {need_bytes / 1e6:.0f} MB are "
            f"needed: make room, or set {ENVIRONMENT_VARIABLE} to a directory elsewhere"
        )


@contextlib.contextmanager
def _locked(root: Path, key: str) -> Iterator[None]:
    lock = filelock.FileLock(root / f"{key}.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        logger.warning("another process is fetching %s: waiting for it", key)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
