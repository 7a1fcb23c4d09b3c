"""Prompt lookup: drafts are what followed the last tokens where they occurred before.

An index of every slot's n-grams makes a round's cost independent of the context. For each n there is a hash
table of chains: `heads[slot, n - min_n, bucket]` is e + 1 for the most recent end position e of an n-gram in
that bucket (0: none), and `links[slot, n - min_n, e]` is the one before it. A lookup compares the tokens
along the chain, so it is exact whatever collides.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from .ngram_propose_triton import MULTIPLIER, hash_shift, kernel_specs, ngram_propose_triton
from .registration import define_op

__all__ = [
    "find_match",
    "index_tokens",
    "kernel_specs",
    "ngram_propose",
    "ngram_propose_reference",
    "ngram_propose_triton",
    "reset_ngram",
]

IntArray = npt.NDArray[np.int32]

_MASK = 0xFFFFFFFF
# From so many new tokens on, indexing them together is faster than one by one.
_MANY = 24


def ngram_propose_reference(
    tokens: torch.Tensor,
    length: torch.Tensor,
    finished: torch.Tensor,
    slot_of_row: torch.Tensor,
    heads: torch.Tensor,
    links: torch.Tensor,
    indexed: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_count: torch.Tensor,
    min_n: int,
    max_n: int,
) -> None:
    """The specification of `ngram_propose`, in plain Python on the host.

    A row first indexes what was committed since its last round: the n-grams that end at positions `indexed`
    to `length - 2`, since one that ends at the last token has nothing after it. Then it looks for the
    longest n in [min_n, max_n] whose last n tokens occurred before, and of these occurrences for the most
    recent. The tokens after it, at most K and never past `length`, are the drafts.

    The bucket of an n-gram is the top bits of a 32-bit hash over its tokens from the last to the first:
    `h = ((h ^ token) * 0x9E3779B1) mod 2**32`, from 0, and then `h >> (32 - log2(H))`.

    Args:
        tokens: int32 [R1, C].
        length: int32 [R1].
        finished: bool [R1].
        slot_of_row: int32 [B].
        heads: int32 [R1, N, H], updated; N is `max_n - min_n + 1`, H a power of two.
        links: int32 [R1, N, C], updated.
        indexed: int32 [R1], updated: how many positions are indexed. `reset_ngram` clears a slot.
        draft_tokens: int32 [R1, K], written for all rows of the bucket; -1 after the drafts.
        draft_count: int32 [R1], written; 0 without a match, and for finished rows.
        min_n: the shortest n-gram, at least 1.
        max_n: the longest.

    Raises:
        ValueError: sizes do not fit, or H is not a power of two.
    """
    shift = hash_shift(heads, min_n, max_n)
    for slot in slot_of_row.tolist():
        draft_tokens[slot] = -1
        draft_count[slot] = 0
        if finished[slot]:
            continue
        row = tokens[slot, : int(length[slot])].tolist()
        for end in range(int(indexed[slot]), len(row) - 1):
            for n in range(min_n, min(max_n, end + 1) + 1):
                bucket = _hashes(row[end + 1 - n : end + 1])[-1] >> shift
                links[slot, n - min_n, end] = heads[slot, n - min_n, bucket]
                heads[slot, n - min_n, bucket] = end + 1
        indexed[slot] = len(row) - 1
        drafts = _drafts_of(row, heads[slot], links[slot], draft_tokens.shape[1], shift, min_n, max_n)
        draft_count[slot] = len(drafts)
        draft_tokens[slot, : len(drafts)] = torch.tensor(drafts, dtype=torch.int32)


def _drafts_of(
    row: list[int],
    heads: torch.Tensor,
    links: torch.Tensor,
    num_drafts: int,
    shift: int,
    min_n: int,
    max_n: int,
) -> list[int]:
    for n in range(min(max_n, len(row) - 1), min_n - 1, -1):
        suffix = row[-n:]
        after = int(heads[n - min_n, _hashes(suffix)[-1] >> shift])
        while after > 0:
            if row[after - n : after] == suffix:
                return row[after : after + num_drafts]
            after = int(links[n - min_n, after - 1])
    return []


def reset_ngram(heads: torch.Tensor, indexed: torch.Tensor, slot: int) -> None:
    """Forgets what is indexed of a slot; to be called when it gets another sequence.

    Args:
        heads: int32 [R1, N, H].
        indexed: int32 [R1].
        slot: which.
    """
    heads[slot].zero_()
    indexed[slot] = 0


def _hashes(suffix: list[int]) -> list[int]:
    """The 32-bit hashes of the last 1, 2, ... tokens of `suffix`."""
    value = 0
    hashes = []
    for token in reversed(suffix):
        value = (value ^ token) * MULTIPLIER & _MASK
        hashes.append(value)
    return hashes


def _ngram_propose_cpu(
    tokens: torch.Tensor,
    length: torch.Tensor,
    finished: torch.Tensor,
    slot_of_row: torch.Tensor,
    heads: torch.Tensor,
    links: torch.Tensor,
    indexed: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_count: torch.Tensor,
    min_n: int,
    max_n: int,
) -> None:
    shift = hash_shift(heads, min_n, max_n)
    tokens_of, heads_of, links_of = tokens.numpy(), heads.numpy(), links.numpy()
    drafts_of, count_of, indexed_of = draft_tokens.numpy(), draft_count.numpy(), indexed.numpy()
    for slot in slot_of_row.tolist():
        drafts_of[slot] = -1
        count_of[slot] = 0
        if finished[slot]:
            continue
        row_length = int(length[slot])
        row, row_heads, row_links = tokens_of[slot], heads_of[slot], links_of[slot]
        index_tokens(row, row_heads, row_links, int(indexed_of[slot]), row_length - 1, shift, min_n, max_n)
        indexed_of[slot] = row_length - 1
        after, _ = find_match(row, row_heads, row_links, row_length, shift, min_n, max_n)
        if after > 0:
            drafts = row[after : min(after + drafts_of.shape[1], row_length)]
            count_of[slot] = len(drafts)
            drafts_of[slot, : len(drafts)] = drafts


def index_tokens(
    row: IntArray, heads: IntArray, links: IntArray, begin: int, end: int, shift: int, min_n: int, max_n: int
) -> None:
    """Adds the n-grams that end at positions begin to end - 1 to one slot's tables."""
    if end - begin >= _MANY:
        _index_many(row, heads, links, begin, end, shift, min_n, max_n)
        return
    oldest = max(0, begin + 1 - max_n)
    recent = row[oldest:end].tolist()
    for position in range(begin, end):
        stop = position + 1 - oldest
        hashes = _hashes(recent[max(0, stop - max_n) : stop])
        for n in range(min_n, len(hashes) + 1):
            bucket = hashes[n - 1] >> shift
            links[n - min_n, position] = heads[n - min_n, bucket]
            heads[n - min_n, bucket] = position + 1


def _index_many(
    row: IntArray, heads: IntArray, links: IntArray, begin: int, end: int, shift: int, min_n: int, max_n: int
) -> None:
    """The same, a whole prompt at once: sorted by bucket, chains are runs in order of position."""
    unsigned = row[:end].astype(np.uint32)
    first = begin
    value = np.zeros(end - begin, dtype=np.uint32)
    for n in range(1, max_n + 1):
        if first < n - 1:
            value = value[n - 1 - first :]
            first = n - 1
        if first >= end:
            return
        value = (value ^ unsigned[first + 1 - n : end + 1 - n]) * np.uint32(MULTIPLIER)
        if n < min_n:
            continue
        table, chain = heads[n - min_n], links[n - min_n]
        bucket = np.right_shift(value.astype(np.uint64), np.uint64(shift))
        # NumPy sorts 16-bit integers by radix, four times as fast.
        order = np.argsort(bucket.astype(np.uint16) if shift >= 16 else bucket, kind="stable")
        sorted_bucket = bucket[order].astype(np.int64)
        after = (order + (first + 1)).astype(np.int32)
        is_first = np.ones(len(order), dtype=bool)
        np.not_equal(sorted_bucket[1:], sorted_bucket[:-1], out=is_first[1:])
        previous = np.empty_like(after)
        previous[1:] = after[:-1]
        previous[is_first] = table[sorted_bucket[is_first]]
        chain[after - 1] = previous
        is_last = np.append(is_first[1:], True)
        table[sorted_bucket[is_last]] = after[is_last]


def find_match(
    row: IntArray, heads: IntArray, links: IntArray, length: int, shift: int, min_n: int, max_n: int
) -> tuple[int, int]:
    """Where the longest, most recent match of one slot's last tokens is.

    Returns:
        The position after the match, or 0; and how many chain entries were compared.
    """
    suffix = row[max(0, length - max_n) : length].tolist()
    hashes = _hashes(suffix)
    steps = 0
    for n in range(min(max_n, length - 1), min_n - 1, -1):
        wanted = suffix[-n:]
        after = int(heads[n - min_n, hashes[n - 1] >> shift])
        while after > 0:
            steps += 1
            if row[after - n : after].tolist() == wanted:
                return after, steps
            after = int(links[n - min_n, after - 1])
    return 0, steps


def _ngram_propose_fake(*args: torch.Tensor | int) -> None:
    return None


ngram_propose = define_op(
    "ngram_propose(Tensor tokens, Tensor length, Tensor finished, Tensor slot_of_row, Tensor(a!) heads, "
    "Tensor(b!) links, Tensor(c!) indexed, Tensor(d!) draft_tokens, Tensor(e!) draft_count, int min_n, "
    "int max_n) -> ()",
    cpu=_ngram_propose_cpu,
    fake=_ngram_propose_fake,
    cuda=ngram_propose_triton,
)
"""`draftgraph::ngram_propose`; see `ngram_propose_reference`."""
