"""Tells the weights of one model from those of another, wherever they lie and however they are split into files."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from .errors import CheckpointError


def weights_identity(directory: Path) -> str:
    """SHA-256 over every tensor's name, type and shape, and of each one row, the middle one.

    A model of the same sizes has another, and so has a fine-tuned one, where any of the rows read has changed.

    Args:
        directory: of safetensors files.

    Raises:
        CheckpointError: there are none, or one of them cannot be read.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{directory} holds no safetensors files")
    parts: dict[str, bytes] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as source:
                for name in source.keys():  # noqa: SIM118 - it is no mapping
                    kept = source.get_slice(name)
                    shape = kept.get_shape()
                    # A tensor without dimensions is one number.
                    row = kept[shape[0] // 2 : shape[0] // 2 + 1] if shape else source.get_tensor(name)
                    about = f"{name}\0{kept.get_dtype()}\0{shape}\0".encode()
                    parts[name] = about + row.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from None
    digest = hashlib.sha256()
    for name in sorted(parts):
        digest.update(parts[name])
    return digest.hexdigest()
