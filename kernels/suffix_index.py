"""The contexts of a token sequence in arrays: what suffix decoding counts and looks up.

A suffix tree of depth D over a sequence holds every string of at most D tokens that occurs in it, and how often. Here
the strings of each length d are the *nodes* of depth d. A node is named by the position at which its first occurrence
ends, so nodes need no allocation, and a sequence of C tokens has at most C of them per depth.

`heads` is int32 [D, H] and `tree` int32 [4, D, C], its planes, at depth index d - 1:

- `LINK`, by node: the node before it in its bucket's chain, plus 1, or 0. `heads[d - 1, bucket]` is the newest, plus 1.
- `NODE`, by position e: the node of the d tokens that end at e.
- `COUNT`, by node: how often it occurred.
- `BEST`, by node: where the most frequent child last ended, plus 1, or 0. A child is the string with one more token at
  its end. Among equally frequent children it is the one that occurred last.

An entry is written before it is read, so only `heads` has to be cleared for another sequence. The memory is
`4 * D * (4 * C + H)` bytes, whatever the tokens are: with H = C, 20 bytes per token and depth.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

LINK, NODE, COUNT, BEST = range(4)
PLANES = 4

STEP = 0x9E3779B1
SPREAD = 0x85EBCA6B
"""A string's hash is the sum of `token * STEP**back` over its tokens, `back` counted from the last one, times `SPREAD`,
all modulo 2**32; its bucket is the top bits."""

LONGEST = 64
"""The deepest tree that the kernel takes."""

IntArray = npt.NDArray[np.int32]

# From so many tokens on, indexing a sequence as a whole is faster than one token after another.
_MANY = 48
_POWERS = np.array([pow(STEP, back, 2**32) for back in range(LONGEST)], dtype=np.uint32)


class Tree(NamedTuple):
    """The arrays of one sequence, or of several laid end to end."""

    tokens: IntArray
    """[C]."""
    heads: IntArray
    """[D, H], H a power of two."""
    tree: IntArray
    """[4, D, C]."""


def hash_shift(buckets: int) -> int:
    """By how many bits a 32-bit hash is shifted to give a bucket.

    Raises:
        ValueError: `buckets` is not a power of two.
    """
    if buckets < 1 or buckets & (buckets - 1):
        raise ValueError(f"the number of buckets must be a power of two, got {buckets}")
    return 33 - buckets.bit_length()


def buckets_of(recent: IntArray, shift: int) -> npt.NDArray[np.int64]:
    """The buckets of the strings of 1, 2, ... tokens that end a sequence.

    Args:
        recent: the last tokens, the last one first.
        shift: see `hash_shift`.
    """
    with np.errstate(over="ignore"):
        sums = np.cumsum(recent.astype(np.uint32) * _POWERS[: len(recent)], dtype=np.uint32)
        spread = sums * np.uint32(SPREAD)
    return np.right_shift(spread.astype(np.int64), shift)


def extend(index: Tree, begin: int, end: int, start: int = 0) -> None:
    """Enters the tokens at positions begin to end - 1.

    Args:
        index: updated.
        begin: how many positions have been entered before.
        end: at most the length of `index.tokens`.
        start: where the sequence that they belong to begins; no string reaches back beyond it.
    """
    if begin == start == 0 and end >= _MANY:
        enter_all(index, np.zeros(end, dtype=np.int32))
        return
    tokens, heads, tree = index
    link, node, count, best = tree
    deepest, shift = len(heads), hash_shift(heads.shape[1])
    all_lanes = np.arange(deepest)
    for position in range(begin, end):
        depth = min(deepest, position + 1 - start)
        lanes = all_lanes[:depth]
        recent = tokens[position + 1 - depth : position + 1][::-1]
        bucket = buckets_of(recent, shift)
        head = heads[lanes, bucket]
        # Of the string without its last token, which was entered with the position before; the root has no number.
        parent = np.zeros(depth, dtype=np.int32)
        parent[1:] = node[lanes[:-1], position - 1]
        found = _follow(index, lanes, head, parent, recent[0])
        new = found == 0
        here = np.where(new, position, found - 1)
        link[lanes[new], position] = head[new]
        best[lanes[new], position] = 0
        heads[lanes[new], bucket[new]] = position + 1
        node[:depth, position] = here
        times = np.where(new, 0, count[lanes, here]) + 1
        count[lanes, here] = times
        if depth > 1:
            above, parents = lanes[:-1], parent[1:]
            rival = best[above, parents]
            rival_count = count[lanes[1:], node[lanes[1:], rival - 1]]
            wins = (rival == 0) | (rival_count <= times[1:])
            best[above[wins], parents[wins]] = position + 1


def _follow(index: Tree, lanes: Any, head: IntArray, parent: IntArray, token: np.int32) -> IntArray:
    """The nodes, plus 1, of strings that end in `token` and whose other tokens are the nodes `parent`; 0 where new."""
    link, node = index.tree[LINK], index.tree[NODE]
    found = np.zeros(len(lanes), dtype=np.int32)
    open_lanes = np.flatnonzero(head)
    follow = head[open_lanes] - 1
    while len(open_lanes):
        same = index.tokens[follow] == token
        same &= (open_lanes == 0) | (node[open_lanes - 1, follow - 1] == parent[open_lanes])
        found[open_lanes[same]] = follow[same] + 1
        follow = link[open_lanes, follow]
        go_on = ~same & (follow > 0)
        open_lanes, follow = open_lanes[go_on], follow[go_on] - 1
    return found


def enter_all(index: Tree, starts: IntArray) -> None:
    """Enters a whole sequence, or several, into an empty index: the same arrays as `extend` from token to token.

    Args:
        index: updated; its `heads` are all 0.
        starts: int32 [n], for each of the first n positions where its sequence begins; does not decrease.
    """
    tokens, heads, tree = index
    link, node, count, best = tree
    length, shift = len(starts), hash_shift(heads.shape[1])
    positions = np.arange(length)
    room = positions + 1 - starts
    unsigned = tokens[:length].astype(np.uint32)
    sums = np.zeros(length, dtype=np.uint32)
    for lane in range(len(heads)):
        here = positions[room > lane]
        if not len(here):
            return
        with np.errstate(over="ignore"):
            sums[here] += unsigned[here - lane] * _POWERS[lane]
        key = tokens[here].astype(np.int64)
        if lane:
            parents = node[lane - 1, here - 1]
            key |= parents.astype(np.int64) << 32
        order = np.argsort(key, kind="stable")
        ordered = key[order]
        edge = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
        sizes = np.diff(np.append(edge, len(order)))
        firsts, lasts = here[order[edge]], here[order[edge + sizes - 1]]
        node[lane, here[order]] = np.repeat(firsts, sizes)
        count[lane, firsts] = sizes
        best[lane, firsts] = 0
        if lane:
            above = parents[order[edge]]
            rank = (sizes.astype(np.int64) << 32) | lasts
            highest = np.zeros(length, dtype=np.int64)
            np.maximum.at(highest, above, rank)
            chosen = highest[above]
            best[lane - 1, above] = (chosen & 0xFFFFFFFF) + 1
        _chain(heads[lane], link[lane], np.sort(firsts), sums, shift)


def _chain(head: IntArray, link: IntArray, nodes: npt.NDArray[np.int64], sums: Any, shift: int) -> None:
    """Chains all nodes of one depth: within a bucket, runs in order of position."""
    with np.errstate(over="ignore"):
        spread = sums[nodes] * np.uint32(SPREAD)
    bucket = np.right_shift(spread.astype(np.int64), shift)
    # NumPy sorts 16-bit integers by radix, four times as fast.
    order = np.argsort(bucket.astype(np.uint16) if shift >= 16 else bucket, kind="stable")
    bucket, newest = bucket[order], (nodes[order] + 1).astype(np.int32)
    opens = np.append(True, bucket[1:] != bucket[:-1])
    previous = np.where(opens, 0, np.append(np.int32(0), newest[:-1]))
    link[newest - 1] = previous
    closes = np.append(opens[1:], True)
    head[bucket[closes]] = newest[closes]


def match_suffix(index: Tree, recent: IntArray) -> IntArray:
    """The nodes, plus 1, of the last 1, 2, ... tokens of another sequence; 0 where they never occurred.

    Args:
        index: what to look in.
        recent: the last tokens, at most D, the last one first.
    """
    shift = hash_shift(index.heads.shape[1])
    found = np.zeros(len(recent), dtype=np.int32)
    link, backward = index.tree[LINK], recent[::-1]
    heads = index.heads[np.arange(len(recent)), buckets_of(recent, shift)].tolist()
    for lane, after in enumerate(heads):
        while after > 0:
            if np.array_equal(index.tokens[after - 1 - lane : after], backward[len(recent) - 1 - lane :]):
                found[lane] = after
                break
            after = int(link[lane, after - 1])
        if after == 0:  # no longer string can occur either
            break
    return found
