"""What is never trained on, because heads are measured on it."""

from __future__ import annotations

from collections.abc import Sequence

from ...model_zoo.training.examples import Example
from ...model_zoo.training.overlap import overlap
from ..bench.prompt_sets import load_prompt_set
from ..progress import ProgressCallback
from .target_text import TargetText

HELD_OUT: dict[str, int | None] = {"humaneval": 40, "mtbench": None}
"""Of these prompt sets, how many prompts from the first on are held out; None: all."""


def held_out_texts(progress: ProgressCallback) -> tuple[str, ...]:
    """The texts of all held-out prompts, for `overlap`.

    Raises:
        FetchError: a set is not on this machine and could not be brought to it.
    """
    return tuple(
        case.prompt if isinstance(case.prompt, str) else str(case.prompt[-1]["content"])  # type: ignore[index, call-overload]
        for name, count in HELD_OUT.items()
        for case in load_prompt_set(name, count, progress)
    )


def without_held_out(
    examples: Sequence[Example], target: TargetText, texts: Sequence[str]
) -> tuple[tuple[Example, ...], int]:
    """The examples that share no prompt and no run of words with `texts` (see `overlap`), and how many do."""
    read = [target.tokenizer.decode(list(example.tokens), skip_special_tokens=True) for example in examples]
    shared = {found.text for found in overlap(read, texts)}
    return tuple(example for number, example in enumerate(examples) if number not in shared), len(shared)
