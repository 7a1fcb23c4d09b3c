"""Speculators by the name of their method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...kernels.philox import DRAFT, TARGET
from ...model_zoo.decoder import DecoderModel, KvCache
from ...model_zoo.dflash.model import DFlashModel
from ...model_zoo.draft_head import DraftHead
from ...model_zoo.dspark.model import DSparkModel
from ...model_zoo.medusa.model import MedusaModel
from ...model_zoo.mtp.model import MtpModel
from ..errors import NotAvailableError
from ..speculative_config import SpeculativeConfig
from ..vocab_mapping import VocabMapping
from .autoregressive import AutoRegressiveSpeculator, ParallelSpeculator
from .base import BaseSpeculator
from .custom import create_custom
from .dflash import DFlashSpeculator
from .draft_model import DraftModelSpeculator
from .dspark import DSparkSpeculator
from .ensemble import EnsembleSpeculator
from .layerskip import LayerSkipSpeculator
from .medusa import MedusaSpeculator
from .multi_module import MultiModuleSpeculator
from .ngram import NgramSpeculator
from .suffix import SuffixSpeculator


@dataclass(frozen=True, kw_only=True)
class SpeculatorParts:
    """What speculators are made of besides their settings: whatever was loaded. Each method takes what it needs."""

    draft: DecoderModel | None = None
    """A drafter that is a language model by itself."""
    mapping: VocabMapping | None = None
    """Between the target's vocabulary and the drafter's, where they differ."""
    target: DecoderModel | None = None
    """The model that is verified with, of whose layers some may draft."""
    target_cache: KvCache | None = None
    """The target's keys and values."""
    head: DraftHead | MedusaModel | DFlashModel | None = None
    """A draft head that reads the target's hidden states."""
    target_states: tuple[int, ...] = ()
    """Which of them; see `BaseSpeculator.target_states`."""
    fixed_width: int | None = None
    """The one width at which the target runs in a round, where there is only one (`exact=True`)."""


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
    return DraftModelSpeculator(depth, parts.draft, stream=_stream(config), mapping=parts.mapping)


def _layerskip(config: SpeculativeConfig, parts: SpeculatorParts) -> BaseSpeculator:
    depth, exit_layer = config.num_speculative_tokens, config.exit_layer
    assert depth is not None  # SpeculativeConfig requires both
    assert exit_layer is not None
    assert parts.target is not None
    assert parts.target_cache is not None
    return LayerSkipSpeculator(
        depth,
        parts.target,
        parts.target_cache,
        exit_layer=exit_layer,
        stream=_stream(config),
        width=parts.fixed_width,
    )


def _custom(config: SpeculativeConfig, parts: SpeculatorParts) -> BaseSpeculator:
    depth, path = config.num_speculative_tokens, config.speculator
    assert depth is not None  # SpeculativeConfig requires both
    assert path is not None
    return create_custom(path, depth)


def _head(config: SpeculativeConfig, parts: SpeculatorParts) -> BaseSpeculator:
    depth, head = config.num_speculative_tokens, parts.head
    assert depth is not None
    assert head is not None  # loaded before the speculator is made
    if isinstance(head, MedusaModel):
        return MedusaSpeculator(depth, head, target_states=parts.target_states, stream=_stream(config))
    assert not isinstance(head, DFlashModel)
    if isinstance(head, MtpModel) and head.num_modules > 1:
        return MultiModuleSpeculator(depth, head, target_states=parts.target_states, stream=_stream(config))
    if head.mask_state is not None:
        return ParallelSpeculator(depth, head, target_states=parts.target_states, stream=_stream(config))
    borrows = head.config.reads_target_cache
    return AutoRegressiveSpeculator(
        depth,
        head,
        target_states=parts.target_states,
        stream=_stream(config),
        target_cache=parts.target_cache if borrows else None,
        advance_draft_positions=not borrows,
    )


def _dflash(config: SpeculativeConfig, parts: SpeculatorParts) -> BaseSpeculator:
    depth, head = config.num_speculative_tokens, parts.head
    assert depth is not None
    assert isinstance(head, DFlashModel)  # loaded before the speculator is made
    return DFlashSpeculator(depth, head, target_states=parts.target_states, stream=_stream(config))


def _dspark(config: SpeculativeConfig, parts: SpeculatorParts) -> BaseSpeculator:
    depth, head = config.num_speculative_tokens, parts.head
    assert depth is not None
    assert isinstance(head, DSparkModel)  # loaded before the speculator is made
    return DSparkSpeculator(
        depth,
        head,
        target_states=parts.target_states,
        stream=_stream(config),
        competing=config.dspark_draft_topk,
    )


def _stream(config: SpeculativeConfig) -> int | None:
    """The noise with which drafts are sampled; None for greedy drafting."""
    if config.draft_sample_method != "probabilistic":
        return None
    # Coupled verification keeps a draft that is the target's own sample, so both take the same noise. The other
    # rules need a draft that is independent of everything that is drawn after it.
    return TARGET if config.rejection_sample_method == "coupled" else DRAFT


_FACTORIES: dict[str, Factory] = {
    "none": _no_speculator,
    "ngram": _ngram,
    "suffix": _suffix,
    "draft_model": _draft_model,
    "eagle": _head,
    "eagle3": _head,
    "mtp": _head,
    "medusa": _head,
    "dflash": _dflash,
    "dspark": _dspark,
    "layerskip": _layerskip,
    "custom": _custom,
}


def create_speculator(config: SpeculativeConfig, parts: SpeculatorParts | None = None) -> BaseSpeculator | None:
    """The speculator that `config` describes, or None for plain decoding.

    Args:
        config: the settings.
        parts: what its method needs to have been loaded.

    Raises `NotAvailableError` for a method that this version does not implement.
    """
    for name in config.methods:
        if name not in _FACTORIES:
            raise NotAvailableError(
                f"method {name!r} is not implemented in this version; available: {', '.join(_FACTORIES)}"
            )
    made = [_FACTORIES[name](config, parts or SpeculatorParts()) for name in config.methods]
    members = [speculator for speculator in made if speculator is not None]
    if len(made) == 1:
        return made[0]
    assert config.num_speculative_tokens is not None
    return EnsembleSpeculator(config.num_speculative_tokens, members)
