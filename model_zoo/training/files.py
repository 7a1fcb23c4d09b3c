"""Files that are either whole or absent."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replace_file(path: Path, need: int | None = None) -> Iterator[Path]:
    """Gives a path beside it to write to, and puts that in its place once the block has ended well.

    Args:
        path: of the file.
        need: bytes that it takes, for the message of a full disk.

    Raises:
        OSError: it cannot be written.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            yield beside
            with beside.open("rb") as file:
                os.fsync(file.fileno())
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:
        cause = _disk_error(error)
        if cause is None:
            raise
        if cause.errno not in _FULL or need is None:
            raise cause from None
        free = shutil.disk_usage(path.parent).free
        raise OSError(cause.errno, f"{cause.strerror}: it needs {need} bytes, and {free} are free") from None


def remove_unfinished(directory: Path) -> None:
    """Removes what `replace_file` was writing in a directory when its process was killed.

    No other process may be writing there.
    """
    for left in directory.glob(".*.part"):
        if _UNFINISHED.fullmatch(left.name):
            left.unlink(missing_ok=True)


_UNFINISHED = re.compile(r"\..+\.\d+\.part")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""There is no room, of the disk's, of the user's, or in one file."""


def _disk_error(error: BaseException) -> OSError | None:
    """What the disk said; torch's writer hides it behind an error of its own."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found
