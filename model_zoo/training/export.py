"""Writes a head as a checkpoint that the engine loads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from ..draft_files import open_tensors
from ..errors import CheckpointError
from ..safetensors_files import read_json
from .files import replace_file
from .shard_files import shard_bytes, write_shard
from .trainee import Trainee

CONFIG_NAME, WEIGHTS_NAME = "config.json", "model.safetensors"


def export_head(
    trainee: Trainee,
    directory: Path,
    dtype: torch.dtype = torch.bfloat16,
    *,
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Writes config.json and model.safetensors, each whole or not at all.

    Args:
        trainee: the head.
        directory: made if needed; a head that lies there is replaced.
        dtype: of the weights; integers and flags stay as they are.
        tensors: what `export_tensors` gave, where the head's own weights are sharded over processes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    written = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).cpu().contiguous()
        for name, tensor in (trainee.export_tensors() if tensors is None else tensors).items()
    }
    metadata = {"format": "pt"}
    with replace_file(directory / WEIGHTS_NAME, shard_bytes(written, metadata)) as path:
        write_shard(path, written, metadata)
    config = {**trainee.config_json(), "torch_dtype": str(dtype).removeprefix("torch.")}
    with replace_file(directory / CONFIG_NAME) as path:
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def import_head(trainee: Trainee, directory: Path) -> None:
    """Lets a head begin as the one that `export_head` wrote.

    Args:
        trainee: made with the same choices; it may learn to draft more or fewer tokens at once.
        directory: of the checkpoint.

    Raises:
        CheckpointError: files are missing or damaged, or it is another kind of head; names what differs.
    """
    found, own = read_json(directory / CONFIG_NAME), json.loads(json.dumps(trainee.config_json()))
    different = [
        f"{name} is {found.get(name)!r} there and {own.get(name)!r} here"
        for name in sorted({*found, *own} - _FREE)
        if found.get(name) != own.get(name)
    ]
    if different:
        raise CheckpointError(f"{directory} holds another kind of head: {'; '.join(different)}")
    tensors = open_tensors(directory)
    trainee.import_tensors(dict(tensors.read(list(tensors.stored))))


_FREE = {"speculators_config", "torch_dtype", "block_size", "base_model_name_or_path"}
"""Fields that two heads of the same kind may have differently."""
