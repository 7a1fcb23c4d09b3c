"""Checks the safetensors files of a checkpoint by their headers, before any weight is read."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from .errors import CheckpointError
from .json_text import parse_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

# A header of a checkpoint with a million tensors would be smaller.
_LARGEST_HEADER = 1 << 28


class StoredTensor(NamedTuple):
    """What a header says of one tensor."""

    file: Path
    dtype: str
    """safetensors' name of the type, such as `BF16`."""
    shape: tuple[int, ...]


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        CheckpointError: the file is missing, or is no JSON object.
    """
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return value


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Reads one file's header and compares it with the file's size.

    Raises:
        CheckpointError: the file is truncated or is no safetensors file.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > min(size - 8, _LARGEST_HEADER):
                raise CheckpointError(f"{path} is truncated or is no safetensors file ({size} bytes)")
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    try:
        header = parse_json(raw)
        header.pop("__metadata__", None)
        tensors = {name: _stored(path, entry) for name, entry in header.items()}
        end = _end(header.values())
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path} has a damaged safetensors header: {error!r}") from None
    if 8 + length + end != size:
        raise CheckpointError(f"{path} is truncated: its header tells of {8 + length + end} bytes, it has {size}")
    return tensors


def _stored(path: Path, entry: dict[str, Any]) -> StoredTensor:
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    if not isinstance(dtype, str) or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"dtype {dtype!r} with shape {list(shape)}")
    return StoredTensor(path, dtype, shape)


def _end(entries: Collection[dict[str, Any]]) -> int:
    """Where the last tensor ends; all of them follow each other without a gap."""
    end = 0
    for start, stop in sorted(tuple(entry["data_offsets"]) for entry in entries):
        if start != end or stop < start:
            raise ValueError(f"data_offsets {[start, stop]} after {end}")
        end = stop
    return end


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint, from the file headers.

    Raises:
        CheckpointError: a file is missing or damaged, or disagrees with the index.
    """
    if not (directory / INDEX_NAME).exists():
        single = directory / SINGLE_NAME
        if not single.exists():
            raise CheckpointError(f"{directory} has neither {SINGLE_NAME} nor {INDEX_NAME}")
        return read_header(single)
    weight_map = read_json(directory / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{directory / INDEX_NAME} has no weight_map of file names")
    files = sorted(set(weight_map.values()))
    absent = [name for name in files if not (directory / name).exists()]
    if absent:
        raise CheckpointError(f"{INDEX_NAME} names files that {directory} lacks: {', '.join(absent)}")
    tensors: dict[str, StoredTensor] = {}
    for name in files:
        tensors |= read_header(directory / name)
    for tensor, name in weight_map.items():
        if tensor not in tensors or tensors[tensor].file.name != name:
            raise CheckpointError(f"{INDEX_NAME} says that {name} holds {tensor}, but it does not")
    return tensors
