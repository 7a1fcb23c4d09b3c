"""Hidden states of a frozen target on disk, so that training need not compute them again.

A directory holds a manifest that says what the states are of, and shards: safetensors files that each hold the
states of some examples. A shard appears whole or not at all (written under another name, flushed to the disk, then
renamed), and a reader takes only shards that carry the manifest's identity and are as long as their headers say. So
after a kill or a full disk, what is there is used and what is missing is computed again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import shutil
import uuid
import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from ..errors import CheckpointError, TrainingDataError
from ..safetensors_files import read_header, read_json
from .shard_files import shard_bytes, write_shard

logger = logging.getLogger(__name__)

MANIFEST_NAME = "manifest.json"
SHARD_BYTES = 1 << 28
"""About how large a shard is: as much is lost by a kill, and kept in memory until it is written."""
FORMAT = 2

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_STORED = {"bfloat16": "BF16", "float32": "F32"}
_MOST_OPEN = 64
_KEY = "draftgraph"
_CHECKSUMS = "checksums"
_UNFINISHED = ".writing-"


@dataclass(frozen=True, kw_only=True)
class StateIdentity:
    """What stored hidden states are of; states of another identity are never used."""

    target: str
    """What tells the target's weights from others, such as `fingerprint` gives."""
    layers: tuple[int, ...]
    """Which hidden states besides the last, in the order in which they lie side by side; there may be none."""
    hidden_size: int
    """Ht, of one layer."""
    dtype: str
    """bfloat16 or float32."""
    examples: str
    """`examples_hash` of all examples."""
    count: int
    """How many examples there are."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if self.dtype not in _DTYPES:
            raise TrainingDataError(f"hidden states are kept in {' or '.join(_DTYPES)}, got {self.dtype!r}")
        if self.count < 1 or self.hidden_size < 1:
            raise TrainingDataError(
                f"hidden states are of at least one example and channel; got {self.count} examples and a hidden size "
                f"of {self.hidden_size}"
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type that states are kept in."""
        return _DTYPES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """Of the states, the last hidden state and the token itself."""
        return (len(self.layers) + 1) * self.hidden_size * self.torch_dtype.itemsize + 8

    def to_json(self) -> dict[str, Any]:
        """Types that JSON has."""
        return {"format": FORMAT, **dataclasses.asdict(self), "layers": list(self.layers)}

    def digest(self) -> str:
        """SHA-256 of all of it."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()


class StoredStates(NamedTuple):
    """What is kept of one example of T tokens."""

    tokens: torch.Tensor
    """int64 [T]."""
    states: torch.Tensor
    """[T, n*Ht], the layers side by side."""
    final: torch.Tensor
    """[T, Ht], after the target's final norm."""


class ShardStore:
    """Hidden states by example, filled in any order and read in any order.

    Offline training fills it before it begins (`for index in store.missing(): ... store.add(...)`, then `flush`);
    hybrid training adds what its first epoch computes and reads it from the second on. Processes may fill one
    directory together if no two add the same example; `refresh` then finds what the others wrote.
    """

    def __init__(
        self, directory: Path, identity: StateIdentity, *, shard_bytes: int = SHARD_BYTES, rank: int = 0
    ) -> None:
        """Opens a directory, or makes it.

        Args:
            directory: of this store alone.
            identity: of what it holds or is to hold.
            shard_bytes: how much `add` gathers before it writes a shard.
            rank: of this process among those that fill it; it removes what an earlier one of that rank left
                unfinished.

        Raises:
            TrainingDataError: the directory cannot be used, or holds states of another identity; names what differs.
        """
        self.directory, self.identity = Path(directory), identity
        self._shard_bytes, self._rank = shard_bytes, rank
        self._digest = identity.digest()
        self._held: dict[int, Path] = {}
        self._sound: set[Path] = set()
        self._checksums: dict[Path, dict[str, int]] = {}
        self._compared: set[int] = set()
        self._buffer: dict[int, StoredStates] = {}
        self._buffered = 0
        self._open: OrderedDict[Path, Any] = OrderedDict()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._check_manifest()
            for left in self.directory.glob(f"{_UNFINISHED}{rank}-*"):
                left.unlink()
        except OSError as error:
            raise TrainingDataError(
                f"hidden states cannot be kept in {str(self.directory)!r}: {error.strerror or error}"
            ) from None
        self.refresh()

    def __contains__(self, index: object) -> bool:
        return index in self._held or index in self._buffer

    def __len__(self) -> int:
        return len(self._held.keys() | self._buffer.keys())

    def missing(self) -> list[int]:
        """The examples whose states are not there yet, ascending."""
        return [index for index in range(self.identity.count) if index not in self]

    def refresh(self) -> None:
        """Finds shards that other processes have written meanwhile; damaged and foreign ones are passed over."""
        for file in sorted(self.directory.glob("states-*.safetensors")):
            if file not in self._sound:
                indices = self._sound_examples(file)
                if indices is None:
                    logger.warning(
                        "%s is damaged or holds states of something else: not used, and can be removed", file
                    )
                    continue
                self._sound.add(file)
                self._held.update(dict.fromkeys(indices, file))

    def bytes_needed(self, lengths: Iterable[int]) -> int:
        """How much room examples of these many tokens take."""
        lengths = list(lengths)
        return sum(lengths) * self.identity.bytes_per_token + 512 * len(lengths)

    def require_room(self, lengths: Iterable[int]) -> None:
        """Checks that the states of examples of these many tokens fit on the disk, before they are computed.

        Raises:
            TrainingDataError: they do not; says how many bytes are needed and how many are free.
        """
        self._require_free(self.bytes_needed(lengths))

    def add(self, index: int, tokens: torch.Tensor, states: torch.Tensor, final: torch.Tensor) -> None:
        """Takes the states of one example; writes a shard when enough are gathered. One that is held is ignored.

        Args:
            index: of the example, from 0.
            tokens: int64 [T].
            states: [T, n*Ht] of any floating type and device.
            final: [T, Ht].

        Raises:
            TrainingDataError: the index, a shape or a value is wrong, or a shard cannot be written.
        """
        if not 0 <= index < self.identity.count:
            raise TrainingDataError(f"there are {self.identity.count} examples; {index} is none of them")
        if index in self:
            return
        size, dtype = self.identity.hidden_size, self.identity.torch_dtype
        shapes = ((len(tokens),), (len(tokens), len(self.identity.layers) * size), (len(tokens), size))
        given = (tuple(tokens.shape), tuple(states.shape), tuple(final.shape))
        if given != shapes:
            raise TrainingDataError(
                f"tokens, states and final of example {index} must have the shapes {shapes}, they have {given}"
            )
        kept = [
            part.detach().to("cpu", kind, copy=True).contiguous()
            for part, kind in ((tokens, torch.int64), (states, dtype), (final, dtype))
        ]
        if not all(bool(part.isfinite().all()) for part in kept[1:]):
            raise TrainingDataError(
                f"the hidden states of example {index} are not all finite in {self.identity.dtype}: not kept"
            )
        self._buffer[index] = StoredStates(*kept)
        self._buffered += sum(part.nbytes for part in kept)
        if self._buffered >= self._shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Writes what was added since the last shard.

        Raises:
            TrainingDataError: the disk is full or cannot be written to. Nothing half-written is left, and what was to
                be written stays in memory.
        """
        if not self._buffer:
            return
        indices = sorted(self._buffer)
        tensors = {
            f"{name}.{index}": part
            for index in indices
            for name, part in zip(StoredStates._fields, self._buffer[index], strict=True)
        }
        checksums = {str(index): _checksum(self._buffer[index]) for index in indices}
        metadata = {_KEY: self._digest, _CHECKSUMS: json.dumps(checksums)}
        name = hashlib.sha256(str(indices).encode()).hexdigest()[:12]
        file = self.directory / f"states-{indices[0]:08d}-{name}.safetensors"
        need = shard_bytes(tensors, metadata)
        self._require_free(need)
        self._whole_file(file, lambda place: write_shard(place, tensors, metadata), need)
        self._checksums[file] = checksums
        self._sound.add(file)
        self._held.update(dict.fromkeys(indices, file))
        self._buffer.clear()
        self._buffered = 0

    def read(self, index: int) -> StoredStates:
        """The states of one example, mapped from the file, and compared with their checksum the first time.

        Raises:
            TrainingDataError: they are not there, or damaged.
        """
        if index in self._buffer:
            return self._buffer[index]
        if index not in self._held:
            raise TrainingDataError(f"{str(self.directory)!r} does not hold the hidden states of example {index}")
        file = self._held[index]
        try:
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt")
            self._open.move_to_end(file)
            handle = self._open[file]
            found = StoredStates(*(handle.get_tensor(f"{name}.{index}") for name in StoredStates._fields))
        except Exception as error:  # safetensors raises its own for a file that was changed or removed meanwhile
            raise TrainingDataError(f"{str(file)!r} cannot be read any more: {error}") from None
        if index not in self._compared:
            if _checksum(found) != self._checksums[file].get(str(index)):
                raise TrainingDataError(
                    f"{str(file)!r} is damaged: the hidden states of example {index} have another checksum. Remove it, "
                    "and they are computed anew"
                )
            self._compared.add(index)
        while len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)
        return found

    def close(self) -> None:
        """Lets go of the files; what was added and not flushed is lost."""
        self._open.clear()
        self._buffer.clear()
        self._buffered = 0

    def _check_manifest(self) -> None:
        """Compares the manifest with the identity; writes it where there is none."""
        file = self.directory / MANIFEST_NAME
        mine = self.identity.to_json()
        if not file.exists():
            text = json.dumps(mine, indent=2) + "\n"
            self._whole_file(file, lambda place: _write_text(place, text), len(text))
            return
        try:
            there = read_json(file)
        except CheckpointError as error:
            raise TrainingDataError(f"{error}: remove {str(self.directory)!r}, or name another directory") from None
        differing = [
            f"{key} {_short(there.get(key))} there and {_short(mine.get(key))} here"
            for key in sorted(mine.keys() | there.keys())
            if there.get(key) != mine.get(key)
        ]
        if differing:
            raise TrainingDataError(
                f"{str(self.directory)!r} holds hidden states of something else ({'; '.join(differing)}): remove it, "
                "or name another directory"
            )

    def _sound_examples(self, file: Path) -> Collection[int] | None:
        """Which examples a shard holds; None if it is not whole, or not of this identity."""
        width = self.identity.hidden_size
        try:
            header = read_header(file)
            with safe_open(file, framework="pt") as handle:
                metadata = handle.metadata() or {}
            if metadata.get(_KEY) != self._digest:
                return None
            self._checksums[file] = json.loads(metadata[_CHECKSUMS])
            indices = {int(name.partition(".")[2]) for name in header}
            expected = {f"{name}.{index}" for name in StoredStates._fields for index in indices}
            if header.keys() != expected or not all(0 <= index < self.identity.count for index in indices):
                return None
            for index in indices:
                tokens, states, final = (header[f"{name}.{index}"] for name in StoredStates._fields)
                length = tokens.shape[0]
                shapes = ((length,), (length, len(self.identity.layers) * width), (length, width))
                stored = _STORED[self.identity.dtype]
                if (tokens.shape, states.shape, final.shape) != shapes:
                    return None
                if (tokens.dtype, states.dtype, final.dtype) != ("I64", stored, stored):
                    return None
        except Exception as error:  # whatever is wrong with it, it is not used
            logger.debug("%s: %s", file, error)
            return None
        return indices

    def _whole_file(self, file: Path, write: Callable[[Path], None], need: int) -> None:
        """Makes a file that is there whole or not at all, also after a power failure."""
        place = self.directory / f"{_UNFINISHED}{self._rank}-{uuid.uuid4().hex}"
        try:
            write(place)
            try:
                place.replace(file)
            except FileNotFoundError:  # another run that began here meanwhile took it for one that was left
                write(place)
                place.replace(file)
            _flush_directory(self.directory)
        except OSError as error:
            reason = f"{str(file)!r} could not be written: {error.strerror or error}"
            raise TrainingDataError(
                f"{reason}; it needs {need} bytes, and {self._free()} are free. Make room and start again: what was "
                "written before is kept"
            ) from None
        finally:
            with contextlib.suppress(OSError):
                place.unlink(missing_ok=True)

    def _free(self) -> int:
        """Bytes that are free on the disk."""
        try:
            return shutil.disk_usage(self.directory).free
        except OSError as error:
            raise TrainingDataError(
                f"{str(self.directory)!r}, where hidden states are kept, can be used no more: {error.strerror}"
            ) from None

    def _require_free(self, need: int) -> None:
        free = self._free()
        if free < need:
            raise TrainingDataError(
                f"the hidden states need {need} bytes ({need / 1e9:.2f} GB) in {str(self.directory)!r}, and {free} "
                f"({free / 1e9:.2f} GB) are free: make room, name a directory elsewhere, or compute the states anew in "
                "every epoch"
            )


def _write_text(place: Path, text: str) -> None:
    with place.open("w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())


def _flush_directory(directory: Path) -> None:
    """Makes a rename last; some systems cannot open a directory, and there it is left to them."""
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:24]}..."


def _checksum(stored: StoredStates) -> int:
    """CRC-32 of what is kept of an example."""
    found = 0
    for part in stored:
        found = zlib.crc32(part.reshape(-1).view(torch.uint8).numpy().data, found)
    return found
