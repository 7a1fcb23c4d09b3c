"""A file of JSON lines that long work adds to as it goes, and from which it goes on after a kill."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import filelock

from ...model_zoo.json_text import parse_json
from ..errors import ConfigError
from ..output_files import check_output_file

SETTINGS = "settings"
"""The only key of a journal's first line."""


class Journal:
    """Its first line says by what settings it is made, each other one is an entry.

    Entries are on the disk when `add` returns. A kill in the middle of a write leaves a line without its end, which
    is dropped when the journal is opened again. One process at a time may have it open.
    """

    def __init__(self, file: Path, what: str, settings: Mapping[str, Any]) -> None:
        """Opens a journal, or makes one.

        Args:
            file: need not exist, its directory is made.
            what: what messages call the entries, such as "answers".
            settings: all that decides what is written, in types that JSON has.

        Raises:
            ConfigError: the file cannot be used, is no journal, was made by other settings (names what differs), or
                another process has it open.
        """
        self.file, self._what = file, what
        self.entries: list[dict[str, Any]] = []
        """All entries, in the order in which they were added."""
        given: dict[str, Any] = json.loads(json.dumps(settings))  # as it is read back
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the directory {str(file.parent)!r} cannot be made: {error.strerror}") from None
        check_output_file(f"the file of {what}", file)
        self._lock = filelock.FileLock(f"{file}.lock")
        try:
            self._lock.acquire(timeout=0)
        except filelock.Timeout:
            raise ConfigError(f"another process is writing the {what} in {str(file)!r}") from None
        try:
            # Unbuffered: what a full disk refuses must not be written when the file is closed.
            self._out = file.open("r+b" if file.exists() else "w+b", buffering=0)
            try:
                self._resume(given)
            except BaseException:
                self._out.close()
                raise
        except BaseException:
            self._lock.release()
            raise

    def add(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Adds entries and waits until they are on the disk.

        Raises:
            ConfigError: the disk is full or fails; what was written before is kept.
        """
        added = [dict(entry) for entry in entries]
        self._write(added)
        self.entries += added

    def close(self) -> None:
        """Lets go of the file."""
        self._out.close()
        self._lock.release()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _resume(self, settings: dict[str, Any]) -> None:
        data = self._out.readall()
        whole = data.rfind(b"\n") + 1
        lines = [line for line in data[:whole].split(b"\n") if line.strip()]
        values = [self._value(number, line) for number, line in enumerate(lines, start=1)]
        if data[:whole].strip() or not _may_be_begun(data):
            self._check(values[0] if values else None, settings)
        self._out.seek(whole)
        self._out.truncate()
        self.entries = values[1:]
        if not values:
            self._write([{SETTINGS: settings}])

    def _value(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            value = parse_json(line.decode("utf-8"))
        except ValueError as error:
            raise ConfigError(
                f"line {number} of {str(self.file)!r} is damaged ({error}): repair or remove the file"
            ) from None
        if not isinstance(value, dict):
            raise ConfigError(f"line {number} of {str(self.file)!r} is not a JSON object: repair or remove the file")
        return value

    def _check(self, first: dict[str, Any] | None, settings: dict[str, Any]) -> None:
        there = first.get(SETTINGS) if first is not None and set(first) == {SETTINGS} else None
        if not isinstance(there, dict):
            raise ConfigError(
                f"{str(self.file)!r} does not begin with the settings that its {self._what} were made by, so that "
                "they cannot be told to fit: remove it, or name another directory"
            )
        differing = [
            f"{key} is {_short(there.get(key))} there and {_short(settings.get(key))} now"
            for key in sorted(there.keys() | settings.keys())
            if there.get(key) != settings.get(key)
        ]
        if differing:
            raise ConfigError(
                f"the {self._what} in {str(self.file)!r} were made by other settings ({'; '.join(differing)}): go on "
                "with those, remove the file, or name another directory"
            )

    def _write(self, values: list[dict[str, Any]]) -> None:
        text = "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values)
        start = self._out.tell()
        rest = memoryview(text.encode("utf-8", errors="backslashreplace"))
        try:
            while rest:
                rest = rest[self._out.write(rest) or 0 :]
            os.fsync(self._out.fileno())
        except OSError as error:
            self._out.seek(start)
            self._out.truncate()
            raise ConfigError(
                f"the {self._what} could not be written to {str(self.file)!r}: {error.strerror}; what was written "
                "before is kept, make room and start again"
            ) from None


def _may_be_begun(data: bytes) -> bool:
    """Whether a file without a whole line is empty, or a first line whose writing was cut short."""
    begin = f'{{"{SETTINGS}"'.encode()
    return data.startswith(begin) or begin.startswith(data)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:24]}..."
