from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import (
    assert_same_effect,
    check_capture_safe,
    check_registration,
    random_round,
    set_sampling_parameters,
)
from scipy import stats
from test_accept_standard import (
    FILTERS,
    NUM_DRAFTS,
    VOCAB,
    arguments,
    assert_distributed,
    sample,
    speculate,
    target_probabilities,
)

from draftgraph.kernels.accept_block import accept_block, accept_block_reference
from draftgraph.kernels.accept_coupled import accept_coupled_reference
from draftgraph.kernels.accept_standard import accept_standard_reference

BOTH = pytest.mark.parametrize("accept", [accept_block, accept_block_reference])


@given(
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from([1, 2, 7, 40]),
    num_drafts=st.integers(0, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    kind=st.sampled_from(["one-hot", "random", "exact"]),
    spoil=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_cpu_equals_reference(
    seed: int, vocab: int, num_drafts: int, dtype: torch.dtype, kind: str, spoil: bool
) -> None:
    state, bucket = random_round(seed, vocab=vocab, num_drafts=num_drafts, dtype=dtype)
    set_sampling_parameters(state, seed)
    generator = torch.Generator().manual_seed(seed)
    if spoil:
        state.logits[torch.rand(state.logits.shape, generator=generator) < 0.05] = torch.nan
        state.logits[torch.rand(state.logits.shape, generator=generator) < 0.1] = -torch.inf
    sample(state, bucket)
    draft_probs = None
    if kind != "one-hot":
        draft_probs = torch.randn((*state.draft_tokens.shape, vocab), generator=generator).softmax(2)
    if kind == "exact":
        assert draft_probs is not None
        for row in range(bucket):
            begin, end = int(state.cu_tokens[row]), int(state.cu_tokens[row + 1])
            if end > begin + 1:
                draft_probs[state.slot_of_row[row], : end - begin - 1] = target_probabilities(state, row)[:-1]
    assert_same_effect(accept_block, accept_block_reference, arguments(state, bucket, draft_probs))


@pytest.mark.parametrize("kind", ["full", "one-hot"])
@pytest.mark.parametrize("parameters", FILTERS)
@pytest.mark.parametrize("windows", ["full", "mixed"])
def test_joint_distribution(kind: str, parameters: dict[str, float], windows: str) -> None:
    """What is emitted, continued from the target's chain to three tokens, is distributed as that chain."""
    rows = 60_000
    generator = torch.Generator().manual_seed(98)
    verified = torch.full((rows,), NUM_DRAFTS)
    if windows == "mixed":
        verified = torch.randint(0, NUM_DRAFTS + 1, (rows,), generator=generator)
    state, target, chain = speculate(
        rows, kind=kind, verified=verified, seed=15, accept=accept_block_reference, **parameters
    )
    emitted, accepted = state.emitted[:rows].long(), state.accepted[:rows].long()
    assert torch.all(accepted <= verified)
    sequence = emitted.clone()
    for j in range(1, NUM_DRAFTS + 1):
        more = torch.multinomial(target[sequence[:, j - 1]], 1, generator=generator)[:, 0]
        sequence[:, j] = torch.where(j <= accepted, emitted[:, j], more)
    assert_distributed(sequence[:, 0], target[0])
    code = (sequence[:, 0] * VOCAB + sequence[:, 1]) * VOCAB + sequence[:, 2]
    joint = torch.stack(
        [target[0, a] * target[a, b] * target[b, c] for a, b, c in itertools.product(range(VOCAB), repeat=3)]
    )
    assert_distributed(code, joint)

    # How many drafts are accepted on average is what the theory says (the paper's theorem 2), for two drafts:
    # the sum over their paths of the smaller of Q(path) and what P leaves of it.
    tried = verified == NUM_DRAFTS
    if kind == "full":
        expected = torch.tensor(0.0, dtype=torch.float64)
        for a, b in itertools.product(range(VOCAB), repeat=2):
            first = min(1.0, float(target[0, a] / chain[0, a]))
            path = chain[0, a] * chain[a, b]
            expected += path * min(1.0, first * float(target[a, b] / chain[a, b]))
            if b == 0:
                # Either draft accepted: min(P, Q) of the first one.
                expected += chain[0, a] * first
        counts = accepted[tried].double()
        error = counts.std() / len(counts) ** 0.5
        assert abs(counts.mean() - expected) < 4 * error


@pytest.mark.parametrize("kind", ["full", "one-hot"])
@pytest.mark.parametrize("parameters", FILTERS)
def test_accepts_at_least_as_many_as_one_by_one(kind: str, parameters: dict[str, float]) -> None:
    rows = 60_000
    verified = torch.full((rows,), NUM_DRAFTS)
    counts = []
    for accept in (accept_block_reference, accept_standard_reference):
        state, _, _ = speculate(rows, kind=kind, verified=verified, seed=5, accept=accept, **parameters)
        counts.append(state.accepted[:rows].double())
    difference = counts[0] - counts[1]
    # The same drafts and uniform numbers, so that the difference varies little.
    assert difference.mean() >= -3 * difference.std() / rows**0.5
    if kind == "full" and not parameters:
        assert stats.ttest_1samp(difference.numpy(), 0.0, alternative="greater").pvalue < 1e-6


@BOTH
@pytest.mark.parametrize("with_probabilities", [False, True])
def test_zero_temperature_is_greedy(accept: Any, with_probabilities: bool) -> None:
    for seed in range(20):
        state, bucket = random_round(seed, vocab=3)
        state.temperature[:] = 0.0
        sample(state, bucket)
        q = torch.rand(*state.draft_tokens.shape, 3, generator=torch.Generator().manual_seed(seed)).softmax(2)
        accept(*arguments(state, bucket, q if with_probabilities else None))
        expected, _ = random_round(seed, vocab=3)
        accept_coupled_reference(
            state.sampled,
            state.token_failed,
            state.draft_tokens,
            state.cu_tokens[: bucket + 1],
            state.slot_of_row[:bucket],
            expected.accepted,
            expected.emitted,
            expected.failed,
        )
        assert torch.equal(state.accepted, expected.accepted)
        assert torch.equal(state.emitted, expected.emitted)
        assert torch.equal(state.failed, expected.failed)


@BOTH
def test_minus_one_ends_the_block(accept: Any) -> None:
    state, _ = random_round(0, rows=1, num_drafts=3, vocab=5)
    slot = int(state.slot_of_row[0])
    state.cu_tokens[:2] = torch.tensor([0, 4])
    state.window_rows[:4] = 0
    state.temperature[:] = 1.0
    sample(state, 1)
    state.draft_tokens[slot] = torch.tensor([-1, 2, 3])
    accept(*arguments(state, 1, None))
    assert state.accepted[slot] == 0
    assert state.emitted[slot, 0] == state.sampled[0]


@BOTH
def test_one_draft_is_the_standard_rule(accept: Any) -> None:
    for seed in range(30):
        state, bucket = random_round(seed, num_drafts=1, vocab=5)
        set_sampling_parameters(state, seed)
        sample(state, bucket)
        other, _ = random_round(seed, num_drafts=1, vocab=5)
        q = torch.rand(*state.draft_tokens.shape, 5, generator=torch.Generator().manual_seed(seed)).softmax(2)
        accept(*arguments(state, bucket, q))
        args = arguments(state, bucket, q)
        args[12:] = [other.accepted, other.emitted, other.failed]
        accept_standard_reference(*args)
        assert torch.equal(state.accepted, other.accepted)
        assert torch.equal(state.emitted, other.emitted)


def test_reference_is_capture_safe() -> None:
    state, bucket = random_round(2)
    q = torch.rand(*state.draft_tokens.shape, state.shape.vocab_size)
    check_capture_safe(accept_block_reference, arguments(state, bucket, q))
    check_capture_safe(accept_block_reference, arguments(state, bucket, None))


def test_registration() -> None:
    state, bucket = random_round(3)
    q = torch.rand(*state.draft_tokens.shape, state.shape.vocab_size)
    sample(state, bucket)
    check_registration(accept_block, arguments(state, bucket, q))
    check_registration(accept_block, arguments(state, bucket, None))
