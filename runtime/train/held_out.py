"""What is never trained on, because heads are measured on it."""

from __future__ import annotations

from ..bench.prompt_sets import load_prompt_set
from ..progress import ProgressCallback

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
