"""What the regression gate remembers: counts, ratios of times and times, of one device, in a JSON file."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1
DIRECTORY = Path(__file__).with_name("baselines")
"""Where the committed baselines are, one per device."""


class BaselineError(ValueError):
    """A baseline that cannot be read or written: names the file and what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A figure that varies, measured several times when the baseline was made; smaller is better."""

    value: float
    """The median."""
    spread: float
    """The largest less the smallest, as a share of the median."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Measure:
        """From repeated measurements; raises `ValueError` without any or when one is not a positive number."""
        if not values or any(not math.isfinite(v) or v <= 0.0 for v in values):
            raise ValueError(f"a measure needs positive numbers, got {list(values)!r}")
        median = statistics.median(values)
        return cls(value=median, spread=(max(values) - min(values)) / median)

    def tolerance(self, least: float, most: float) -> float:
        """By what share a later value may exceed this one: three times the spread, within [least, most]."""
        return min(most, max(least, 3.0 * self.spread))


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Everything that was measured on one device."""

    device: str
    """The device's name; figures of another device are not compared with it, counts are."""
    made_with: Mapping[str, str] = field(default_factory=dict)
    """Versions of the packages that can change the figures."""
    counts: Mapping[str, int]
    """What does not vary, by name."""
    ratios: Mapping[str, Measure]
    """Times over times of the same run, by name."""
    seconds: Mapping[str, Measure]
    """Times, by name."""

    def save(self, path: Path) -> None:
        """Writes the file; raises `BaselineError` when it cannot be written."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=2, sort_keys=True)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise BaselineError(f"the baseline {path} cannot be written: {error.strerror or error}") from None

    @classmethod
    def load(cls, path: Path) -> Baseline:
        """Reads the file; raises `BaselineError` when there is none or it is not a baseline."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise BaselineError(f"the baseline {path} cannot be read: {error.strerror or error}") from None
        except ValueError as error:
            raise BaselineError(f"the baseline {path} is not JSON: {error}") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            found = content.get("format") if isinstance(content, dict) else type(content).__name__
            raise BaselineError(f"the baseline {path} has format {found!r}; this version reads format {FORMAT}")
        try:
            return cls(
                device=_text(content["device"]),
                made_with={name: _text(version) for name, version in content["made_with"].items()},
                counts={name: _count(value) for name, value in content["counts"].items()},
                ratios={name: _measure(value) for name, value in content["ratios"].items()},
                seconds={name: _measure(value) for name, value in content["seconds"].items()},
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise BaselineError(f"the baseline {path} is damaged: {type(error).__name__}: {error}") from None


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"a non-empty string is expected, not {value!r}")
    return value


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"a count is an integer, not {value!r}")
    return value


def _measure(value: Any) -> Measure:
    found = Measure(value=float(value["value"]), spread=float(value["spread"]))
    if not math.isfinite(found.value) or found.value <= 0.0 or not math.isfinite(found.spread) or found.spread < 0.0:
        raise ValueError(f"a measure has a positive value and a spread of at least 0, not {value!r}")
    return found


def baseline_path(device: str, directory: Path = DIRECTORY) -> Path:
    """The file of a device's baseline; it need not exist."""
    slug = "".join(letter if letter.isalnum() else "-" for letter in device.lower())
    return directory / f"{'-'.join(part for part in slug.split('-') if part)}.json"


def find_baseline(device: str, directory: Path = DIRECTORY) -> Path | None:
    """The device's own baseline, or else another's: its counts hold everywhere. None when there is none at all.

    Of several other baselines, the first in the order of their names.
    """
    own = baseline_path(device, directory)
    if own.is_file():
        return own
    return min(directory.glob("*.json"), default=None)
