"""How fast a device moves bytes and multiplies matrices: measured once, and kept on disk."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .clocks import Clock, clock_for

logger = logging.getLogger(__name__)

_BUFFER_BYTES = 256 * 2**20
"""Beyond every cache of one socket or GPU that is in use."""
_LONG_ENOUGH = 0.02
"""Seconds of one sample: so long that starting and stopping the clock does not count."""
_SAMPLES = 5
_SMALLEST_SIDE, _LARGEST_SIDE = 512, 8192


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """What a device was seen to reach."""

    device: str
    """Its name."""
    threads: int
    """CPU threads that took part."""
    torch_version: str
    copy_bandwidth: float
    """Bytes per second, read and written, of copying a buffer far larger than the caches."""
    read_bandwidth: float
    """Bytes per second of summing such a buffer."""
    matmul: Mapping[str, float]
    """Operations per second of square matrix products by dtype, such as "bfloat16"; a multiply-add is two."""

    def __post_init__(self) -> None:
        for name, value in (
            ("copy_bandwidth", self.copy_bandwidth),
            ("read_bandwidth", self.read_bandwidth),
            *((f"matmul[{kind}]", rate) for kind, rate in self.matmul.items()),
        ):
            if not value > 0.0:
                raise ValueError(f"{name} must be positive, got {value!r}")

    @property
    def bandwidth(self) -> float:
        """Bytes per second at which memory can be used at best."""
        return max(self.copy_bandwidth, self.read_bandwidth)

    def operations_per_second(self, dtype: torch.dtype) -> float:
        """The rate of matrix products in `dtype`; raises `ValueError` when it was not measured."""
        name = _name(dtype)
        if name not in self.matmul:
            raise ValueError(f"no matmul rate for {name} was measured; measured: {', '.join(self.matmul)}")
        return self.matmul[name]

    def to_dict(self) -> dict[str, Any]:
        """In types that JSON has."""
        return {**dataclasses.asdict(self), "matmul": dict(self.matmul)}


def measure_rates(device: torch.device | str, dtypes: tuple[torch.dtype, ...]) -> DeviceRates:
    """Measures a device now, the best of a few samples each; takes about a second. Other work makes it slower."""
    device = torch.device(device)
    clock = clock_for(device)
    source = torch.ones(_BUFFER_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return DeviceRates(
        device=clock.device_name(),
        threads=torch.get_num_threads(),
        torch_version=torch.__version__,
        copy_bandwidth=2 * _BUFFER_BYTES / best_seconds(lambda: target.copy_(source), clock),
        read_bandwidth=_BUFFER_BYTES / best_seconds(source.sum, clock),
        matmul={_name(dtype): _matmul_rate(device, dtype, clock) for dtype in dtypes},
    )


def load_rates(
    directory: Path, device: torch.device | str, dtypes: tuple[torch.dtype, ...], *, again: bool = False
) -> DeviceRates:
    """The rates of a device as kept in `directory`, measured first where they are not.

    They are kept by the device's name, the number of threads and the version of torch, one JSON file each.

    Args:
        directory: of the kept rates; made if needed. Where it cannot be written to, a warning says so.
        device: to measure.
        dtypes: of the matrix products that must be known.
        again: measure even if they are kept.
    """
    file = directory / _file_name(clock_for(device).device_name(), torch.get_num_threads(), torch.__version__)
    kept = None if again else _read(file)
    missing = tuple(dtype for dtype in dtypes if kept is None or _name(dtype) not in kept.matmul)
    if kept is not None and not missing:
        return kept
    rates = measure_rates(device, missing)
    if kept is not None:
        rates = dataclasses.replace(kept, matmul={**kept.matmul, **rates.matmul})
    try:
        _write(file, rates)
    except OSError as error:
        logger.warning("the measured rates cannot be kept in %s (%s)", directory, error.strerror or error)
    return rates


def best_seconds(function: Callable[[], Any], clock: Clock) -> float:
    """Seconds of one call: the best of a few samples, each of as many calls as it takes to be long enough."""
    function()
    calls = 1
    while True:
        seconds = _sample(function, clock, calls)
        if seconds >= _LONG_ENOUGH:
            break
        calls *= 2
    best = min([seconds, *(_sample(function, clock, calls) for _ in range(_SAMPLES - 1))])
    return best / calls


def _sample(function: Callable[[], Any], clock: Clock, calls: int) -> float:
    start = clock.mark()
    for _ in range(calls):
        function()
    return clock.seconds(start, clock.mark())


def _matmul_rate(device: torch.device, dtype: torch.dtype, clock: Clock) -> float:
    """The best rate over growing sizes, up to the first that takes long enough by itself."""
    best, side = 0.0, _SMALLEST_SIDE
    while True:
        left, right = (torch.ones((side, side), dtype=dtype, device=device) for _ in range(2))
        seconds = best_seconds(lambda left=left, right=right: left @ right, clock)  # type: ignore[misc]
        best = max(best, 2 * side**3 / seconds)
        if seconds >= _LONG_ENOUGH or side >= _LARGEST_SIDE:
            return best
        side *= 2


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _file_name(device: str, threads: int, version: str) -> str:
    key = f"{device}, {threads} threads, torch {version}"
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", key).strip("-").lower()
    return f"{readable}-{hashlib.sha256(key.encode()).hexdigest()[:8]}.json"


def _read(file: Path) -> DeviceRates | None:
    try:
        return DeviceRates(**json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        logger.warning("the rates kept in %s cannot be read (%s): measuring again", file, error)
        return None


def _write(file: Path, rates: DeviceRates) -> None:
    """Whole or not at all: another process may read it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump(rates.to_dict(), out, indent=2)
        Path(name).replace(file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
