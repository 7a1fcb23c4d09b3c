"""How much memory training needs, and whether it is there."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from ...model_zoo.safetensors_files import stored_tensors
from ..errors import ConfigError

_BYTES = {"float32": 4, "bfloat16": 2}
_OF_LOGITS = 3
"""Tensors as large as the logits of all drafts that are alive at once: themselves, their softmax, a gradient."""
_OF_WEIGHT = 16
"""Bytes of a float32 weight that learns, with its gradient and two moments."""


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """What decides how much memory a run needs. An estimate: activations besides logits are left out."""

    target_parameters: int
    vocab_size: int
    hidden_size: int
    dtype: str
    """Of the target."""
    head_parameters: int
    """Those that learn."""
    draft_vocab_size: int
    num_drafts: int
    batch_tokens: int

    @property
    def bytes(self) -> int:
        """All of it."""
        target = self.target_parameters * _BYTES[self.dtype]
        # Heads read the embedding and the head in float32.
        copies = 0 if self.dtype == "float32" else 2 * self.vocab_size * self.hidden_size * 4
        rows = self.draft_vocab_size * self.hidden_size * 8
        logits = self.batch_tokens * self.num_drafts * self.draft_vocab_size * 4 * _OF_LOGITS
        return target + copies + rows + self.head_parameters * _OF_WEIGHT + logits

    def that_fits(self, available: int) -> list[str]:
        """Changes that would make it fit, one each."""
        found = []
        if self.dtype == "float32" and replace(self, dtype="bfloat16").bytes <= available:
            found.append(f"--target-dtype bfloat16 ({gigabytes(replace(self, dtype='bfloat16').bytes)})")
        tokens = self.batch_tokens
        while tokens > 128:
            tokens //= 2
            smaller = replace(self, batch_tokens=tokens)
            if smaller.bytes <= available:
                found.append(f"--batch-tokens {tokens} ({gigabytes(smaller.bytes)})")
                break
        size = self.draft_vocab_size
        while size > 1024:
            size //= 2
            smaller = replace(self, draft_vocab_size=size)
            if smaller.bytes <= available:
                found.append(f"--draft-vocab-size {size} ({gigabytes(smaller.bytes)})")
                break
        return found


def need_of(
    directory: Path,
    config: Mapping[str, Any],
    *,
    dtype: str,
    head_parameters: int,
    draft_vocab_size: int,
    num_drafts: int,
    batch_tokens: int,
) -> MemoryNeed:
    """What a run needs, from a target's file headers and config.json alone.

    Args:
        directory: of the target.
        config: its config.json, of the text model.
        dtype: that the target runs in.
        head_parameters: those that learn.
        draft_vocab_size: of the head.
        num_drafts: of the head.
        batch_tokens: see `TrainingSettings`.

    Raises:
        CheckpointError: a weight file is missing or damaged.
    """
    return MemoryNeed(
        target_parameters=sum(prod(tensor.shape) for tensor in stored_tensors(directory).values()),
        vocab_size=int(config.get("vocab_size") or 0),
        hidden_size=int(config.get("hidden_size") or 0),
        dtype=dtype,
        head_parameters=head_parameters,
        draft_vocab_size=draft_vocab_size,
        num_drafts=num_drafts,
        batch_tokens=batch_tokens,
    )


def check_fits(need: MemoryNeed, available: int | None, name: str) -> None:
    """Refuses a run that needs more memory than there is.

    Args:
        need: of the run.
        available: bytes; None: unknown, and nothing is refused.
        name: of the target.

    Raises:
        ConfigError: it does not fit; says what would.
    """
    if available is None or need.bytes <= available:
        return
    fits = need.that_fits(available)
    advice = (
        f"this would fit: {'; '.join(fits)}"
        if fits
        else (f"it needs a machine with about {gigabytes(need.bytes)} free, or a smaller target")
    )
    raise ConfigError(
        f"training beside {name!r} in {need.dtype} needs about {gigabytes(need.bytes)}, and "
        f"{gigabytes(available)} are available: {advice}"
    )


def available_bytes(device: str) -> int | None:
    """Memory that a new process could use; None where the system does not say."""
    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0])
    found = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except OSError:
        return None
    try:  # a container's own limit
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            found.append(int(limit) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return max(0, min(found)) if found else None


def peak_bytes() -> int:
    """The most memory that this process had resident so far; on a GPU, see `peak_device_bytes`."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def peak_device_bytes(device: Any) -> int | None:
    """The most memory of a GPU that was allocated so far; None on the CPU."""
    if device.type != "cuda":
        return None
    import torch

    return int(torch.cuda.max_memory_allocated(device))


def gigabytes(count: int) -> str:
    """For people."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
