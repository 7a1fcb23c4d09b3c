"""Writes safetensors files piece by piece, so that a full disk is an error and not a signal.

The format: 8 bytes with the length of the header, the header as JSON, the tensors one after the other
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

_NAMES = {torch.int64: "I64", torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.bool: "BOOL"}


def _in_order(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Wide elements first, so that every tensor begins where its elements may."""
    return dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))


def shard_bytes(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> int:
    """How long `write_shard` makes the file."""
    return len(_header(tensors, metadata)) + sum(tensor.nbytes for tensor in tensors.values())


def write_shard(file: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Writes a file and waits until it is on the disk.

    Args:
        file: overwritten.
        tensors: contiguous, on the CPU, of int64, bfloat16, float16, float32 or bool.
        metadata: texts for the header.

    Raises:
        OSError: the disk is full, or it cannot be written; what is there then is no whole file.
    """
    with file.open("wb") as out:
        out.write(_header(tensors, metadata))
        for tensor in _in_order(tensors).values():
            out.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        out.flush()
        os.fsync(out.fileno())


def _header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in _in_order(tensors).items():
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text
