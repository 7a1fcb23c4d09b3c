"""From `--data` to token ids: prompts for the target to answer, or examples that are answered already."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from ...model_zoo.training.examples import Example
from ..checks import check_integer
from ..errors import ConfigError, RequestError
from ..progress import ProgressCallback
from ..prompts import Message, Prompt
from .entries import ACCEPTED, Entry, read_entries, self_made_count
from .target_text import EmptyAnswerError, TargetText

Tokens = tuple[int, ...]
_Item = TypeVar("_Item", bound=Hashable)
_PORTION = 1 << 16
"""Characters of plain text that are encoded at a time."""


@dataclass(frozen=True, kw_only=True)
class Loaded(Generic[_Item]):
    """What data gave, and what of it was left out."""

    items: tuple[_Item, ...]
    duplicates: int
    """Dropped because they were there before."""
    too_long: int
    """Dropped because nothing of the answer lies within max_length, or no room is left for one."""
    empty: int
    """Dropped because the answer has no text."""
    cut: int
    """Examples of which only the beginning is kept."""

    def summary(self) -> str:
        """One line for the user."""
        left_out = [
            f"{count} {what}"
            for count, what in (
                (self.duplicates, "duplicates dropped"),
                (self.too_long, "dropped as too long"),
                (self.empty, "dropped as their answers are empty"),
                (self.cut, "cut to max_length"),
            )
            if count
        ]
        return ", ".join([f"{len(self.items)} used", *left_out])


def load_prompts(data: str, target: TargetText, max_length: int, progress: ProgressCallback) -> Loaded[Tokens]:
    """Prompts for the target to answer; answers that the data has are not used.

    Plain text is cut into prompts of half of `max_length`, for the target to go on with. Of a chat with turns of the
    assistant, the prompt is what comes before the first.

    Args:
        data: what `--data` names, except `self:COUNT`, for which there is `self_made_prompts`.
        target: how the target reads text.
        max_length: of a prompt and its answer together, in tokens, at least 2.
        progress: told about a download.

    Raises:
        ConfigError: the data is not there, malformed, or gives no prompt; says what was found.
        FetchError: a published prompt set could not be brought to this machine.
    """
    check_integer(ConfigError, "max_length", max_length, 2)

    def of_entry(entry: Entry) -> Iterator[Tokens]:
        if entry.text is not None:
            yield from _pieces(entry.text, target, max(1, max_length // 2))
        else:
            yield target.encode_prompt(_prompt_of(entry, target))

    def fit(prompt: Tokens) -> Tokens | None:
        return prompt if len(prompt) < max_length else None

    return _load(data, "prompts", max_length, read_entries(_not_self_made(data), progress), of_entry, fit)


def load_examples(data: str, target: TargetText, max_length: int, progress: ProgressCallback) -> Loaded[Example]:
    """Examples from data that is answered already: texts, chats with turns of the assistant, prompts with answers.

    Args:
        data: what `--data` names, except `self:COUNT`.
        target: how the target reads text.
        max_length: of an example in tokens, at least 2; a longer one is cut.
        progress: told about a download.

    Raises:
        ConfigError: the data is not there, malformed, made for another target, or holds a prompt without an answer.
        FetchError: a published prompt set could not be brought to this machine.
    """
    check_integer(ConfigError, "max_length", max_length, 2)

    def of_entry(entry: Entry) -> Iterator[Example]:
        if entry.text is not None:
            yield from (Example.of_text(piece) for piece in _pieces(entry.text, target, max_length) if len(piece) > 1)
        else:
            yield _example_of(entry, target)

    def fit(example: Example) -> Example | None:
        return example.cut(max_length)

    return _load(data, "examples", max_length, read_entries(_not_self_made(data), progress), of_entry, fit)


def _load(
    data: str,
    what: str,
    max_length: int,
    entries: Iterable[Entry],
    of_entry: Callable[[Entry], Iterator[_Item]],
    fit: Callable[[_Item], _Item | None],
) -> Loaded[_Item]:
    seen: dict[_Item, None] = {}
    duplicates = too_long = empty = cut = found = characters = 0
    for entry in entries:
        found += 1
        characters += len(entry.text or "")
        try:
            items = list(of_entry(entry))
        except EmptyAnswerError:
            empty += 1
            continue
        except RequestError as error:
            raise ConfigError(f"{entry.where}: {error}") from None
        for item in items:
            fitting = fit(item)
            if fitting is None:
                too_long += 1
            elif fitting in seen:
                duplicates += 1
            else:
                cut += fitting is not item
                seen[fitting] = None
    if not seen:
        if too_long:
            raise ConfigError(
                f"all {too_long} {what} of {data!r} are too long: a max_length of {max_length} tokens leaves no room "
                "for an answer; raise it"
            )
        if empty:
            raise ConfigError(f"{data!r} holds no usable text: the answers of {empty} of its {found} entries are empty")
        texts = f" with {characters} characters of text" if characters else ""
        raise ConfigError(f"{data!r} holds no usable text: {found} entries{texts} were found; {ACCEPTED}")
    return Loaded(items=tuple(seen), duplicates=duplicates, too_long=too_long, empty=empty, cut=cut)


def _not_self_made(data: str) -> str:
    if self_made_count(data) is not None:
        raise ConfigError(f"the prompts of {data!r} are made up by the target, which must answer them: --regenerate")
    return data


def _pieces(text: str, target: TargetText, length: int) -> Iterator[Tokens]:
    """Plain text in pieces of at most `length` tokens, each after what the tokenizer puts before a text."""
    start = target.text_start() if length > 1 else ()
    tokens = itertools.chain.from_iterable(map(target.encode_text, _portions(text)))
    while piece := tuple(itertools.islice(tokens, length - len(start))):
        yield (*start, *piece)


def _portions(text: str) -> Iterator[str]:
    """The text in parts that end with a line, where lines are not too long, to be encoded one by one."""
    if not text.strip():
        return
    place = 0
    while place < len(text):
        end = min(place + _PORTION, len(text))
        if end < len(text):
            end = max(text.rfind("\n", place, end) + 1, text.rfind(" ", place, end)) or end
            end = end if end > place else min(place + _PORTION, len(text))
        yield text[place:end]
        place = end


def _prompt_of(entry: Entry, target: TargetText) -> Prompt:
    """The prompt in the form that the target is to get, up to the first turn of the assistant."""
    prompt = entry.prompt
    assert prompt is not None, "an entry without text has a prompt"
    if isinstance(prompt, str):
        return target.chat_or_text(prompt) if entry.by_user else prompt
    if not _has_turns(prompt):
        return prompt
    before = list(itertools.takewhile(lambda message: message["role"] != "assistant", _messages(prompt)))
    if not before:
        raise RequestError("the chat begins with a turn of the assistant, which answers nothing")
    return before


def _example_of(entry: Entry, target: TargetText) -> Example:
    assert entry.prompt is not None, "an entry without text has a prompt"
    if _has_turns(entry.prompt):
        if entry.answer is not None or entry.token_ids is not None:
            raise RequestError("with 'answer' or 'token_ids', 'messages' must hold no turn of the assistant")
        return target.chat(_messages(entry.prompt))
    prompt = _prompt_of(entry, target)
    if entry.token_ids is not None:
        return Example.answered(target.encode_prompt(prompt), _answer_ids(entry, target))
    if entry.answer is not None:
        return target.answered(prompt, entry.answer)
    raise RequestError("there is a prompt and no answer: let the target answer it (--regenerate)")


def _has_turns(prompt: Prompt) -> bool:
    return any(message.get("role") == "assistant" for message in _messages(prompt))


def _messages(prompt: Prompt) -> list[Message]:
    """The messages of a chat; of another prompt, none."""
    return [part for part in prompt if isinstance(part, Mapping)]


def _answer_ids(entry: Entry, target: TargetText) -> Tokens:
    """The target's own tokens, closed by one that ends an answer if it came to its end."""
    ids = entry.token_ids or ()
    largest = max(ids)
    if largest >= target.vocab_size:
        raise RequestError(
            f"'token_ids' holds {largest}, but the target's vocabulary has {target.vocab_size} tokens: another target "
            "answered this; answer it anew (--regenerate)"
        )
    if entry.answer is not None:
        written = _letters(target.tokenizer.decode(list(ids), skip_special_tokens=True))
        # A text may be cut before a stop string, and an answer before the end of a character.
        if not written.startswith(_letters(entry.answer).rstrip("\ufffd")):
            raise RequestError(
                f"'token_ids' are not the tokens of 'answer' in the target's vocabulary, where they read "
                f"{written[:40]!r}: another target answered this; answer it anew (--regenerate)"
            )
    ended = not entry.finished or not target.end_ids or ids[-1] in target.end_ids
    return ids if ended else (*ids, target.end_ids[0])


def _letters(text: str) -> str:
    """Without white space, which tokenizers strip and add."""
    return "".join(unicodedata.normalize("NFC", text).split())
