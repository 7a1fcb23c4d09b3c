"""Verification policies by the name of their `rejection_sample_method`."""

from __future__ import annotations

from collections.abc import Callable

from ..speculative_config import SpeculativeConfig
from .base import VerificationPolicy
from .block import BlockVerification
from .coupled import CoupledVerification
from .standard import StandardVerification
from .synthetic import SyntheticVerification, rates_of_length


def _synthetic(config: SpeculativeConfig) -> VerificationPolicy:
    depth, length = config.num_speculative_tokens, config.synthetic_acceptance_length
    if config.synthetic_acceptance_rates is not None:
        return SyntheticVerification(config.synthetic_acceptance_rates)
    assert length is not None  # SpeculativeConfig requires one of the two
    return SyntheticVerification(rates_of_length(length, depth or 0))


_POLICIES: dict[str, Callable[[SpeculativeConfig], VerificationPolicy]] = {
    StandardVerification.name: lambda config: StandardVerification(),
    BlockVerification.name: lambda config: BlockVerification(),
    SyntheticVerification.name: _synthetic,
    CoupledVerification.name: lambda config: CoupledVerification(),
}


def create_policy(config: SpeculativeConfig) -> VerificationPolicy:
    """The policy that `config` asks for."""
    return _POLICIES[config.rejection_sample_method](config)


def repeats_plain_text(config: SpeculativeConfig, temperature: float) -> bool:
    """Whether `config` promises the text that plain decoding gives for the same seed, up to rounding."""
    promise = create_policy(config).repeats_plain_text
    return promise == "always" or (promise == "greedy" and temperature == 0.0)
