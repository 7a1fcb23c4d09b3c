"""Finds out which executors of captured graphs work here: by trying, once, in a process that may crash."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger("draftgraph.graphs")

CHECKS = ("round", "loop")
"""What is tried, in this order: the name of an executor each. A crash leaves the later ones untried."""
LEAST_TORCH = (2, 11)
LEAST_BINDINGS = (12, 8)
LEAST_DRIVER = {"round": (12, 0), "loop": (12, 4)}
"""CUDA versions: WHILE nodes exist from 12.4 on."""
TIMEOUT_SECONDS = 120.0
"""For a process that imports torch, makes a context and runs two small graphs: seconds, if it does not hang."""
_REVISION = 1
"""Part of the cache's key: raise it when an old answer may no longer hold."""


@dataclass(frozen=True)
class Finding:
    """Whether an executor works, and why or why not."""

    works: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class Platform:
    """What an answer holds for."""

    torch_version: str
    bindings: str | None
    """Version of cuda-bindings; None without them."""
    driver: tuple[int, int] | None
    """The CUDA version of the driver; None if there is none."""
    device: str
    """The name of the GPU."""
    revision: int = _REVISION

    @classmethod
    def of(cls, device: torch.device) -> Platform:
        """Looks at this process; makes the device's context if there is none yet."""
        try:
            bindings: str | None = importlib.metadata.version("cuda-bindings")
        except importlib.metadata.PackageNotFoundError:
            bindings = None
        return cls(
            torch_version=torch.__version__,
            bindings=bindings,
            driver=_driver_version() if bindings is not None else None,
            device=torch.cuda.get_device_name(device),
        )

    def missing(self, executor: str) -> str | None:
        """What an executor needs and does not find, or None."""
        if _version(self.torch_version) < LEAST_TORCH:
            return f"needs torch {_dotted(LEAST_TORCH)} or newer, found {self.torch_version}"
        if self.bindings is None:
            return f"needs the package cuda-bindings {_dotted(LEAST_BINDINGS)} or newer, which is not installed"
        if _version(self.bindings) < LEAST_BINDINGS:
            return f"needs cuda-bindings {_dotted(LEAST_BINDINGS)} or newer, found {self.bindings}"
        if self.driver is None:
            return "needs an NVIDIA driver that cuda-bindings can load"
        if self.driver < LEAST_DRIVER[executor]:
            return f"needs a driver for CUDA {_dotted(LEAST_DRIVER[executor])} or newer, found {_dotted(self.driver)}"
        return None


_known: dict[Platform, dict[str, Finding]] = {}
"""Answers of this process."""


def probe(
    device: torch.device,
    cache_directory: Path | None = None,
    *,
    fresh: bool = False,
    platform: Platform | None = None,
    command: Sequence[str] | None = None,
    timeout: float = TIMEOUT_SECONDS,
) -> dict[str, Finding]:
    """What works on a CUDA device: a finding for each of `CHECKS`.

    Args:
        device: a CUDA device.
        cache_directory: where answers are kept, one for each driver, torch and GPU; None keeps none.
        fresh: try again, whatever was kept.
        platform: in place of this process's own.
        command: what to run in place of `probe_checks`.
        timeout: seconds after which the process counts as hung and is killed.
    """
    platform = platform or Platform.of(device)
    lacking = {name: platform.missing(name) for name in CHECKS}
    found = {name: Finding(False, reason) for name, reason in lacking.items() if reason is not None}
    if len(found) == len(CHECKS):
        return found
    file = None if cache_directory is None else cache_directory / "executors" / f"{_key(platform)}.json"
    kept = None
    if not fresh:
        kept = _known.get(platform) if command is None else None
        kept = kept or (None if file is None else _read(file, platform))
    if kept is None:
        index = torch.cuda.current_device() if device.index is None and torch.cuda.is_available() else device.index or 0
        kept = _try(command or (sys.executable, "-m", f"{__package__}.probe_checks", str(index)), timeout)
        logger.info("probed the executors: %s", "; ".join(f"{name}: {f.reason}" for name, f in kept.items()))
        if file is not None:
            _write(file, platform, kept)
    if command is None:
        _known[platform] = kept
    return {**kept, **found}


def _try(command: Sequence[str], timeout: float) -> dict[str, Finding]:
    """Runs the checks in a process of their own and reads what it says before it ends in whatever way."""
    ended: str
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout, stdin=subprocess.DEVNULL, check=False)
        output, errors = done.stdout, done.stderr
        ended = _how_ended(done.returncode, errors)
    except subprocess.TimeoutExpired as hung:
        output = hung.stdout or b""
        ended = f"the check hung for {timeout:.0f} s and was stopped"
    except OSError as error:
        return dict.fromkeys(CHECKS, Finding(False, f"the check could not be started: {error}"))
    findings = {}
    for line in output.decode(errors="replace").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            answer = json.loads(line)
            findings[answer["check"]] = Finding(bool(answer["works"]), str(answer["reason"]))
    for name in CHECKS:
        if name not in findings:
            findings[name] = Finding(False, ended)
            ended = f"not tried, because the check of {name!r} did not end"
    return {name: findings[name] for name in CHECKS}


def _how_ended(code: int, errors: bytes) -> str:
    if code < 0:
        try:
            return f"the check crashed with {signal.Signals(-code).name}"
        except ValueError:
            return f"the check crashed with signal {-code}"
    lines = errors.decode(errors="replace").strip().splitlines()
    return f"the check ended with code {code} and no answer" + (f": {lines[-1].strip()}" if lines else "")


def _key(platform: Platform) -> str:
    return hashlib.sha256(json.dumps(asdict(platform)).encode()).hexdigest()[:16]


def _read(file: Path, platform: Platform) -> dict[str, Finding] | None:
    """The kept answer, or None where there is none, or one that is damaged or of another platform."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["platform"] != json.loads(json.dumps(asdict(platform))):
            return None
        return {name: _finding(content["findings"][name]) for name in CHECKS}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _finding(answer: dict[str, Any]) -> Finding:
    if not isinstance(answer["works"], bool) or not isinstance(answer["reason"], str):
        raise ValueError("not a finding")
    return Finding(answer["works"], answer["reason"])


def _write(file: Path, platform: Platform, findings: dict[str, Finding]) -> None:
    """Keeps an answer, whole or not at all; a cache that cannot be written only costs the next process a probe."""
    content = {"platform": asdict(platform), "findings": {name: asdict(f) for name, f in findings.items()}}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as draft:
            json.dump(content, draft, indent=2)
        Path(draft.name).replace(file)
    except OSError as error:
        logger.warning("the answer about executors cannot be kept in %s: %s", file, error)


def _driver_version() -> tuple[int, int] | None:
    try:
        from cuda.bindings import driver

        code, version = driver.cuDriverGetVersion()
    except Exception:  # each release of the bindings has its own error for a missing library
        return None
    return (version // 1000, version % 1000 // 10) if int(code) == 0 else None


def _version(text: str) -> tuple[int, int]:
    numbers = re.findall(r"\d+", text)
    return (int(numbers[0]), int(numbers[1])) if len(numbers) > 1 else (0, 0)


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
