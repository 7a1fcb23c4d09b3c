from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import assert_same_effect, check_registration

from draftgraph.kernels import ngram_propose as module
from draftgraph.kernels.ngram_propose import ngram_propose, ngram_propose_reference, reset_ngram


def oracle(row: list[int], num_drafts: int, min_n: int, max_n: int) -> list[int]:
    """Longest n first, then the most recent earlier match, by comparing everywhere."""
    for n in range(max_n, min_n - 1, -1):
        for start in range(len(row) - n - 1, -1, -1):
            if row[start : start + n] == row[-n:] and len(row) > n:
                return row[start + n : start + n + num_drafts]
    return []


def tables(*, slots: int, context: int, num_drafts: int, min_n: int, max_n: int, buckets: int) -> dict[str, Any]:
    tables = max_n - min_n + 1
    return {
        "tokens": torch.zeros(slots + 1, context, dtype=torch.int32),
        "length": torch.ones(slots + 1, dtype=torch.int32),
        "finished": torch.zeros(slots + 1, dtype=torch.bool),
        "slot_of_row": torch.arange(slots, dtype=torch.int32),
        "heads": torch.zeros(slots + 1, tables, buckets, dtype=torch.int32),
        "links": torch.zeros(slots + 1, tables, context, dtype=torch.int32),
        "indexed": torch.zeros(slots + 1, dtype=torch.int32),
        "draft_tokens": torch.zeros(slots + 1, num_drafts, dtype=torch.int32),
        "draft_count": torch.zeros(slots + 1, dtype=torch.int32),
        "min_n": min_n,
        "max_n": max_n,
    }


@given(
    seed=st.integers(0, 10**6),
    alphabet=st.integers(1, 5),
    min_n=st.integers(1, 4),
    extra_n=st.integers(0, 3),
    num_drafts=st.integers(0, 5),
    buckets=st.sampled_from([1, 2, 8, 64]),
    growth=st.sampled_from([1, 3, 8, 60]),
)
@settings(max_examples=200, deadline=None)
def test_growing_sequences_against_oracle(
    seed: int, alphabet: int, min_n: int, extra_n: int, num_drafts: int, buckets: int, growth: int
) -> None:
    """Three slots grow by random amounts, one of them pausing as finished, one starting anew half-way."""
    rng = np.random.default_rng(seed)
    max_n, context = min_n + extra_n, 150
    state = tables(slots=3, context=context, num_drafts=num_drafts, min_n=min_n, max_n=max_n, buckets=buckets)
    state["slot_of_row"] = torch.tensor([2, 0, 1, 3, 3], dtype=torch.int32)
    state["finished"][3] = True
    state["tokens"][:3] = torch.from_numpy(rng.integers(0, alphabet, (3, context)))
    for step in range(6):
        for slot in range(3):
            state["length"][slot] = min(context, state["length"][slot] + int(rng.integers(0, growth + 1)))
        state["finished"][1] = step in (2, 3)
        if step == 3:
            state["tokens"][0] = torch.from_numpy(rng.integers(0, alphabet, context))
            state["length"][0] = 1 + int(rng.integers(0, growth))
            reset_ngram(state["heads"], state["indexed"], 0)
        assert_same_effect(ngram_propose, ngram_propose_reference, list(state.values()))
        ngram_propose(*state.values())
        assert state["draft_count"][3] == 0
        for slot in range(3):
            row = state["tokens"][slot, : state["length"][slot]].tolist()
            expected = [] if state["finished"][slot] else oracle(row, num_drafts, min_n, max_n)
            count = int(state["draft_count"][slot])
            assert state["draft_tokens"][slot, :count].tolist() == expected
            assert state["draft_tokens"][slot, count:].eq(-1).all()


@pytest.mark.parametrize("propose", [ngram_propose, ngram_propose_reference])
@pytest.mark.parametrize(
    ("row", "drafts"),
    [
        ([1, 2, 9, 1, 2, 8, 7, 1, 2], [8, 7, 1]),  # the most recent match of two tokens
        ([5, 1, 2, 9, 4, 1, 2, 8, 5, 1, 2], [9, 4, 1]),  # three tokens before two, though older
        ([3, 3, 3], [3]),  # only what is committed follows
        ([1, 2, 3, 4], []),  # no match
        ([7], []),  # nothing before it
    ],
)
def test_by_hand(propose: Any, row: list[int], drafts: list[int]) -> None:
    state = tables(slots=1, context=16, num_drafts=3, min_n=1, max_n=3, buckets=8)
    state["tokens"][0, : len(row)] = torch.tensor(row)
    state["length"][0] = len(row)
    propose(*state.values())
    assert state["draft_tokens"][0, : state["draft_count"][0]].tolist() == drafts


@pytest.mark.parametrize("propose", [ngram_propose, ngram_propose_reference])
def test_shorter_than_the_shortest_ngram(propose: Any) -> None:
    state = tables(slots=1, context=16, num_drafts=3, min_n=3, max_n=4, buckets=8)
    for length, count in ((1, 0), (3, 0), (4, 1)):
        state["length"][0] = length
        propose(*state.values())
        assert state["draft_count"][0] == count


def test_cost_does_not_grow_with_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token is indexed once, and on random text a lookup compares a handful of entries at any length."""
    ranges: list[tuple[int, int]] = []
    steps: list[int] = []
    index_tokens, find_match = module.index_tokens, module.find_match

    def counted_index(row: Any, heads: Any, links: Any, begin: int, end: int, *rest: int) -> None:
        ranges.append((begin, end))
        index_tokens(row, heads, links, begin, end, *rest)

    def counted_match(*args: Any) -> tuple[int, int]:
        result = find_match(*args)
        steps.append(result[1])
        return result

    monkeypatch.setattr(module, "index_tokens", counted_index)
    monkeypatch.setattr(module, "find_match", counted_match)
    rng = np.random.default_rng(0)
    context, prompt = 8192, 6000
    state = tables(slots=1, context=context, num_drafts=4, min_n=1, max_n=4, buckets=16384)
    state["tokens"][0] = torch.from_numpy(rng.integers(0, 3000, context))
    length = prompt
    for _ in range(500):
        state["length"][0] = length
        ngram_propose(*state.values())
        length += 3
    assert ranges[0] == (0, prompt - 1)
    assert ranges[1:] == [(begin, begin + 3) for begin in range(prompt - 1, prompt - 1 + 499 * 3, 3)]
    assert np.mean(steps) < 4
    assert max(steps) < 20


def test_sizes_are_checked() -> None:
    state = tables(slots=1, context=16, num_drafts=3, min_n=1, max_n=3, buckets=6)
    with pytest.raises(ValueError, match="power of two, got 6"):
        ngram_propose(*state.values())
    state = tables(slots=1, context=16, num_drafts=3, min_n=1, max_n=3, buckets=8)
    state["max_n"] = 4
    with pytest.raises(ValueError, match="1 to 4 tokens do not fit 3 tables"):
        ngram_propose(*state.values())


def test_registration() -> None:
    state = tables(slots=2, context=16, num_drafts=3, min_n=1, max_n=3, buckets=8)
    state["length"][:] = 9
    check_registration(ngram_propose, list(state.values()))
