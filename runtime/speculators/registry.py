"""Speculators by the name of their method."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import NotAvailableError
from ..speculative_config import SpeculativeConfig
from .base import BaseSpeculator
from .ngram import NgramSpeculator

Factory = Callable[[SpeculativeConfig], BaseSpeculator | None]


def _no_speculator(config: SpeculativeConfig) -> None:
    """Plain decoding has no drafter: its rounds have no propose step."""


def _ngram(config: SpeculativeConfig) -> BaseSpeculator:
    depth, shortest, longest = config.num_speculative_tokens, config.prompt_lookup_min, config.prompt_lookup_max
    assert depth is not None  # SpeculativeConfig fills all three in
    assert shortest is not None
    assert longest is not None
    return NgramSpeculator(depth, min_n=shortest, max_n=longest)


_FACTORIES: dict[str, Factory] = {"none": _no_speculator, "ngram": _ngram}


def create_speculator(config: SpeculativeConfig) -> BaseSpeculator | None:
    """The speculator that `config` describes, or None for plain decoding.

    Raises `NotAvailableError` for a method that this version does not implement.
    """
    factory = _FACTORIES.get(config.method)
    if factory is None:
        raise NotAvailableError(
            f"method {config.method!r} is not implemented in this version; available: {', '.join(_FACTORIES)}"
        )
    return factory(config)
