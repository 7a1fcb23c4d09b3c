"""What a draft head is trained on: token ids, and which of them the target itself wrote."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import TrainingDataError

Span = tuple[int, int]
"""Positions from the first on, up to and without the second."""


@dataclass(frozen=True)
class Example:
    """One chat or text, whole.

    Raises:
        TrainingDataError: fewer than 2 tokens, a token that is no id, no span, or spans that are empty, out of order,
            beyond the tokens, or hold position 0, which nothing precedes.
    """

    tokens: tuple[int, ...]
    answer: tuple[Span, ...]
    """Spans of positions that the target wrote, ascending: losses count only the tokens inside."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", tuple(self.tokens))
        object.__setattr__(self, "answer", tuple(_span(span) for span in self.answer))
        wrong = next((token for token in self.tokens if type(token) is not int or token < 0), None)
        if wrong is not None:
            raise TrainingDataError(f"tokens must be token ids, integers of at least 0; got {wrong!r}")
        if len(self.tokens) < 2:
            raise TrainingDataError(f"an example has at least 2 tokens, this one has {len(self.tokens)}")
        if not self.answer:
            raise TrainingDataError("an example has at least one span that the target wrote")
        end = 1  # nothing precedes position 0, so that nothing predicts it
        for start, stop in self.answer:
            if not end <= start < stop <= len(self.tokens):
                raise TrainingDataError(
                    f"the spans of an answer are non-empty and ascending within positions 1 to {len(self.tokens)} (the "
                    f"end of the example's tokens); got {list(self.answer)}"
                )
            end = stop

    @classmethod
    def of_text(cls, tokens: Sequence[int]) -> Example:
        """Plain text: every token but the first counts."""
        return cls(tuple(tokens), ((1, len(tokens)),))

    @classmethod
    def answered(cls, prompt: Sequence[int], answer: Sequence[int]) -> Example:
        """A prompt of at least one token and the target's answer to it."""
        return cls((*prompt, *answer), ((len(prompt), len(prompt) + len(answer)),))

    @property
    def prompt(self) -> tuple[int, ...]:
        """The tokens before the first span."""
        return self.tokens[: self.answer[0][0]]

    def answer_tokens(self) -> tuple[int, ...]:
        """The tokens inside the spans."""
        return tuple(itertools.chain.from_iterable(self.tokens[start:stop] for start, stop in self.answer))

    def cut(self, max_length: int) -> Example | None:
        """Its first `max_length` tokens; None if no token of the answer is among them."""
        if len(self.tokens) <= max_length:
            return self
        spans = tuple((start, min(stop, max_length)) for start, stop in self.answer if start < max_length)
        return Example(self.tokens[:max_length], spans) if spans else None

    def to_json(self) -> dict[str, Any]:
        """Types that JSON has; `from_json` reads them back."""
        return {"tokens": list(self.tokens), "answer": [list(span) for span in self.answer]}

    @classmethod
    def from_json(cls, value: Any) -> Example:
        """Reads what `to_json` gave, also after a trip through JSON.

        Raises:
            TrainingDataError: it is something else.
        """
        right = isinstance(value, dict) and set(value) == {"tokens", "answer"}
        if not right or not all(isinstance(part, (list, tuple)) for part in value.values()):
            raise TrainingDataError(f"an example is an object of the lists 'tokens' and 'answer'; got {_short(value)}")
        return cls(tuple(value["tokens"]), tuple(value["answer"]))


def examples_hash(examples: Iterable[Example]) -> str:
    """SHA-256 of the examples, in their order."""
    digest = hashlib.sha256()
    for example in examples:
        for numbers in (example.tokens, [n for span in example.answer for n in span]):
            digest.update(len(numbers).to_bytes(8, "little"))
            digest.update(np.asarray(numbers, dtype="<i8").tobytes())
    return digest.hexdigest()


def _span(span: Any) -> Span:
    pair = isinstance(span, (list, tuple)) and len(span) == 2 and all(type(end) is int for end in span)
    if not pair:
        raise TrainingDataError(f"a span is a pair of positions, got {_short(span)}")
    return span[0], span[1]


def _short(value: Any, most: int = 80) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= most else f"{text[:most]}..."
