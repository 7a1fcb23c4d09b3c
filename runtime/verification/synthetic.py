"""Synthetic acceptance: drafts stand at given rates, for benchmarks; the text is not the target's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch

from ...graphs import DecodeState
from ...kernels.accept_synthetic import accept_synthetic
from .base import VerificationPolicy


def rates_of_length(length: float, num_drafts: int) -> tuple[float, ...]:
    """The shares of rounds that accept drafts 1 to i, for i up to `num_drafts`, so that rounds emit `length` tokens.

    All rounds accept the whole part of `length - 1` drafts, and the fraction of them one more.
    """
    whole = math.floor(length - 1)
    rates = [1.0] * whole + [length - 1 - whole] + [0.0] * num_drafts
    return tuple(rates[:num_drafts])


def conditional_rates(rates: Sequence[float]) -> tuple[float, ...]:
    """c_i = r_i / r_(i-1): the chance of draft i given that those before it are accepted; 0 after a rate of 0."""
    previous = [1.0, *rates]
    return tuple(rate / before if before > 0.0 else 0.0 for rate, before in zip(rates, previous, strict=False))


class SyntheticVerification(VerificationPolicy):
    """Draft i is accepted at its rate whatever the logits say. What it measures is speed at an acceptance."""

    name: ClassVar[str] = "synthetic"
    repeats_plain_text = "never"
    allows_any_budget = True

    _rates: torch.Tensor

    def __init__(self, rates: Sequence[float]) -> None:
        """Takes the share of rounds that accept drafts 1 to i, non-increasing, for each i up to K."""
        self._conditional = conditional_rates(rates)

    def allocate(self, state: DecodeState) -> None:
        """Puts the K conditional rates on the device."""
        self._rates = torch.tensor(self._conditional, dtype=torch.float32).to(state.device)

    def judge(self, state: DecodeState, bucket: int) -> None:
        """Draws which drafts stand."""
        accept_synthetic(
            state.sampled,
            state.token_failed,
            state.window_positions,
            state.draft_tokens,
            self._rates,
            state.seed,
            state.cu_tokens[: bucket + 1],
            state.slot_of_row[:bucket],
            state.accepted,
            state.emitted,
            state.failed,
        )
