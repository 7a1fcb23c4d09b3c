"""Files that a command writes at its end, refused at its beginning where they could not be written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from .errors import ConfigError

_ERRORS = "backslashreplace"
"""A name that is no text, as of a file from another system, must not cost all that was measured; JSON reads it back."""


def check_output_file(name: str, file: Path) -> None:
    """Refuses a file that could not be written, before minutes are spent on what it is to hold.

    Args:
        name: what messages call it, such as "the JSON file".
        file: to be written later. It need not exist, and is not touched.

    Raises:
        ConfigError: it is a directory, or its directory is missing or takes no file.
    """
    if file.is_dir():
        raise ConfigError(f"{name} {str(file)!r} is a directory; the path of a file is expected")
    if _in_place(file):
        if not os.access(file, os.W_OK):
            raise ConfigError(f"{name} {str(file)!r} cannot be written: permission denied")
        return
    directory = file.resolve().parent
    if not directory.is_dir():
        raise ConfigError(f"{name} {str(file)!r} cannot be written: there is no directory {str(directory)!r}")
    try:
        # Asking for permissions is not enough: a file system may take no files from anyone.
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(
            f"{name} {str(file)!r} cannot be written: {str(directory)!r} takes no file: {error.strerror}"
        ) from None


def write_output_file(file: Path, text: str) -> None:
    """Replaces the file's content whole or not at all; a pipe or a device is written to as it is.

    Raises:
        OSError: it cannot be written.
    """
    if _in_place(file):
        with file.open("w", encoding="utf-8", errors=_ERRORS) as out:
            out.write(text)
        return
    target = file.resolve()  # a link stays one
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors=_ERRORS) as out:
            out.write(text)
        Path(name).chmod(0o666 & ~_umask())
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _in_place(file: Path) -> bool:
    """Whether it is there and no ordinary file: putting another in its place would end what it stands for."""
    return file.exists() and not file.is_file()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
