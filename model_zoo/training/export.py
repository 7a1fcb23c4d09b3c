"""Writes a head as a checkpoint that the engine loads."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from .files import replace_file
from .trainee import Trainee

CONFIG_NAME, WEIGHTS_NAME = "config.json", "model.safetensors"


def export_head(trainee: Trainee, directory: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes config.json and model.safetensors, each whole or not at all.

    Args:
        trainee: the head.
        directory: made if needed; a head that lies there is replaced.
        dtype: of the weights; integers and flags stay as they are.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).cpu().contiguous()
        for name, tensor in trainee.export_tensors().items()
    }
    with replace_file(directory / WEIGHTS_NAME) as path:
        save_file(tensors, path, metadata={"format": "pt"})
    config = {**trainee.config_json(), "torch_dtype": str(dtype).removeprefix("torch.")}
    with replace_file(directory / CONFIG_NAME) as path:
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
