"""Which examples are kept out of training, so that acceptance is measured on what the head has not seen."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from ..errors import TrainingDataError
from .examples import Example

_SPAN = 2**64


def split_examples(
    examples: Sequence[Example], share: float, seed: int = 0
) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """Splits examples by a hash of their prompts, keeping their order.

    An example's side depends on its prompt, `share` and `seed` alone: more data, or another order, moves none. Two
    answers to one prompt lie on the same side. Text without a prompt is its own prompt. Where the hash would leave
    a side empty, the prompt nearest to it goes there.

    Args:
        examples: with at least two different prompts.
        share: of the prompts to hold out, above 0 and below 1; reached only about.
        seed: gives another split.

    Returns:
        Those to train on, and those held out.

    Raises:
        TrainingDataError: `share` is out of range, or there are fewer than two different prompts.
    """
    if not 0.0 < share < 1.0:
        raise TrainingDataError(f"the share of held-out examples must be above 0 and below 1, got {share!r}")
    places = [_place(example, seed) for example in examples]
    different = sorted(set(places))
    if len(different) < 2:
        raise TrainingDataError(
            f"holding examples out needs at least two with different prompts, got {len(examples)} with "
            f"{len(different)} different"
        )
    # The held-out side has at least the lowest, the other side at least the highest.
    bound = min(max(int(share * _SPAN), different[0] + 1), different[-1])
    held_out = [place < bound for place in places]
    return (
        tuple(example for example, out in zip(examples, held_out, strict=True) if not out),
        tuple(example for example, out in zip(examples, held_out, strict=True) if out),
    )


def _place(example: Example, seed: int) -> int:
    """From 0 to 2^64 - 1, evenly spread over prompts."""
    # A first token alone, as of a beginning of text, is no prompt.
    tokens = example.prompt if len(example.prompt) > 1 else example.tokens
    data = np.asarray(tokens, dtype="<i8").tobytes()
    return int.from_bytes(hashlib.sha256(f"{seed}:".encode() + data).digest()[:8], "little")
