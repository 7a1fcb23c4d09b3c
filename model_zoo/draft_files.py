"""The tensors of a draft checkpoint: safetensors, or PyTorch files that hold nothing but tensors."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from .errors import CheckpointError
from .safetensors_files import INDEX_NAME, SINGLE_NAME, StoredTensor, read_header, stored_tensors

_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
}
"""safetensors' names of torch's types."""


MASK_EMBEDDING = "mask_embedding"
"""The name of what a file `mask_embedding.pt` beside the weights holds: the embedding of the mask token."""


class DraftTensors:
    """Every tensor by name: what the files say of it, and its values on demand."""

    def __init__(self, stored: dict[str, StoredTensor], loaded: dict[str, torch.Tensor] | None = None) -> None:
        """Takes what the files say of each tensor, and the values of those that were read at once."""
        self.stored = stored
        self._loaded = loaded or {}

    def read(self, names: Iterator[str] | list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The values of some tensors, one after another, in any order; file by file where there are files."""
        wanted = []
        for name in names:
            if name in self._loaded:
                yield name, self._loaded[name]
            else:
                wanted.append(name)
        for path in sorted({self.stored[name].file for name in wanted}):
            with safe_open(path, framework="pt") as file:
                for name in wanted:
                    if self.stored[name].file == path:
                        yield name, file.get_tensor(name)

    @property
    def loaded(self) -> dict[str, torch.Tensor]:
        """Those that are in memory already."""
        return self._loaded

    def get(self, name: str) -> torch.Tensor:
        """The values of one tensor."""
        return next(tensor for _, tensor in self.read([name]))


def open_tensors(directory: Path) -> DraftTensors:
    """The tensors of a checkpoint's directory: of its safetensors, or else of its `.bin` and `.pt` files.

    PyTorch files are pickles, which can run code when they are read: they are read by the loader that refuses
    everything but tensors and plain containers.

    Raises:
        CheckpointError: there is none, or a file is damaged or holds something else than tensors.
    """
    tensors, mask = _open_weights(directory), directory / f"{MASK_EMBEDDING}.pt"
    if not mask.is_file():
        return tensors
    values = _mask_embedding(mask)
    fact = StoredTensor(mask, _NAMES.get(values.dtype, str(values.dtype)), tuple(values.shape))
    return DraftTensors({**tensors.stored, MASK_EMBEDDING: fact}, {**tensors.loaded, MASK_EMBEDDING: values})


def _open_weights(directory: Path) -> DraftTensors:
    if (directory / INDEX_NAME).exists() or (directory / SINGLE_NAME).exists():
        return DraftTensors(stored_tensors(directory))
    named = sorted(directory.glob("*.safetensors"))
    if named:
        stored: dict[str, StoredTensor] = {}
        for path in named:
            stored |= read_header(path)
        return DraftTensors(stored)
    found = [*directory.glob("*.bin"), *directory.glob("*.pt")]
    files = sorted(path for path in found if path.stem != MASK_EMBEDDING)
    if not files:
        raise CheckpointError(f"{directory} has no weights: neither *.safetensors nor *.bin nor *.pt files")
    loaded: dict[str, torch.Tensor] = {}
    facts: dict[str, StoredTensor] = {}
    for path in files:
        for name, tensor in _plain_tensors(path).items():
            loaded[name] = tensor
            facts[name] = StoredTensor(path, _NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
    return DraftTensors(facts, loaded)


def _mask_embedding(path: Path) -> torch.Tensor:
    """The embedding in such a file, flat: a tensor, or one in a dictionary, which may name the token beside it."""
    content = _unpickled(path)
    values = content
    if isinstance(content, dict):
        found = [value for value in content.values() if isinstance(value, torch.Tensor)]
        values = found[0] if len(found) == 1 else None
    if not isinstance(values, torch.Tensor) or not _is_plain(values):
        raise CheckpointError(f"{path} is refused: it must hold one tensor, or a dictionary with one")
    return values.flatten()


def _plain_tensors(path: Path) -> dict[str, torch.Tensor]:
    content = _unpickled(path)
    if not isinstance(content, dict) or not all(map(_is_plain, content.values())):
        raise CheckpointError(
            f"{path} is refused: it must hold one dictionary of tensors by name, dense ones, and nothing else"
        )
    return {str(name): tensor for name, tensor in content.items()}


def _unpickled(path: Path) -> object:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        first = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"{path} is refused: it is a pickle that holds more than plain tensors, and reading it could run its "
            f"code ({first}); convert it to safetensors where you trust it"
        ) from None
    except Exception as error:  # a damaged pickle can make its reader fail in any way
        raise CheckpointError(f"{path} is damaged or no PyTorch file: {error}") from None


def _is_plain(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta
