from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import assert_same_effect, check_registration
from suffix_cases import (
    CONFIDENCE,
    COUNT,
    DRAFTS,
    FINISHED,
    HEADS,
    INDEXED,
    LENGTH,
    ROWS,
    TOKENS,
    TREE,
    Counted,
    best_candidate,
    candidates,
    starts_of,
    suffix_arguments,
)

from draftgraph.kernels import suffix_propose as module
from draftgraph.kernels.suffix_index import BEST, NODE, Tree, enter_all, extend
from draftgraph.kernels.suffix_index import COUNT as COUNT_PLANE
from draftgraph.kernels.suffix_propose import draft_budget, reset_suffix, suffix_propose, suffix_propose_reference


def drafted(args: list[Any], slot: int = 0) -> tuple[list[int], list[float]]:
    count = int(args[COUNT][slot])
    assert args[DRAFTS][slot, count:].eq(-1).all()
    assert args[CONFIDENCE][slot, count:].eq(0).all()
    return args[DRAFTS][slot, :count].tolist(), args[CONFIDENCE][slot, :count].tolist()


@given(
    seed=st.integers(0, 10**6),
    alphabet=st.integers(1, 4),
    depth=st.integers(1, 7),
    num_drafts=st.integers(1, 5),
    buckets=st.sampled_from([1, 2, 64]),
    growth=st.sampled_from([1, 4, 60]),
    factor=st.sampled_from([0.5, 1.0, 1.7]),
    least=st.sampled_from([0.0, 0.1, 0.5]),
    others=st.lists(st.integers(1, 25), max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_growing_sequences_against_counting_everywhere(
    seed: int,
    alphabet: int,
    depth: int,
    num_drafts: int,
    buckets: int,
    growth: int,
    factor: float,
    least: float,
    others: list[int],
) -> None:
    """Two slots grow by random amounts, one of them pausing as finished and starting anew."""
    rng = np.random.default_rng(seed)
    finished = [rng.integers(0, alphabet, size).tolist() for size in others]
    sizes = {"depth": depth, "num_drafts": num_drafts, "factor": factor, "min_probability": least}
    args = suffix_arguments(context=110, buckets=buckets, finished=finished, **sizes)
    args[ROWS] = torch.tensor([1, 0, 2, 2], dtype=torch.int32)
    args[FINISHED][2] = True
    args[TOKENS][:2] = torch.from_numpy(rng.integers(0, alphabet, (2, 110)))
    for step in range(4):
        for slot in range(2):
            args[LENGTH][slot] = min(110, args[LENGTH][slot] + int(rng.integers(0, growth + 1)))
        args[FINISHED][1] = step == 1
        if step == 2:
            args[TOKENS][1] = torch.from_numpy(rng.integers(0, alphabet, 110))
            args[LENGTH][1] = 1 + int(rng.integers(0, growth))
            reset_suffix(args[HEADS], args[INDEXED], 1)
        assert_same_effect(suffix_propose, suffix_propose_reference, args)
        suffix_propose(*args)
        for slot in range(2):
            tokens, ratios = drafted(args, slot)
            if args[FINISHED][slot]:
                assert tokens == []
                continue
            row = args[TOKENS][slot, : args[LENGTH][slot]].tolist()
            wanted = best_candidate(candidates(row, finished, **sizes))
            assert (tokens, ratios) == (list(wanted.drafts), list(wanted.ratios))
            score, probability = np.float32(0), np.float32(1)
            for ratio in ratios:
                probability = probability * np.float32(ratio)
                score = score + probability
            assert float(score) == wanted.score


@given(
    seed=st.integers(0, 10**6), alphabet=st.integers(1, 4), sizes=st.lists(st.integers(1, 60), min_size=1, max_size=4)
)
@settings(max_examples=40, deadline=None)
def test_the_index_counts_and_is_the_same_however_it_was_built(seed: int, alphabet: int, sizes: list[int]) -> None:
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(0, alphabet, size).tolist() for size in sizes]
    total, depth = sum(sizes), 6

    def empty() -> Tree:
        tokens = np.array([token for sequence in sequences for token in sequence], dtype=np.int32)
        return Tree(tokens, np.zeros((depth, 16), dtype=np.int32), np.zeros((4, depth, total), dtype=np.int32))

    at_once, step_by_step = empty(), empty()
    starts = starts_of(sequences)
    enter_all(at_once, starts)
    for position, start in enumerate(starts.tolist()):
        extend(step_by_step, position, position + 1, start)
    assert np.array_equal(at_once.heads, step_by_step.heads)
    assert np.array_equal(at_once.tree, step_by_step.tree)
    counted = Counted(sequences, depth)
    for position, start in enumerate(starts.tolist()):
        for size in range(1, min(depth, position - start + 1) + 1):
            string = tuple(at_once.tokens[position + 1 - size : position + 1].tolist())
            node = at_once.tree[NODE, size - 1, position]
            assert at_once.tree[COUNT_PLANE, size - 1, node] == counted.count[string]
            if size < depth:
                children = counted.children(string)
                best = at_once.tree[BEST, size - 1, node]
                likeliest = max(((counted.count[c], counted.last[c]) for c in children), default=(0, 0))
                assert best == likeliest[1]


@pytest.mark.parametrize("propose", [suffix_propose, suffix_propose_reference])
@pytest.mark.parametrize(
    ("row", "finished", "drafts"),
    [
        ([1, 2, 9, 1, 2, 8, 1, 2, 8, 7, 1, 2], [], [8, 7]),  # 8 followed twice and 9 once; at 8 the later of two ties
        ([1, 2, 9, 1, 2, 8, 3, 1, 2], [], [8, 3]),  # a tie: what followed last
        ([1, 2, 3, 4], [], []),  # nothing repeats
        ([7], [], []),
        ([1, 2], [[1, 2, 5, 6, 4]], [5, 6]),  # two tokens matched, two drafts
        ([2], [[1, 2, 5, 6, 4]], [5]),  # one and one
        ([4, 2, 5, 4, 2], [[4, 2, 6, 0]], [6, 0]),  # certain there, and here one of two occurrences
    ],
)
def test_by_hand(propose: Any, row: list[int], finished: list[list[int]], drafts: list[int]) -> None:
    args = suffix_arguments(slots=1, context=16, num_drafts=3, depth=5, finished=finished)
    args[TOKENS][0, : len(row)] = torch.tensor(row)
    args[LENGTH][0] = len(row)
    propose(*args)
    assert drafted(args)[0] == drafts


def test_budget() -> None:
    assert draft_budget(6, 8, 1.0) == (1, 2, 3, 2, 1, 0)
    assert draft_budget(6, 2, 1.5) == (1, 2, 2, 2, 1, 0)
    assert draft_budget(5, 8, 0.5, 1.0) == (1, 2, 2, 1, 0)
    assert draft_budget(3, 8, 0.0, -1.0) == (0, 0, 0)


def test_each_token_is_entered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a round's cost does not grow with the context; entering is all that the length could bear on."""
    ranges: list[tuple[int, int]] = []

    def counted(index: Tree, begin: int, end: int) -> None:
        ranges.append((begin, end))
        extend(index, begin, end)

    monkeypatch.setattr(module, "extend", counted)
    args = suffix_arguments(slots=1, context=600)
    args[TOKENS][0] = torch.from_numpy(np.random.default_rng(0).integers(0, 30, 600))
    for length in (500, 503, 503, 507):
        args[LENGTH][0] = length
        suffix_propose(*args)
    assert ranges == [(0, 500), (500, 503), (503, 503), (503, 507)]


def test_the_memory_is_what_was_allocated_whatever_the_tokens() -> None:
    """Every string new, the worst case: as many nodes per depth as positions, and none out of bounds."""
    args = suffix_arguments(slots=1, context=200, depth=24, num_drafts=24, buckets=256)
    args[TOKENS][0] = torch.arange(200)
    args[LENGTH][0] = 200
    suffix_propose(*args)
    nodes = [len(np.unique(args[TREE][0, NODE, lane, lane:].numpy())) for lane in range(24)]
    assert nodes == [200 - lane for lane in range(24)]
    assert args[COUNT][0] == 0


def test_sizes_are_checked() -> None:
    args = suffix_arguments()
    args[HEADS] = args[HEADS][:, :, :6]
    with pytest.raises(ValueError, match="power of two, got 6"):
        suffix_propose_reference(*args)
    args = suffix_arguments()
    args[TREE] = args[TREE][:, :3]
    with pytest.raises(ValueError, match=r"tree has shape \[3, 3, 5, 64\]; accepted: \[3, 4, 5, 64\]"):
        suffix_propose(*args)
    with pytest.raises(ValueError, match="1 to 64 tokens deep, got 65"):
        suffix_propose(*suffix_arguments(depth=65))


def test_registration() -> None:
    args = suffix_arguments(finished=[[1, 2, 3]])
    args[LENGTH][:] = 9
    check_registration(suffix_propose, args)
