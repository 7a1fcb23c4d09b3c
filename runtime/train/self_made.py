"""Prompts that a chat model makes up itself (Magpie, Xu et al. 2024, arXiv:2406.08464).

The model is given its chat template up to where a user's words begin. What it then writes until it ends the user's
turn is a prompt, of the kind that it was trained to answer. Some beginnings of prompts are given too, so that few
kinds are not all there is.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checks import check_integer
from ..errors import ConfigError, RequestError
from ..progress import ProgressCallback
from ..prompts import render_chat
from ..sampling_params import SamplingParams
from .journal import Journal
from .many_requests import Answers, answers_in_order

if TYPE_CHECKING:
    from ..engine import Engine

OPENINGS = (
    *("",) * 8,
    "Write",
    "Explain",
    "What",
    "How",
    "Describe",
    "Imagine you are",
    "Given",
    "Write a Python function",
    "Solve",
    "Compose",
    "Suppose",
    "Can you",
    "Summarize",
    "Complete the following Python code:\n```python\ndef",
    "Extract",
    "Compare",
)
"""Beginnings of prompts; most often none."""

_LEAST_LETTERS = 10
_BARREN_PASSES = 2
"""Passes over all openings in a row that give nothing new, after which no more is tried."""
_MARKER = "draftgraphmarker"


@dataclass(frozen=True, kw_only=True)
class SelfMadeSettings:
    """How prompts are made up."""

    seed: int = 0
    openings: tuple[str, ...] = OPENINGS
    samples: int = 24
    """Sampled at once from each opening, in each pass."""
    temperature: float = 1.0
    top_k: int = 200
    top_p: float = 0.95
    max_tokens: int = 120
    """What has not ended by then is dropped."""

    def __post_init__(self) -> None:
        check_integer(ConfigError, "seed", self.seed, -(2**31), 2**31 - 1)
        if not self.openings or not all(isinstance(opening, str) for opening in self.openings):
            raise ConfigError(f"openings must be a list of texts that is not empty, got {self.openings!r}")
        self.params(0)

    def params(self, seed: int) -> SamplingParams:
        """For one opening; answer i is sampled with `seed + i`."""
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            max_tokens=self.max_tokens,
            n=self.samples,
            seed=seed,
        )


@dataclass(frozen=True, kw_only=True)
class UserTurn:
    """What a chat template writes around a user's words at the beginning of a chat."""

    before: str
    after: str


def user_turn(tokenizer: Any) -> UserTurn:
    """Finds where a user's words begin and end in a tokenizer's chat template.

    Raises:
        ConfigError: there is no template, or it does not say.
    """
    try:
        text = render_chat([{"role": "user", "content": _MARKER}], tokenizer, begin=True)
    except RequestError as error:
        reason = "" if getattr(tokenizer, "chat_template", None) else ", and this one has none"
        raise ConfigError(
            f"prompts of self:COUNT can be made up only by a target with a chat template{reason or f': {error}'}; name "
            "prompts of your own with --data"
        ) from None
    before, found, after = text.partition(_MARKER)
    if not found or _MARKER in after or not before.strip():
        raise ConfigError(
            "the target cannot make up prompts: its chat template does not write a user's words once, after something "
            f"that says that they begin; of the message {_MARKER!r} it makes {text!r}"
        )
    return UserTurn(before=before, after=after)


def self_made_prompts(
    engine: Callable[[], Engine],
    tokenizer: Any,
    count: int,
    file: Path,
    progress: ProgressCallback,
    settings: SelfMadeSettings | None = None,
    *,
    made_by: Mapping[str, Any],
) -> tuple[str, ...]:
    """Prompts that the target makes up, all different.

    The same target and settings give the same prompts. They are kept in `file` as they come, opening by opening, so
    that a kill costs what the engine was at work on; asking for more prompts later goes on where the file ends.

    Args:
        engine: gives the target's; called only if a prompt is missing.
        tokenizer: the target's.
        count: how many.
        file: JSON lines, made if it is not there.
        progress: told how many there are.
        settings: how; by default as the paper does, with openings besides.
        made_by: what the prompts depend on besides `settings`: what tells the target's weights from others, such as
            `fingerprint` gives, and their type.

    Raises:
        ConfigError: the target has no fitting chat template, runs out of new prompts, or `file` was made by others.
    """
    settings = settings or SelfMadeSettings()
    check_integer(ConfigError, "the number of prompts", count, 1)
    turn = user_turn(tokenizer)
    with Journal(file, "prompts", {**made_by, **asdict(settings)}) as journal:
        made = dict.fromkeys(prompt for entry in journal.entries for prompt in entry["prompts"])
        seen = {prompt.lower() for prompt in made}
        first = len(journal.entries)
        requests = _requests(tokenizer, turn, settings, first)
        groups: Iterable[Answers] = answers_in_order(engine(), requests) if len(made) < count else ()
        for number, group in enumerate(groups, start=first):
            opening = settings.openings[number % len(settings.openings)]
            new = []
            for answer in group:
                prompt = (opening + answer.text).strip()
                ended = answer.finish_reason == "stop" and len(prompt) > _LEAST_LETTERS
                if ended and prompt.lower() not in seen:
                    seen.add(prompt.lower())
                    new.append(prompt)
            journal.add([{"opening": opening, "prompts": new}])
            made.update(dict.fromkeys(new))
            progress(min(len(made), count), count, "making up prompts")
            if len(made) >= count:
                break
            if _barren(journal, len(settings.openings)):
                raise ConfigError(
                    f"the target made up {len(made)} different prompts, and then in {_BARREN_PASSES} passes over all "
                    f"openings no more; {count} were asked for: ask for fewer, or raise the temperature"
                )
    return tuple(made)[:count]


def _requests(
    tokenizer: Any, turn: UserTurn, settings: SelfMadeSettings, first: int
) -> Iterator[tuple[tuple[int, ...], SamplingParams]]:
    """From request `first` on, without end."""
    stop = _end_of_turn(tokenizer, turn)
    for number in itertools.count(first):
        opening = settings.openings[number % len(settings.openings)]
        # The template writes out what tokenizers would put at the beginning.
        ids = tokenizer(turn.before + opening, add_special_tokens=False)["input_ids"]
        # Sample i of a request has its seed + i: no two samples of all requests may share one, or they would be alike.
        params = settings.params(settings.seed * 2**32 + number * settings.samples)
        yield tuple(map(int, ids)), dataclasses.replace(params, **stop)


def _end_of_turn(tokenizer: Any, turn: UserTurn) -> dict[str, Any]:
    """What ends a user's turn besides what ends the model's own: a special token if there is one, else the text."""
    special = set(tokenizer.all_special_ids)
    special |= {token for token, added in getattr(tokenizer, "added_tokens_decoder", {}).items() if added.special}
    ids = tokenizer(turn.after, add_special_tokens=False)["input_ids"]
    end = next((int(token) for token in ids if token in special), None)
    if end is not None:
        return {"stop_token_ids": (end,)}
    return {"stop": (turn.after.strip(),)} if turn.after.strip() else {}


def _barren(journal: Journal, openings: int) -> bool:
    last = journal.entries[-_BARREN_PASSES * openings :]
    return len(last) == _BARREN_PASSES * openings and not any(entry["prompts"] for entry in last)
