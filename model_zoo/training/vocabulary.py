"""A draft head's reduced vocabulary: the tokens that the target writes most (EAGLE-3, FR-Spec: arXiv 2502.14856).

A head of token i of the draft vocabulary stands for the target's token `ids[i]`. Checkpoints hold that as
`d2t[i] = ids[i] - i` and as `t2d[token]`, true for the tokens that the head can draft.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
import torch

from ..errors import TrainingDataError
from .examples import Example


def count_tokens(examples: Iterable[Example], vocab_size: int) -> torch.Tensor:
    """How often the target wrote each token: int64 [vocab_size], over the answers of the examples.

    Raises:
        TrainingDataError: a token lies outside of the vocabulary.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for number, example in enumerate(examples):
        tokens = np.asarray(example.answer_tokens(), dtype=np.int64)
        if tokens.max() >= vocab_size:
            raise TrainingDataError(
                f"example {number} holds token {tokens.max()}, but the vocabulary has {vocab_size} tokens: was it "
                "made for another target?"
            )
        counts += np.bincount(tokens, minlength=vocab_size)
    return torch.from_numpy(counts)


def choose_vocabulary(counts: torch.Tensor, size: int, keep: Collection[int] = ()) -> torch.Tensor:
    """The most frequent tokens; of equally frequent ones, those of lower ids.

    Args:
        counts: int64 [vocab_size], as `count_tokens` gives.
        size: of the draft vocabulary, at most vocab_size.
        keep: tokens to have in any case, such as those that end an answer.

    Returns:
        int64 [size], ascending.

    Raises:
        TrainingDataError: `size` is out of range or too small for `keep`, or a kept token is no token.
    """
    vocab_size = len(counts)
    kept = sorted(set(keep))
    if not 1 <= size <= vocab_size:
        raise TrainingDataError(f"the draft vocabulary must have 1 to {vocab_size} tokens, the target's, got {size}")
    if kept and not 0 <= kept[0] <= kept[-1] < vocab_size:
        raise TrainingDataError(f"tokens to keep must be from 0 to {vocab_size - 1}, got {kept}")
    if len(kept) > size:
        raise TrainingDataError(f"a draft vocabulary of {size} tokens cannot keep {len(kept)}: {kept}")
    return _ranked(counts, kept)[:size].sort().values


def size_for(counts: torch.Tensor, share: float, keep: Collection[int] = ()) -> int:
    """How many tokens `choose_vocabulary` must take to hold at least this share of the counted ones."""
    held = counts[_ranked(counts, sorted(set(keep)))].to(torch.int64).cumsum(0)
    return min(len(counts), int((held < share * int(held[-1])).sum()) + 1)


def _ranked(counts: torch.Tensor, keep: list[int]) -> torch.Tensor:
    """All tokens, int64: those to keep, then the more frequent first."""
    rank = counts.to(torch.int64).clone()
    rank[keep] = torch.iinfo(torch.int64).max
    return torch.sort(rank, descending=True, stable=True).indices


def draft_to_target(ids: torch.Tensor) -> torch.Tensor:
    """`d2t`: int64 [size], what to add to a draft token's id to get the target's."""
    return ids - torch.arange(len(ids), dtype=torch.int64)


def target_to_draft(ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """`t2d`: bool [vocab_size], true for the tokens of the draft vocabulary."""
    known = torch.zeros(vocab_size, dtype=torch.bool)
    known[ids] = True
    return known


def coverage(ids: torch.Tensor, counts: torch.Tensor) -> float:
    """The share of the counted tokens that the draft vocabulary holds: no head can have more accepted. 1 for none."""
    total = int(counts.sum())
    return int(counts[ids].sum()) / total if total else 1.0
