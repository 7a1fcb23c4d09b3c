"""Speculators by the name of their method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...kernels.philox import DRAFT, TARGET
from ...model_zoo.decoder import DecoderModel
from ..errors import NotAvailableError
from ..speculative_config import SpeculativeConfig
from ..vocab_mapping import VocabMapping
from .base import BaseSpeculator
from .draft_model import DraftModelSpeculator
from .ngram import NgramSpeculator
from .suffix import SuffixSpeculator


@dataclass(frozen=True, kw_only=True)
class SpeculatorParts:
    """What speculators are made of besides their settings: whatever was loaded. Each method takes what it needs."""

    draft: DecoderModel | None = None
    """A drafter that is a language model by itself."""
    mapping: VocabMapping | None = None
    """Between the target's vocabulary and the drafter's, where they differ."""


Factory = Callable[[SpeculativeConfig, SpeculatorParts], BaseSpeculator | None]


def _no_speculator(config: SpeculativeConfig, parts: SpeculatorParts) -> None:
    """Plain decoding has no drafter: its rounds have no propose step."""


def _ngram(config: SpeculativeConfig, parts: SpeculatorParts) -> BaseSpeculator:
    depth, shortest, longest = config.num_speculative_tokens, config.prompt_lookup_min, config.prompt_lookup_max
    assert depth is not None  # SpeculativeConfig fills all three in
    assert shortest is not None
    assert longest is not None
    return NgramSpeculator(depth, min_n=shortest, max_n=longest)


def _suffix(config: SpeculativeConfig, parts: SpeculatorParts) -> BaseSpeculator:
    depth = config.num_speculative_tokens
    assert depth is not None
    return SuffixSpeculator(
        depth,
        max_tree_depth=config.suffix_decoding_max_tree_depth,
        max_cached_requests=config.suffix_decoding_max_cached_requests,
        max_spec_factor=config.suffix_decoding_max_spec_factor,
        min_token_prob=config.suffix_decoding_min_token_prob,
    )


def _draft_model(config: SpeculativeConfig, parts: SpeculatorParts) -> BaseSpeculator:
    depth = config.num_speculative_tokens
    assert depth is not None
    assert parts.draft is not None  # loaded before the speculator is made
    stream = None
    if config.draft_sample_method == "probabilistic":
        # Coupled verification keeps a draft that is the target's own sample, so both take the same noise. The other
        # rules need a draft that is independent of everything that is drawn after it.
        stream = TARGET if config.rejection_sample_method == "coupled" else DRAFT
    return DraftModelSpeculator(depth, parts.draft, stream=stream, mapping=parts.mapping)


_FACTORIES: dict[str, Factory] = {
    "none": _no_speculator,
    "ngram": _ngram,
    "suffix": _suffix,
    "draft_model": _draft_model,
}


def create_speculator(config: SpeculativeConfig, parts: SpeculatorParts | None = None) -> BaseSpeculator | None:
    """The speculator that `config` describes, or None for plain decoding.

    Args:
        config: the settings.
        parts: what its method needs to have been loaded.

    Raises `NotAvailableError` for a method that this version does not implement.
    """
    factory = _FACTORIES.get(config.method)
    if factory is None:
        raise NotAvailableError(
            f"method {config.method!r} is not implemented in this version; available: {', '.join(_FACTORIES)}"
        )
    return factory(config, parts or SpeculatorParts())
