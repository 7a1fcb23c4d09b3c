from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import (
    assert_same_effect,
    bits,
    check_capture_safe,
    check_registration,
    random_round,
    set_sampling_parameters,
)
from scipy import stats
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftgraph.graphs.state import DecodeState, StateShape
from draftgraph.kernels.philox import TARGET, gumbel
from draftgraph.kernels.sample_target import sample_target, sample_target_reference

BOTH = pytest.mark.parametrize("sample", [sample_target, sample_target_reference])


def arguments(state: DecodeState, bucket: int) -> list[Any]:
    return [
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
    ]


def one_row(
    logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    first_position: int = 0,
) -> DecodeState:
    """A bucket of one row, whose window has all the given logits."""
    width, vocab = logits.shape
    shape = StateShape(
        slots=1,
        context=4,
        num_drafts=0,
        vocab_size=vocab,
        max_bucket=1,
        max_width=width,
    )
    state = DecodeState.allocate(shape, dtype=logits.dtype, device="cpu")
    state.slot_of_row[0], state.cu_tokens[1] = 0, width
    state.window_rows[:] = 0
    state.window_positions.copy_(torch.arange(width) + first_position)
    state.logits.copy_(logits)
    state.temperature[0], state.top_k[0], state.top_p[0], state.min_p[0] = temperature, top_k, top_p, min_p
    state.seed[0] = seed
    return state


@given(
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from([1, 2, 7, 33, 260]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    coarse=st.booleans(),
    spoil=st.sampled_from([None, math.nan, math.inf, -math.inf]),
)
@settings(max_examples=300, deadline=None)
def test_cpu_equals_reference(seed: int, vocab: int, dtype: torch.dtype, coarse: bool, spoil: float | None) -> None:
    state, bucket = random_round(seed, vocab=vocab, dtype=dtype)
    set_sampling_parameters(state, seed)
    if coarse:  # many ties
        state.logits.copy_(state.logits.round() + 0.0)
    if spoil is not None:
        generator = torch.Generator().manual_seed(seed)
        state.logits[torch.rand(state.logits.shape, generator=generator) < 0.2] = spoil
    assert_same_effect(sample_target, sample_target_reference, arguments(state, bucket))


def oracle_kept(z: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """The filters one after another, token by token, in float64."""
    kept = set(range(len(z)))
    if 0 < top_k < len(z):
        kth = sorted(z, reverse=True)[top_k - 1]
        kept = {token for token in kept if z[token] >= kth}
    top = max(z)
    if top_p < 1:
        total = math.fsum(math.exp(z[token] - top) for token in kept)
        mass, last = 0.0, top
        for token in sorted(kept, key=lambda token: -z[token]):
            mass += math.exp(z[token] - top) / total
            last = z[token]
            if mass >= top_p:
                break
        kept = {token for token in kept if z[token] >= last}
    return {token for token in kept if math.exp(z[token] - top) >= min_p}


@BOTH
@pytest.mark.parametrize("coarse", [False, True])
def test_filters_against_oracle(sample: Any, coarse: bool) -> None:
    rng = np.random.default_rng(int(coarse))
    for case in range(300):
        vocab = int(rng.integers(1, 40))
        values = rng.normal(0, 2, vocab)
        logits = torch.tensor(np.round(values) if coarse else values, dtype=torch.float32)[None]
        top_k = int(rng.choice([0, 1, rng.integers(1, vocab + 3)]))
        # An irregular top-p: with ties a regular one can equal a sum of probabilities up to rounding.
        top_p = float(np.float32(rng.choice([1.0, rng.uniform(0.01, 0.999)])))
        min_p = float(np.float32(rng.choice([0.0, rng.uniform(0.001, 1)])))
        temperature = float(np.float32(rng.uniform(0.2, 2)))
        state = one_row(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=case)
        sample(*arguments(state, 1))
        z = logits[0] / torch.tensor(temperature)
        kept = oracle_kept(z.tolist(), top_k, top_p, min_p)
        assert set(torch.nonzero(z >= state.threshold[0]).flatten().tolist()) == kept
        if len(kept) == vocab:
            assert state.threshold[0] == -math.inf
        else:
            assert state.threshold[0] == min(z[token] for token in kept)
        indices = torch.tensor(sorted(kept))
        assert state.log_normalizer[0].item() == pytest.approx(z[indices].double().logsumexp(0).item(), abs=2e-6)
        noise = gumbel(torch.tensor(case), torch.tensor(1), TARGET, indices)
        assert state.sampled[0] == indices[(z[indices] + noise).argmax()]
        assert not state.token_failed[0]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(0.7, 50, 1.0, 0.0), (1.3, 0, 0.9, 0.0), (1.0, 0, 1.0, 0.05), (0.8, 40, 0.95, 0.02), (2.0, 3, 0.5, 0.3)],
)
def test_filters_against_transformers(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = 3 * torch.randn(40, 5003, generator=torch.Generator().manual_seed(1))
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    theirs = warpers(torch.zeros(40, 1, dtype=torch.long), logits.clone()) > -math.inf
    state = one_row(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    sample_target(*arguments(state, 1))
    ours = logits / torch.tensor(temperature) >= state.threshold[:, None]
    assert torch.equal(ours, theirs)
    assert torch.all(theirs.gather(1, state.sampled[:, None].long()))


@BOTH
def test_greedy_takes_the_lowest_id_of_the_largest(sample: Any) -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0, -1.0], [2.0, 1.0, -math.inf, 2.0]])
    state = one_row(logits, temperature=0.0, top_k=1, top_p=0.1)
    sample(*arguments(state, 1))
    assert state.sampled.tolist() == [1, 0]
    assert state.log_normalizer.tolist() == [5.0, 2.0]
    assert state.threshold.tolist() == [5.0, 2.0]


@BOTH
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_failures(sample: Any, temperature: float) -> None:
    inf, nan = math.inf, math.nan
    rows = [
        [1.0, nan, 2.0],
        [1.0, inf, 2.0],
        [-inf, -inf, -inf],
        [nan, nan, nan],
        [1.0, -inf, 2.0],
        [1.0, 0.0, 9.0],
    ]
    state = one_row(torch.tensor(rows), temperature=temperature, top_p=0.9)
    sample(*arguments(state, 1))
    assert state.token_failed.tolist() == [True, True, True, True, False, False]
    assert state.sampled[:4].tolist() == [0, 0, 0, 0]
    assert torch.isfinite(state.log_normalizer).all()


@BOTH
def test_excluded_tokens_are_never_sampled(sample: Any) -> None:
    logits = torch.zeros(200, 6)
    logits[:, ::2] = -math.inf
    state = one_row(logits, temperature=5.0)
    sample(*arguments(state, 1))
    assert set(state.sampled.tolist()) == {1, 3, 5}
    assert state.log_normalizer[0].item() == pytest.approx(math.log(3))


@BOTH
def test_padding_is_untouched(sample: Any) -> None:
    state = one_row(torch.randn(5, 6, generator=torch.Generator().manual_seed(0)))
    state.cu_tokens[1] = 3
    state.window_rows[3:] = -1
    state.sampled[3:], state.log_normalizer[3:], state.threshold[3:], state.token_failed[3:] = (
        99,
        98,
        97,
        True,
    )
    sample(*arguments(state, 1))
    assert state.sampled[3:].tolist() == [99, 99]
    assert state.log_normalizer[3:].tolist() == [98, 98]
    assert state.threshold[3:].tolist() == [97, 97]
    assert state.token_failed.tolist() == [False, False, False, True, True]


@BOTH
def test_a_position_does_not_depend_on_its_neighbours(sample: Any) -> None:
    """The bits of a position alone and in a batch, at an odd vocabulary so that alignments differ."""
    logits = 4 * torch.randn(9, 1237, generator=torch.Generator().manual_seed(2))
    for parameters in ({}, {"top_p": 0.8}, {"top_k": 30, "min_p": 0.1}):
        together = one_row(logits, first_position=5, seed=3, **parameters)
        sample(*arguments(together, 1))
        for t in range(9):
            alone = one_row(logits[t : t + 1], first_position=5 + t, seed=3, **parameters)
            sample(*arguments(alone, 1))
            assert alone.sampled[0] == together.sampled[t]
            assert bits(alone.log_normalizer)[0] == bits(together.log_normalizer)[t]
            assert bits(alone.threshold)[0] == bits(together.threshold)[t]


@pytest.mark.parametrize("parameters", [{}, {"top_k": 5}, {"top_p": 0.7, "temperature": 1.5}])
def test_distribution(parameters: dict[str, Any]) -> None:
    """Over positions, the tokens follow the filtered softmax (by the reference, in one call)."""
    draws = 50_000
    logits = torch.tensor([1.0, 0.3, -0.5, 2.0, 0.0, -2.0, 1.5, 0.9]).expand(draws, -1)
    state = one_row(logits, seed=11, **parameters)
    sample_target_reference(*arguments(state, 1))
    z = logits[0] / parameters.get("temperature", 1.0)
    p = torch.where(z >= state.threshold[0], (z - state.log_normalizer[0]).exp(), 0.0).double()
    assert p.sum().item() == pytest.approx(1.0, abs=1e-6)
    counts = torch.bincount(state.sampled.long(), minlength=8).double()
    assert counts[p == 0].sum() == 0
    test = stats.chisquare(counts[p > 0].numpy(), (p[p > 0] / p.sum() * draws).numpy())
    assert test.pvalue > 1e-3


def test_large_vocabulary_against_reference() -> None:
    logits = (3 * torch.randn(4, 49152, generator=torch.Generator().manual_seed(4))).bfloat16()
    for parameters in ({}, {"top_p": 0.95}, {"top_p": 0.99999}, {"top_k": 50, "top_p": 0.9}, {"min_p": 0.05}):
        state = one_row(logits, temperature=0.9, seed=5, **parameters)
        assert_same_effect(sample_target, sample_target_reference, arguments(state, 1))


def test_reference_is_capture_safe() -> None:
    check_capture_safe(sample_target_reference, arguments(*random_round(2)))


def test_registration() -> None:
    check_registration(sample_target, arguments(*random_round(3)))
