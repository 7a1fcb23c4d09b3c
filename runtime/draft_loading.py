"""Drafters that are language models by themselves: found and checked with the target, loaded after it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..model_zoo.checkpoint import read_config
from ..model_zoo.config import DecoderConfig
from ..model_zoo.decoder import DecoderModel
from ..profiling.speed_model import expected_tokens
from .model_sizes import model_sizes
from .models import resolve_model
from .progress import ProgressCallback
from .speculative_config import SpeculativeConfig
from .token_texts import read_vocabulary
from .tokenizer_files import load_tokenizer, tokenizer_hash
from .vocab_mapping import VocabMapping, load_mapping

logger = logging.getLogger(__name__)

_LIKELY_ACCEPTANCE = 0.8
"""A good drafter's, for estimates."""


@dataclass(frozen=True)
class DraftSource:
    """A draft model that was found, before its weights are read."""

    name: str
    """As the user gave it."""
    path: Path
    config: DecoderConfig
    hf_config: Mapping[str, Any]
    """Its config.json."""


@dataclass(frozen=True)
class LoadedDraft:
    """A draft model in memory."""

    model: DecoderModel
    mapping: VocabMapping | None
    """Between the target's vocabulary and its own; None where they are the same."""


def find_draft(config: SpeculativeConfig, progress: ProgressCallback | None) -> DraftSource | None:
    """Resolves the draft model and reads its config; None for a method that drafts without a language model.

    Raises:
        ModelNotFoundError, FetchError: there is no such model, or it could not be brought here.
        CheckpointError, UnsupportedModelError: its config.json cannot be used.
    """
    if not config.traits.language_model:
        return None
    assert config.model is not None  # SpeculativeConfig requires it
    path = resolve_model(config.model, progress=progress)
    return DraftSource(config.model, path, read_config(path), json.loads((path / "config.json").read_text()))


def check_draft(
    draft: DraftSource, target_path: Path, target: DecoderConfig, config: SpeculativeConfig
) -> VocabMapping | None:
    """The checks that need more than the config.json files, before any weight is read.

    Warns of a draft model that cannot be worth its cost, and of a tokenizer that is not the target's.

    Returns:
        The mapping between the vocabularies, if they may differ.

    Raises:
        ConfigError: the vocabularies share no token.
        CheckpointError: a tokenizer cannot be loaded.
    """
    cost = weights_per_token(draft.config) / weights_per_token(target)
    depth = config.num_speculative_tokens or 0
    if cost >= 1.0:
        best, likely = (expected_tokens(a, depth) / (1.0 + depth * cost) for a in (1.0, _LIKELY_ACCEPTANCE))
        logger.warning(
            "the draft model %s is not smaller than the target: each of its %d drafts per round reads %.2f times the "
            "weights of a target pass, so decoding would run at %.2f times the plain speed if every draft were "
            "accepted, and at %.2f times at an acceptance rate of %g",
            draft.name,
            depth,
            cost,
            best,
            likely,
            _LIKELY_ACCEPTANCE,
        )
    if config.use_heterogeneous_vocab:
        return load_mapping(target_path, draft.path, target.vocab_size, draft.config.vocab_size)
    if tokenizer_hash(draft.path) != tokenizer_hash(target_path):
        _warn_of_other_tokens(draft, target_path)
    return None


def weights_per_token(config: DecoderConfig) -> int:
    """The parameters of matrices that one token's forward reads: those of the layers, of the experts that it chooses,
    and of the head.
    """
    sizes = model_sizes(config)
    return round(sum(layer.multiply_adds(1, 1) for layer in sizes.layers)) + sizes.head


def _warn_of_other_tokens(draft: DraftSource, target_path: Path) -> None:
    """Two vocabularies of one size may still be different ones, whose drafts are never accepted."""
    ours, theirs = (read_vocabulary(load_tokenizer(path)).texts for path in (target_path, draft.path))
    same = sum(theirs.get(number) == text for number, text in ours.items())
    if same < len(ours):
        logger.warning(
            "the draft model %s has another tokenizer than the target: %d of the target's %d tokens have another "
            "meaning in it; use_heterogeneous_vocab drafts with the tokens that both have",
            draft.name,
            len(ours) - same,
            len(ours),
        )
