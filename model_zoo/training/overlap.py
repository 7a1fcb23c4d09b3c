"""Whether a text to train on holds what a head is later measured on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

RUN = 12
"""Words in a row that two independent texts do not share by chance."""

_WORD = re.compile(r"\w+")


class Overlap(NamedTuple):
    """Words that a text and a held-out prompt share."""

    text: int
    """Index of the text."""
    held_out: int
    """Index of the held-out prompt."""
    words: str
    """The first words in a row that both hold, in lower case."""


def overlap(texts: Sequence[str], held_out: Sequence[str], run: int = RUN) -> tuple[Overlap, ...]:
    """Texts that hold a held-out prompt, or `run` words in a row of one.

    Words are what letters, digits and underscores make, without regard to case and to what stands between them, so
    that identifiers of code are words. A held-out prompt of fewer than `run` words is found where it occurs whole.

    Args:
        texts: prompts and answers that are trained on.
        held_out: prompts that a head is measured on; those without a word are found where the text is the same.
        run: how many words in a row count.

    Returns:
        For each text and held-out prompt that overlap, the first words in a row that do; by text.
    """
    runs: dict[int, dict[tuple[str, ...], list[int]]] = {}
    wordless: dict[str, list[int]] = {}
    for number, prompt in enumerate(held_out):
        words = _words(prompt)
        size = min(run, len(words))
        if not size:
            wordless.setdefault(prompt.strip(), []).append(number)
        for start in range(len(words) - size + 1 if size else 0):
            owners = runs.setdefault(size, {}).setdefault(tuple(words[start : start + size]), [])
            if number not in owners:
                owners.append(number)
    found: list[Overlap] = []
    for number, text in enumerate(texts):
        words = _words(text)
        first: dict[int, str] = dict.fromkeys(wordless.get(text.strip(), ()), "")
        for size, owners_of in runs.items():
            for start in range(len(words) - size + 1):
                for owner in owners_of.get(tuple(words[start : start + size]), ()):
                    first.setdefault(owner, " ".join(words[start : start + size]))
        found.extend(Overlap(number, owner, shared) for owner, shared in sorted(first.items()))
    return tuple(found)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
