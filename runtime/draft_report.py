"""What a draft checkpoint is, and whether it fits a target, from config files and tensor names alone."""

from __future__ import annotations

from typing import Any

from ..model_zoo.checkpoint import read_config
from ..model_zoo.config import DecoderConfig
from ..model_zoo.dflash.config import DFlashConfig
from ..model_zoo.draft_checkpoint import DraftCheckpoint, open_draft
from ..model_zoo.dspark.config import DSparkConfig
from ..model_zoo.eagle3.config import Eagle3Config
from ..model_zoo.errors import CheckpointError, UnsupportedModelError
from ..model_zoo.gemma4_assistant.config import Gemma4AssistantConfig
from ..model_zoo.medusa.config import MedusaConfig
from .head_loading import describe_layers
from .models import resolve_model
from .shipped_heads import read_note, resolve_head
from .speculative_methods import checkpoint_depth


def describe(name: str, target: str | None, numbering: str | None) -> dict[str, Any]:
    """Describes a draft head.

    Args:
        name: a directory, a hub id, or a head that comes with draftgraph, "METHOD@TARGET".
        target: the same of its target, to compare with; None: nothing is compared.
        numbering: how the checkpoint numbers the target's layers, in place of its format's way.

    Returns:
        `checkpoint`, `method`, `format`, `inside_target` (whether a target lies in the same files),
        `num_speculative_tokens` (None where it does not say), `target_hidden_size`, `hidden_states` (which of the
        target's it reads, for people), `vocabulary`, `parallel`, `block` (of a drafter of blocks: its layout, for
        people), `missing` and `unexpected` tensors, `problem` (of its tensors; None if there is none), `target`, and
        `mismatch` (None if they fit, or if no target was named), `note` (how a head that ships was made, as its
        head.json says; None of others).

    Raises:
        ModelNotFoundError, FetchError: there is no such model, or it could not be brought here.
        CheckpointError, UnsupportedModelError: it is no draft head, damaged, or of a kind that is not implemented.
    """
    path = resolve_head(name)
    checkpoint = open_draft(path, numbering=numbering)
    config = checkpoint.config
    against = None if target is None else read_config(resolve_model(target))
    return {
        "checkpoint": str(path),
        "method": config.method,
        "format": config.format,
        "inside_target": checkpoint.inside_target,
        "num_speculative_tokens": config.depth or checkpoint_depth(config.method, checkpoint.hf),
        "target_hidden_size": config.target_hidden_size,
        "hidden_states": _hidden_states(checkpoint, against),
        "vocabulary": _vocabulary(checkpoint),
        "parallel": isinstance(config, DFlashConfig)
        or (isinstance(config, Eagle3Config) and config.mask_token is not None),
        "block": _block(checkpoint),
        "missing": checkpoint.missing,
        "unexpected": checkpoint.unexpected,
        "problem": _reason(checkpoint.check),
        "note": read_note(path),
        "target": target,
        "mismatch": None if against is None else _reason(lambda: config.check_target(against)),
    }


def _hidden_states(checkpoint: DraftCheckpoint, target: DecoderConfig | None) -> str:
    config = checkpoint.config
    if isinstance(config, Gemma4AssistantConfig):
        return f"the last, after the final norm, and the target's keys and values{_sources(config, target)}"
    if not isinstance(config, Eagle3Config | DFlashConfig):
        return "the last, after the final norm"
    try:
        return describe_layers(config.aux, None if target is None else target.num_layers)
    except CheckpointError:  # which `mismatch` tells
        return describe_layers(config.aux, None)


def _block(checkpoint: DraftCheckpoint) -> str | None:
    """Layout, attention and heads of a drafter of blocks."""
    config = checkpoint.config
    if not isinstance(config, DFlashConfig):
        return None
    causal = sum(config.causal)
    parts = [
        f"block_size {config.block_size}",
        "the anchor drafts too" if config.from_anchor else "an anchor and masks",
        f"mask token {config.mask_token}{', with an embedding of its own' if config.own_mask else ''}",
        "bidirectional" if not causal else f"{causal} of {len(config.causal)} layers causal",
    ]
    if config.layers.sliding_window and "sliding_attention" in config.layers.layer_types:
        count = config.layers.layer_types.count("sliding_attention")
        parts.append(f"{count} of {len(config.causal)} layers over {config.layers.sliding_window} positions")
    if isinstance(config, DSparkConfig):
        rank = f" of rank {config.markov_rank}" if config.markov_rank else ""
        parts.append(f"{config.markov_head or 'no'} Markov head{rank}")
        parts.append("confidence head" if config.has_confidence else "no confidence head")
    return "; ".join(parts)


def _sources(config: Gemma4AssistantConfig, target: DecoderConfig | None) -> str:
    if target is None:
        return f" of {', '.join(dict.fromkeys(config.layers.layer_types))} layers"
    try:
        sources = dict(zip(config.layers.layer_types, config.source_layers(target), strict=True))
    except CheckpointError:  # which `mismatch` tells
        return ""
    return f" ({'; '.join(f'{kind}: of layer {layer}' for kind, layer in sources.items())})"


def _vocabulary(checkpoint: DraftCheckpoint) -> str:
    config = checkpoint.config
    if isinstance(config, Gemma4AssistantConfig) and config.centroids:
        groups = f"in {config.chosen_centroids:,} of {config.centroids:,} groups"
        return f"all {config.vocab_size:,} tokens, {config.logits_per_token:,} of them at a time, {groups}"
    if isinstance(config, MedusaConfig) and config.mapped:
        return f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens, by token_map (ids)"
    if config.draft_vocab_size < config.vocab_size:
        return f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens, by d2t (offsets)"
    return f"all {config.vocab_size:,} tokens"


def _reason(check: Any) -> str | None:
    try:
        check()
    except (CheckpointError, UnsupportedModelError) as error:
        return str(error)
    return None
