"""Loads a model from a directory with config.json and safetensors files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from .config import DecoderConfig
from .decoder import CompileRegion, DecoderModel, identity
from .errors import CheckpointError, UnsupportedModelError
from .hf_config import token_ids
from .placement import Placement, WeightBuilder, decoder_placements
from .registry import Family, family_of
from .safetensors_files import StoredTensor, read_json, stored_tensors

ACCEPTED_DTYPES = ("BF16", "F16", "F32")
"""Stored types, by safetensors' names."""


_OF_HEADS = ("speculators_model_type", "speculators_config", "medusa_num_heads", "draft_vocab_size", "dflash_config")
"""Fields that only draft heads have."""


def _family(path: Path, hf: Mapping[str, Any]) -> Family:
    """Of a config.json. The errors name the file, and say if it is a draft head's."""
    found = [name for name in _OF_HEADS if hf.get(name) is not None]
    if found:
        raise CheckpointError(
            f"{path} is that of a draft head, not of a model: it has {found[0]}; name the model that it drafts for"
        )
    if not hf.get("model_type"):
        raise CheckpointError(f"{path} lacks model_type")
    try:
        return family_of(hf)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{path}: {error}") from None


def _read(directory: Path) -> tuple[DecoderConfig, Family]:
    hf = read_json(directory / "config.json")
    family = _family(directory / "config.json", hf)
    try:
        config = family.read_config(hf)
    except UnsupportedModelError:
        raise
    except (CheckpointError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{directory / 'config.json'} does not describe a model: {reason}") from error
    generation = directory / "generation_config.json"
    if generation.exists():
        # What generation stops at; config.json often names only the first of several.
        ids = token_ids(read_json(generation).get("eos_token_id"))
        if ids:
            config = dataclasses.replace(config, eos_token_ids=ids)
    return config, family


def read_config(directory: str | Path) -> DecoderConfig:
    """Reads a checkpoint's config.json, and the end tokens of its generation_config.json.

    Raises:
        CheckpointError: the file is missing, damaged or incomplete.
        UnsupportedModelError: the family, or a choice in it, is not implemented.
    """
    return _read(Path(directory))[0]


def _some(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def _check(placements: Mapping[str, Placement], tensors: Mapping[str, StoredTensor], directory: Path) -> None:
    missing = [name for name in placements if name not in tensors]
    if missing:
        raise CheckpointError(f"{directory} lacks tensors: {_some(missing)}")
    unexpected = [name for name in tensors if name not in placements]
    if unexpected:
        raise CheckpointError(f"{directory} has tensors that its configuration has no use for: {_some(unexpected)}")
    for name, placement in placements.items():
        stored = tensors[name]
        if stored.dtype not in ACCEPTED_DTYPES:
            raise CheckpointError(
                f"{name} in {stored.file} is stored as {stored.dtype}; accepted: {', '.join(ACCEPTED_DTYPES)}"
            )
        # Ernie keeps its routers' biases as a matrix of one row.
        if stored.shape not in (placement.shape, (1, *placement.shape)):
            raise CheckpointError(
                f"{name} in {stored.file} has shape {list(stored.shape)}, "
                f"but config.json makes it {list(placement.shape)}"
            )


def load_model(
    directory: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    compile_region: CompileRegion = identity,
    max_positions: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> DecoderModel:
    """Loads a checkpoint, tensor by tensor, straight into the fused weights.

    Every file's header is checked before any weight is read. Memory peaks at the weights in `dtype`, one more
    of the largest matrix, and the file that is being read.

    Args:
        directory: holds config.json and model.safetensors, or an index and its files.
        dtype: of the weights, and of the computation.
        device: where to.
        compile_region: see `DecoderModel`.
        max_positions: see `DecoderModel`.
        progress: called with the tensors read, their number, and "loading weights".

    Raises:
        CheckpointError: files are missing or damaged, or disagree with config.json.
        UnsupportedModelError: the family, or a choice in it, is not implemented.
    """
    directory = Path(directory)
    config, family = _read(directory)
    last = config.num_layers
    # Modules for multi-token prediction belong to a drafter.
    unused = ("mtp.", *(f"model.layers.{layer}." for layer in range(last, last + config.num_next_token_layers)))
    # Layers that read another's keys and values may be stored with unused projections for them.
    for layer in range(config.num_cached_layers, last):
        unused += tuple(f"model.layers.{layer}.self_attn.{part}." for part in ("k_proj", "v_proj", "k_norm", "v_norm"))
    if config.tie_word_embeddings:
        unused += ("lm_head.weight",)
    # Names in the files, by the names that the placements use.
    names: dict[str, str] = {}
    tensors: dict[str, StoredTensor] = {}
    for name, stored in stored_tensors(directory).items():
        known = family.rename(name)
        if known is None or known.startswith(unused):
            continue
        names[known] = name
        tensors[known] = stored
    fused = any(name.endswith(".experts.gate_up_proj") for name in tensors)
    placements = decoder_placements(config, family.layer_norms, fused_experts=fused)
    _check(placements, tensors, directory)

    builder = WeightBuilder(config, placements, dtype=dtype, device=str(device))
    done = 0
    for path in sorted({stored.file for stored in tensors.values()}):
        with safe_open(path, framework="pt") as file:
            # Layer by layer, so that few weights wait for their other parts.
            held = [name for name, stored in tensors.items() if stored.file == path]
            for name in sorted(held, key=lambda name: (placements[name].layer or 0, placements[name].field)):
                if progress is not None:
                    progress(done, len(tensors), "loading weights")
                builder.add(name, file.get_tensor(names[name]))
                done += 1
    if progress is not None:
        progress(done, len(tensors), "loading weights")
    return DecoderModel(config, builder.build(), max_positions=max_positions, compile_region=compile_region)
