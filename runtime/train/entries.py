"""What training data is made of before it becomes token ids: texts, prompts and chats, and where they were found."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...model_zoo.json_text import parse_json
from ..bench.prompt_sets import BUILT_IN, PUBLISHED, load_prompt_set, split_limit
from ..errors import ConfigError
from ..progress import ProgressCallback
from ..prompts import Prompt
from .held_out import HELD_OUT
from .journal import SETTINGS

SELF = "self"
"""`self:COUNT` as the name of data: prompts that the target makes up."""
ACCEPTED = (
    "data is a .txt file or a directory of them, a .jsonl or .jsonl.gz file, NAME or NAME:COUNT of a prompt set "
    f"({', '.join((*BUILT_IN, *(name for name, held in HELD_OUT.items() if held is not None)))}), or {SELF}:COUNT for "
    "prompts that the target makes up"
)
_FILES = (".txt", ".jsonl", ".jsonl.gz")
_PROMPTS = ("prompt", "messages", "prompt_ids")
_FIELDS = {*_PROMPTS, "answer", "token_ids", "finish", "number"}
_LINE = (
    "holds one of 'prompt', a text, 'messages', a list of objects with the texts 'role' and 'content', and "
    "'prompt_ids', a list of token ids; and for what the target has answered already 'answer', a text, or 'token_ids', "
    "with 'finish'"
)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One text, or one prompt with the answer that it may have had already."""

    where: str
    """For messages, such as "line 3 of 'chats.jsonl'"."""
    text: str | None = None
    """Plain text, to be cut into pieces."""
    prompt: Prompt | None = None
    """Text, messages or token ids. Turns of the assistant among the messages are answers."""
    by_user: bool = False
    """Whether a prompt of text is what a user writes, so that a target with a chat template gets it as a chat; else
    it is text to go on with."""
    answer: str | None = None
    token_ids: tuple[int, ...] | None = None
    """The answer as the target wrote it."""
    finished: bool = True
    """Whether the answer came to its end."""


def self_made_count(data: str) -> int | None:
    """COUNT of `self:COUNT`; None for other data.

    Raises:
        ConfigError: it is no count.
    """
    name, colon, count = data.partition(":")
    if name != SELF:
        return None
    if not colon or not count.isascii() or not count.isdigit() or int(count) < 1:
        raise ConfigError(f"{SELF}:COUNT needs how many prompts the target is to make up, as {SELF}:2000; got {data!r}")
    return int(count)


def _set_of(data: str) -> tuple[str, int | None]:
    """The prompt set that data names and how many of its prompts are wanted, of NAME or NAME:COUNT; else as it is."""
    sets = (*BUILT_IN, *PUBLISHED)
    name, count = split_limit(data) if data.partition(":")[0] in sets else (data, None)
    return (name, count) if name in sets else (data, None)


def check_data_name(data: str) -> None:
    """Refuses data that is not there, before anything is loaded.

    Raises:
        ConfigError: there is none of that name, or it is held out for measuring; says what is accepted.
    """
    if self_made_count(data) is not None:
        return
    name, _ = _set_of(data)
    if name in BUILT_IN:
        return
    if name in HELD_OUT:
        if HELD_OUT[name] is None:
            raise ConfigError(
                f"the prompt set {name!r} is held out: what is trained here is measured on all of it, and a head that "
                "has seen it would measure its memory"
            )
        return
    path = Path(data)
    if path.is_dir():
        if not _texts_in(path):
            raise ConfigError(f"the directory {data!r} holds no .txt file; {ACCEPTED}")
    elif not path.exists():
        raise ConfigError(f"there is no data {data!r}: {ACCEPTED}")
    elif not data.endswith(_FILES):
        raise ConfigError(f"{data!r} is neither a .txt nor a .jsonl file; {ACCEPTED}")


def data_digest(data: Sequence[str]) -> str:
    """What tells data from other data without reading it as such: the content of files, the names of all else.

    Raises:
        ConfigError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for name in data:
        path = Path(name)
        known = _set_of(name)[0] in (*BUILT_IN, *PUBLISHED) or self_made_count(name) is not None
        for file in [] if known else _texts_in(path) if path.is_dir() else [path]:
            try:
                with file.open("rb") as content:
                    digest.update(hashlib.file_digest(content, "sha256").digest())
            except OSError as error:
                raise ConfigError(f"{str(file)!r} cannot be read: {error.strerror}") from None
        digest.update(name.encode("utf-8", "surrogateescape") if known else b"")
        digest.update(b"\0")
    return digest.hexdigest()[:16]


def read_entries(data: str, progress: ProgressCallback) -> Iterator[Entry]:
    """All entries of data, in order; `self:COUNT` has none here.

    Raises:
        ConfigError: the data is not there, cannot be read, or a line is malformed; says which.
        FetchError: a published prompt set could not be brought to this machine.
    """
    check_data_name(data)
    path = Path(data)
    name, count = _set_of(data)
    if name in BUILT_IN or name in PUBLISHED:
        yield from _of_prompt_set(name, count, progress)
    elif path.is_dir():
        for file in _texts_in(path):
            yield Entry(where=repr(str(file)), text=_text_of(file))
    elif path.suffix == ".txt":
        yield Entry(where=repr(data), text=_text_of(path))
    else:
        yield from _of_lines(path)


def _of_prompt_set(name: str, count: int | None, progress: ProgressCallback) -> Iterator[Entry]:
    """Those that are not held out, at most so many."""
    for case in load_prompt_set(name, None, progress)[HELD_OUT.get(name) or 0 :][:count]:
        yield Entry(where=f"prompt {case.name!r} of the set {name!r}", prompt=case.prompt)


def _texts_in(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*.txt") if path.is_file())


def _text_of(file: Path) -> str:
    try:
        content = file.read_bytes()
        return (gzip.decompress(content) if file.suffix == ".gz" else content).decode("utf-8")
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error  # of a file that is no gzip, or is cut short
        raise ConfigError(f"{str(file)!r} cannot be read: {reason}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{str(file)!r} is not UTF-8 text: byte {error.object[error.start]:#04x} at position {error.start}"
        ) from None


def _of_lines(file: Path) -> Iterator[Entry]:
    # Not splitlines: JSON strings may hold U+2028, which it takes for the end of a line.
    for number, line in enumerate(_text_of(file).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"line {number} of {str(file)!r}"
        try:
            value = parse_json(line)
        except ValueError as error:
            raise ConfigError(f"{where} is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise ConfigError(f"{where} is not a JSON object, but {_short(value)}; a line {_LINE}")
        # Lines of answers that were written here: the first, and those to prompts whose logits were not finite.
        if set(value) != {SETTINGS} and value.get("finish") != "error":
            yield _of_line(where, value)


def _of_line(where: str, line: Mapping[str, Any]) -> Entry:
    unknown = sorted(set(line) - _FIELDS)
    if unknown or sum(key in line for key in _PROMPTS) != 1:
        found = ", ".join(map(repr, line)) or "nothing"
        raise ConfigError(f"{where} holds {found}; a line {_LINE}")
    if "prompt" in line and not (isinstance(line["prompt"], str) and line["prompt"].strip()):
        raise ConfigError(f"{where}: 'prompt' must be a text that is not empty, got {_short(line['prompt'])}")
    messages = line.get("messages", [{"role": "user", "content": ""}])
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise ConfigError(
            f"{where}: 'messages' must be a list of objects with the texts 'role' and 'content', got {_short(messages)}"
        )
    if not isinstance(line.get("answer", ""), str):
        raise ConfigError(f"{where}: 'answer' must be a text, got {_short(line['answer'])}")
    for key in ("prompt_ids", "token_ids"):
        ids = line.get(key, [0])
        if not isinstance(ids, list) or not ids or any(type(token) is not int or token < 0 for token in ids):
            raise ConfigError(f"{where}: {key!r} must be a list of token ids that is not empty, got {_short(ids)}")
    finish = line.get("finish", "stop")
    if finish not in ("stop", "length"):
        raise ConfigError(f"{where}: 'finish' must be 'stop' or 'length', got {_short(finish)}")
    return Entry(
        where=where,
        prompt=next(line[key] for key in _PROMPTS if key in line),
        by_user="prompt" in line,
        answer=line.get("answer"),
        token_ids=tuple(line["token_ids"]) if "token_ids" in line else None,
        finished=finish == "stop",
    )


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:80]}..."
