"""Draft heads that read the target: found and checked with the target, loaded after it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..model_zoo.config import DecoderConfig
from ..model_zoo.dflash.config import MOST_QUERIES, DFlashConfig
from ..model_zoo.dflash.model import DFlashModel
from ..model_zoo.draft_checkpoint import DraftCheckpoint, open_draft
from ..model_zoo.draft_config import AuxLayers
from ..model_zoo.draft_head import DraftHead
from ..model_zoo.eagle3.config import Eagle3Config
from ..model_zoo.medusa.config import MedusaConfig
from ..model_zoo.medusa.model import MedusaModel
from ..model_zoo.mtp.config import MtpConfig
from .errors import ConfigError
from .progress import ProgressCallback
from .shipped_heads import resolve_head
from .speculative_config import SpeculativeConfig
from .speculative_methods import METHODS

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeadSource:
    """A draft head that was found, before its weights are read."""

    name: str
    """As the user gave it."""
    checkpoint: DraftCheckpoint

    @property
    def hf_config(self) -> Mapping[str, Any]:
        """Its config.json, corrected where the weights say otherwise: Medusa's often counts other heads, and not all
        tell how many prediction modules there are.
        """
        config = self.checkpoint.config
        if isinstance(config, MedusaConfig):
            return {**self.checkpoint.hf, "medusa_num_heads": config.num_heads}
        if isinstance(config, MtpConfig):
            return {**self.checkpoint.hf, "n_predict": config.num_modules}
        return self.checkpoint.hf


@dataclass(frozen=True)
class LoadedHead:
    """A draft head in memory."""

    model: DraftHead | MedusaModel | DFlashModel
    target_states: tuple[int, ...]
    """Which of the target's hidden states it reads; see `BaseSpeculator.target_states`."""


def find_head(config: SpeculativeConfig, target: Path, progress: ProgressCallback | None) -> HeadSource | None:
    """Resolves the draft head and reads its config and the names of its tensors; None for a method without one.

    Args:
        config: names it. Where it names none the target's own checkpoint is searched for one.
        target: the target's directory.
        progress: told about downloads.

    Raises:
        ModelNotFoundError, FetchError: there is no such model, or it could not be brought here.
        CheckpointError, UnsupportedModelError: it is of another kind, damaged or incomplete.
    """
    readers = [name for name in config.methods if METHODS[name].reads_target]
    if not readers:
        return None
    path = target if config.model is None else resolve_head(config.model, progress)
    checkpoint = open_draft(path, readers[0], numbering=config.aux_layer_numbering)
    checkpoint.check()
    return HeadSource(config.model or str(target), checkpoint)


def check_head(head: HeadSource, target: DecoderConfig, speculative: SpeculativeConfig) -> tuple[int, ...]:
    """The checks that need the target's configuration and K, before any weight is read.

    Returns:
        Which of the target's hidden states the head reads; see `BaseSpeculator.target_states`.

    Raises:
        CheckpointError: the head does not fit the target.
        ConfigError: the head cannot draft as it is asked to.
    """
    config, depth = head.checkpoint.config, speculative.num_speculative_tokens or 0
    config.check_target(target)
    if isinstance(config, MedusaConfig) and depth > config.num_heads:
        raise ConfigError(
            f"num_speculative_tokens is {depth}, but {head.name} has {config.num_heads} Medusa heads: use at most "
            f"{config.num_heads}"
        )
    if isinstance(config, Eagle3Config):
        if speculative.parallel_drafting and config.mask_token is None:
            raise ConfigError(
                f"parallel_drafting needs a head that was made for it, but {head.name} has no mask_hidden: leave the "
                "option out"
            )
        logger.info("%s reads the target's %s", head.name, describe_layers(config.aux, target.num_layers))
    if isinstance(config, DFlashConfig):
        _check_block(head.name, config, speculative)
        logger.info("%s reads the target's %s", head.name, describe_layers(config.aux, target.num_layers))
    return config.states_of(target)


def _check_block(name: str, config: DFlashConfig, speculative: SpeculativeConfig) -> None:
    """What a drafter of blocks can be asked for."""
    depth, most = speculative.num_speculative_tokens or 0, min(config.most_drafts, MOST_QUERIES - config.queries(0))
    if depth > most:
        anchor = "" if config.from_anchor else ", one place of which holds the anchor"
        raise ConfigError(
            f"num_speculative_tokens is {depth}, but {name} has a block_size of {config.block_size}{anchor}: use at "
            f"most {most}"
        )
    if depth < most and not all(config.causal):
        logger.warning(
            "%s was trained to draft %d tokens at once, which all see each other, and is asked for %d: it may draft "
            "others than it was trained to",
            name,
            config.most_drafts,
            depth,
        )
    competing = speculative.dspark_draft_topk
    if competing is not None and competing > config.draft_vocab_size:
        raise ConfigError(
            f"dspark_draft_topk is {competing}, but {name} drafts {config.draft_vocab_size} tokens: use at most "
            f"{config.draft_vocab_size}"
        )


def describe_layers(aux: AuxLayers, num_layers: int | None) -> str:
    """Which hidden states a head reads, and how its numbers were understood, for people."""
    stored = "none given" if aux.stored is None else ", ".join(map(str, aux.stored))
    read_as = f"{stored}, read as {aux.numbering} ({aux.source})"
    if num_layers is None:
        return f"layers {read_as}"
    return f"hidden states {', '.join(map(str, aux.of_target(num_layers)))} (layers {read_as})"
