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

from draftgraph.graphs.state import DecodeState, StateShape
from draftgraph.kernels.accept_coupled import accept_coupled_reference
from draftgraph.kernels.accept_standard import accept_standard, accept_standard_reference
from draftgraph.kernels.elementary import exp
from draftgraph.kernels.sample_target import sample_target_reference

BOTH = pytest.mark.parametrize("accept", [accept_standard, accept_standard_reference])


def sample(state: DecodeState, bucket: int) -> None:
    sample_target_reference(
        state.logits,
        state.window_rows,
        state.window_positions,
        state.cu_tokens[: bucket + 1],
        state.slot_of_row[:bucket],
        state.temperature,
        state.top_k,
        state.top_p,
        state.min_p,
        state.seed,
        state.sampled,
        state.log_normalizer,
        state.threshold,
        state.token_failed,
    )


def arguments(state: DecodeState, bucket: int, draft_probs: torch.Tensor | None) -> list[Any]:
    return [
        state.logits,
        state.sampled,
        state.log_normalizer,
        state.threshold,
        state.token_failed,
        state.window_positions,
        state.draft_tokens,
        draft_probs,
        state.temperature,
        state.seed,
        state.cu_tokens[: bucket + 1],
        state.slot_of_row[:bucket],
        state.accepted,
        state.emitted,
        state.failed,
    ]


@given(
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from([1, 2, 7, 40]),
    num_drafts=st.integers(0, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    kind=st.sampled_from(["one-hot", "random", "exact"]),
    spoil=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_cpu_equals_reference(
    seed: int, vocab: int, num_drafts: int, dtype: torch.dtype, kind: str, spoil: bool
) -> None:
    state, bucket = random_round(seed, vocab=vocab, num_drafts=num_drafts, dtype=dtype)
    set_sampling_parameters(state, seed)
    if spoil:
        generator = torch.Generator().manual_seed(seed)
        state.logits[torch.rand(state.logits.shape, generator=generator) < 0.05] = torch.nan
        state.logits[torch.rand(state.logits.shape, generator=generator) < 0.1] = -torch.inf
    sample(state, bucket)
    draft_probs = None
    if kind != "one-hot":
        noise = torch.randn((*state.draft_tokens.shape, vocab), generator=torch.Generator().manual_seed(seed + 1))
        draft_probs = noise.softmax(2)
    if kind == "exact":
        assert draft_probs is not None
        for row in range(bucket):
            begin, end = int(state.cu_tokens[row]), int(state.cu_tokens[row + 1])
            if end > begin + 1:
                draft_probs[state.slot_of_row[row], : end - begin - 1] = target_probabilities(state, row)[:-1]
    assert_same_effect(accept_standard, accept_standard_reference, arguments(state, bucket, draft_probs))


def target_probabilities(state: DecodeState, row: int) -> torch.Tensor:
    """float32 [window, V]: the filtered distributions of a row's window."""
    window = slice(int(state.cu_tokens[row]), int(state.cu_tokens[row + 1]))
    z = state.logits[window].float() / state.temperature[state.slot_of_row[row]].clamp_min(1e-3)
    p = torch.where(z >= state.threshold[window, None], (z - state.log_normalizer[window, None]).exp(), 0.0)
    return p.nan_to_num(0.0)


VOCAB, NUM_DRAFTS = 4, 2
TARGET_LOGITS = torch.tensor(
    [[1.0, 0.2, -0.7, 0.5], [0.0, 1.5, 0.3, -1.0], [-0.4, 0.6, 0.9, 0.1], [0.8, -0.2, 0.4, 1.2]]
)
DRAFT_LOGITS = torch.tensor(
    [[0.3, 0.9, -0.1, 0.0], [1.0, 0.5, -0.3, 0.2], [0.2, 0.1, 0.0, -0.5], [-1.0, 0.4, 0.6, 1.0]]
)


def speculate(
    rows: int,
    *,
    kind: str,
    verified: torch.Tensor,
    seed: int,
    accept: Any = accept_standard_reference,
    **parameters: float,
) -> tuple[DecodeState, torch.Tensor, torch.Tensor]:
    """One round of many independent rows whose target and drafter are Markov chains over four tokens.

    Args:
        rows: how many.
        kind: "full" draws drafts from the drafter and passes its distributions; "one-hot" draws them the same
            way, but passes none, as a drafter does that does not sample.
        verified: drafts in each row's window, int [rows].
        seed: of the drafts and of the rows' seeds.
        accept: the rule.
        parameters: sampling parameters of all rows.

    Returns:
        The state after the round; the target's chain p(next | token), float64 [V, V]; the drafter's,
        likewise.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = StateShape(
        slots=rows,
        context=4,
        num_drafts=NUM_DRAFTS,
        vocab_size=VOCAB,
        max_bucket=rows,
        max_width=rows * (NUM_DRAFTS + 1),
    )
    state = DecodeState.allocate(shape, dtype=torch.float32, device="cpu")
    state.slot_of_row.copy_(torch.arange(rows))
    state.seed.copy_(torch.randint(-(2**62), 2**62, (rows + 1,), generator=generator))
    state.temperature[:] = 1.0
    for name, value in parameters.items():
        getattr(state, name)[:] = value

    chain = torch.softmax(DRAFT_LOGITS, 1)
    draft_probs = torch.zeros(rows + 1, NUM_DRAFTS, VOCAB)
    previous = torch.zeros(rows, dtype=torch.long)  # every anchor is token 0
    inputs = [previous]
    for j in range(NUM_DRAFTS):
        draft_probs[:rows, j] = chain[previous]
        previous = torch.multinomial(chain[previous], 1, generator=generator)[:, 0]
        state.draft_tokens[:rows, j] = previous
        inputs.append(previous)

    window = torch.arange(NUM_DRAFTS + 1).expand(rows, -1)
    in_window = window <= verified[:, None]
    state.cu_tokens[1:] = torch.cumsum(verified + 1, 0)
    total = int(state.cu_tokens[-1])
    state.window_rows[:total] = torch.arange(rows)[:, None].expand(-1, NUM_DRAFTS + 1)[in_window].int()
    state.window_positions[:total] = window[in_window].int() + 7
    state.logits[:total] = TARGET_LOGITS[torch.stack(inputs, 1)[in_window]]
    sample(state, rows)
    accept(*arguments(state, rows, draft_probs if kind == "full" else None))

    # The target's own chain: the filters applied to the four contexts.
    contexts = torch.stack(inputs, 1)[in_window]
    first_of_context = [int((contexts == token).nonzero()[0]) for token in range(VOCAB)]
    z = TARGET_LOGITS / state.temperature[0]
    kept = z >= state.threshold[first_of_context][:, None]
    target = torch.where(kept, (z - state.log_normalizer[first_of_context][:, None]).exp(), 0.0).double()
    assert torch.allclose(target.sum(1), torch.ones(VOCAB, dtype=torch.float64), atol=1e-6)
    return state, target / target.sum(1, keepdim=True), chain.double()


def assert_distributed(outcomes: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Chi-squared over outcomes with a probability, none of the others; and a small total variation."""
    counts = torch.bincount(outcomes, minlength=len(probabilities)).double()
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities[possible] / probabilities[possible].sum() * len(outcomes)
    assert stats.chisquare(counts[possible].numpy(), expected.numpy()).pvalue > 1e-3
    variation = 0.5 * (counts / len(outcomes) - probabilities).abs().sum()
    assert variation < 1.5 * (len(probabilities) / len(outcomes)) ** 0.5


FILTERS: list[dict[str, float]] = [
    {},
    {"temperature": 0.6},
    {"top_k": 2},
    {"top_p": 0.75},
    {"top_k": 3, "min_p": 0.4, "temperature": 1.4},
]


@pytest.mark.parametrize("kind", ["full", "one-hot"])
@pytest.mark.parametrize("parameters", FILTERS)
@pytest.mark.parametrize("windows", ["full", "mixed"])
def test_joint_distribution(kind: str, parameters: dict[str, float], windows: str) -> None:
    """What is emitted, continued from the target's chain to three tokens, is distributed as that chain."""
    rows = 60_000
    generator = torch.Generator().manual_seed(99)
    verified = torch.full((rows,), NUM_DRAFTS)
    if windows == "mixed":
        verified = torch.randint(0, NUM_DRAFTS + 1, (rows,), generator=generator)
    state, target, chain = speculate(rows, kind=kind, verified=verified, seed=5, **parameters)

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

    # The first draft is accepted as often as the theory says.
    tried = verified > 0
    rate = torch.minimum(target[0], chain[0]).sum() if kind == "full" else (target[0] * chain[0]).sum()
    hits, tries = int((accepted[tried] > 0).sum()), int(tried.sum())
    assert stats.binomtest(hits, tries, float(rate)).pvalue > 1e-3


def test_equal_distributions_accept_everything() -> None:
    """q is p to the bit, from the very numbers that accept sees: no draft is ever rejected."""
    rows = 20_000
    verified = torch.full((rows,), NUM_DRAFTS)
    state, _, _ = speculate(rows, kind="one-hot", verified=verified, seed=6, top_k=3)
    logits = state.logits.view(rows, NUM_DRAFTS + 1, VOCAB)
    draft_probs = torch.zeros(rows + 1, NUM_DRAFTS, VOCAB)
    z = logits - state.log_normalizer.view(rows, -1, 1)
    p = torch.where(logits >= state.threshold.view(rows, -1, 1), exp(z.clamp_max(0.0)), 0.0)
    draft_probs[:rows] = p[:, :NUM_DRAFTS]
    # The drafts were drawn from another distribution; the first one is drawn anew from this.
    first = torch.multinomial(p[:, 0], 1, generator=torch.Generator().manual_seed(0))
    state.draft_tokens[:rows, :1] = first.int()
    accept_standard_reference(*arguments(state, rows, draft_probs))
    assert torch.all(state.accepted[:rows] >= 1)


@BOTH
@pytest.mark.parametrize("with_probabilities", [False, True])
def test_zero_temperature_is_greedy(accept: Any, with_probabilities: bool) -> None:
    for seed in range(20):
        state, bucket = random_round(seed, vocab=3)
        state.temperature[:] = 0.0
        sample(state, bucket)
        q = torch.rand(*state.draft_tokens.shape, 3, generator=torch.Generator().manual_seed(seed)).softmax(2)
        args = arguments(state, bucket, q if with_probabilities else None)
        accept(*args)
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
def test_minus_one_is_no_proposal(accept: Any) -> None:
    """The row takes the token of p that `sample_target` drew, and nothing after it."""
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
def test_a_filtered_draft_is_never_accepted(accept: Any) -> None:
    """p = 0 there, also when the drafter gives it no probability either."""
    state, _ = random_round(0, rows=1, num_drafts=1, vocab=5)
    slot = int(state.slot_of_row[0])
    state.cu_tokens[:2] = torch.tensor([0, 2])
    state.window_rows[:2] = 0
    state.temperature[:], state.top_k[:] = 1.0, 2
    state.logits[0] = torch.tensor([3.0, 2.9, 0.0, 0.0, 0.0])
    state.draft_tokens[slot, 0] = 4
    for seed in range(50):
        state.seed[slot] = seed
        sample(state, 1)
        for q in (None, torch.zeros(*state.draft_tokens.shape, 5)):
            accept(*arguments(state, 1, q))
            assert state.accepted[slot] == 0
            assert state.emitted[slot, 0] in (0, 1)


@BOTH
def test_residual_without_mass_falls_back_to_the_target(accept: Any) -> None:
    """Rounding can make every p - q vanish or negative, yet u reject."""
    state, _ = random_round(0, rows=1, num_drafts=1, vocab=3)
    slot = int(state.slot_of_row[0])
    state.cu_tokens[:2] = torch.tensor([0, 2])
    state.window_rows[:2] = 0
    state.temperature[:] = 1.0
    state.draft_tokens[slot, 0] = 1
    q = torch.full((*state.draft_tokens.shape, 3), 4.0)  # no distribution: above any p, to force the case
    rejected = 0
    for seed in range(20):
        state.seed[slot] = seed
        sample(state, 1)
        accept(*arguments(state, 1, q))
        if state.accepted[slot] == 0:
            rejected += 1
            assert state.emitted[slot, 0] == state.sampled[0]
    assert rejected > 5


def test_reference_is_capture_safe() -> None:
    state, bucket = random_round(2)
    q = torch.rand(*state.draft_tokens.shape, state.shape.vocab_size)
    check_capture_safe(accept_standard_reference, arguments(state, bucket, q))
    check_capture_safe(accept_standard_reference, arguments(state, bucket, None))


def test_registration() -> None:
    state, bucket = random_round(3)
    q = torch.rand(*state.draft_tokens.shape, state.shape.vocab_size)
    sample(state, bucket)
    check_registration(accept_standard, arguments(state, bucket, q))
    check_registration(accept_standard, arguments(state, bucket, None))
