"""What a round costs by how much it drafts and verifies: measured once, and kept for this device and model."""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_LEAST = 1e-6
"""Milliseconds; nothing is free, and a budget divides by its cost."""


@dataclass(frozen=True)
class BucketCosts:
    """What a round of one bucket costs, in milliseconds.

    Raises:
        ValueError: a cost that is not positive and finite, or falls where there is more to do.
    """

    verify: tuple[float, ...]
    """Of each verify width, ascending: what comes after drafting, for windows that fill the width."""
    draft: tuple[float, ...]
    """K + 1 values: of drafting that makes 0 to K drafts of every row."""

    def __post_init__(self) -> None:
        for name in ("verify", "draft"):
            values = getattr(self, name)
            if not values or not all(0.0 < value < float("inf") for value in values):
                raise ValueError(f"costs of {name} must be positive milliseconds, got {values!r}")
            if any(after < before for before, after in itertools.pairwise(values)):
                raise ValueError(f"costs of {name} must not fall, got {values!r}")

    @classmethod
    def of(cls, verify: Sequence[float], draft: Sequence[float]) -> BucketCosts:
        """From what was measured: made monotone, since a measured cost that falls is noise."""
        return cls(monotone(verify), monotone(draft))


@dataclass(frozen=True)
class CostTable:
    """The costs of every bucket."""

    buckets: Mapping[int, BucketCosts]

    @classmethod
    def of(cls, buckets: Mapping[int, BucketCosts]) -> CostTable:
        """From what was measured: more rows never cost less."""
        found: dict[int, BucketCosts] = {}
        before: BucketCosts | None = None
        for bucket in sorted(buckets):
            costs = buckets[bucket]
            if before is not None:
                draft = [max(a, b) for a, b in zip(costs.draft, before.draft, strict=True)]
                verify = [max(a, b) for a, b in itertools.zip_longest(costs.verify, before.verify, fillvalue=0.0)]
                costs = BucketCosts.of(verify[: len(costs.verify)], draft)
            found[bucket] = before = costs
        return cls(found)

    def fits(self, widths: Mapping[int, Sequence[int]], num_drafts: int) -> bool:
        """Whether it is of these verify widths by bucket, and of so many drafts."""
        return self.buckets.keys() == widths.keys() and all(
            len(costs.verify) == len(widths[bucket]) and len(costs.draft) == num_drafts + 1
            for bucket, costs in self.buckets.items()
        )

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON and for `parse`."""
        return {str(bucket): asdict(costs) for bucket, costs in self.buckets.items()}

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> CostTable:
        """From `to_dict`; a `ValueError`, `KeyError` or `TypeError` where it is not that."""
        return cls(
            {
                int(bucket): BucketCosts(tuple(map(float, part["verify"])), tuple(map(float, part["draft"])))
                for bucket, part in data.items()
            }
        )


def monotone(values: Sequence[float]) -> tuple[float, ...]:
    """Each value, or the largest before it if that is larger; at least a trifle."""
    return tuple(itertools.accumulate((max(_LEAST, value) for value in values), max))


def load_costs(path: Path, key: str) -> CostTable | None:
    """The table that was kept for a key, or None: there is none, or it cannot be read, which the log says."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return CostTable.parse(kept["costs"]) if kept["key"] == key else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        logger.warning("the costs kept in %s cannot be read (%s): measuring them anew", path, error)
        return None


def save_costs(path: Path, key: str, costs: CostTable) -> None:
    """Keeps a table, whole or not at all; where the cache cannot be written to, the log says so."""
    text = json.dumps({"key": key, "costs": costs.to_dict()}, indent=2) + "\n"
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        logger.warning("the costs of rounds cannot be kept in %s (%s): they are measured each time", path, error)
