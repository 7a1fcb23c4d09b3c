"""What a long bench has measured, kept as it goes, so that a killed or interrupted one can be gone on with."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .records import Answer, Pass

SCHEMA = "draftgraph-bench-journal"


class Journal:
    """A file of JSON lines: first what is measured and how, then every pass that ended, one a line."""

    def __init__(self, file: Path, passes: dict[tuple[int, str], Pass]) -> None:
        """Use `open` instead."""
        self._file, self._passes = file, passes

    @classmethod
    def open(cls, file: Path, identity: Mapping[str, Any]) -> Journal:
        """Reads what the file holds, or begins it.

        A last line that was cut off, as a kill while it is written leaves it, is dropped.

        Args:
            file: need not exist.
            identity: what makes passes comparable, in types that JSON has.

        Raises:
            ConfigError: it is no such file, or is of another bench; names what differs.
        """
        head = {"schema": SCHEMA, "identity": identity}
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        whole = text[: text.rfind("\n") + 1]
        lines = whole.splitlines()
        if not lines:
            file.write_text(json.dumps(head) + "\n", encoding="utf-8")
            return cls(file, {})
        try:
            found, *entries = [json.loads(line) for line in lines]
            known = found["schema"] == SCHEMA
            passes = {(int(entry["group"]), entry["method"]): _pass(entry) for entry in entries} if known else {}
        except (ValueError, KeyError, TypeError, RecursionError):
            known = False
        if not known:
            raise ConfigError(f"{str(file)!r} is not what a bench keeps to go on from: name another file, or remove it")
        before, now = found["identity"], json.loads(json.dumps(identity))
        different = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        if different:
            shown = "; ".join(f"{key} was {before.get(key)!r} and is {now.get(key)!r}" for key in different)
            raise ConfigError(f"{str(file)!r} keeps another bench: {shown}")
        if whole != text:
            file.write_text(whole, encoding="utf-8")
        return cls(file, passes)

    def kept(self, group: int, method: str) -> Pass | None:
        """What was measured of a method on a group of prompts, if it was."""
        return self._passes.get((group, method))

    def keep(self, group: int, one: Pass) -> None:
        """Adds a pass, on the disk when this returns; one with a failed answer is left out, to be tried anew."""
        if any(answer.status == "failed" for answer in one.answers):
            return
        answers = [{**answer.to_dict(), "histogram": answer.histogram} for answer in one.answers]
        entry = {"group": group, "method": one.method, "seconds": one.seconds, "answers": answers}
        with self._file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(entry) + "\n")
            out.flush()
            os.fsync(out.fileno())


def _pass(entry: Mapping[str, Any]) -> Pass:
    answers = tuple(_answer(answer) for answer in entry["answers"])
    return Pass(method=entry["method"], answers=answers, seconds=float(entry["seconds"]))


def _answer(fields: Mapping[str, Any]) -> Answer:
    histogram = fields["histogram"]
    return Answer(
        **{
            **fields,
            "token_ids": tuple(fields["token_ids"]),
            "bursts": tuple((when, count) for when, count in fields["bursts"]),
            "histogram": None if histogram is None else tuple(tuple(row) for row in histogram),
        }
    )
