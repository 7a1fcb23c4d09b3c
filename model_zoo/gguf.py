"""Turns a GGUF file into a directory that `load_model` reads."""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from .errors import CheckpointError


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Keeps transformers' warnings and progress bars off the terminal."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # The GGUF reader has a progress bar of its own, which knows no switch.
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def convert_gguf(
    gguf_path: str | Path,
    out_dir: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """Dequantises a GGUF file into config.json, model.safetensors, and the tokenizer with its chat template.

    The directory appears whole or not at all: it is written beside its place and then renamed.

    Args:
        gguf_path: the file.
        out_dir: must not exist, or be empty.
        dtype: of the written weights.
        progress: is told what is being done.

    Returns:
        `out_dir`.

    Raises:
        CheckpointError: the file is missing or cannot be read, or `out_dir` holds something.
    """
    import transformers

    source, target = Path(gguf_path), Path(out_dir)
    if not source.is_file():
        raise CheckpointError(f"{source} does not exist")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is not an empty directory")
    tell = progress or (lambda message: None)
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        with _quiet(transformers):
            tell(f"reading {source.name}")
            try:
                model = transformers.AutoModelForCausalLM.from_pretrained(
                    source.parent, gguf_file=source.name, dtype=dtype
                )
                tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
            except (ValueError, KeyError, OSError, RuntimeError) as error:
                raise CheckpointError(f"{source} cannot be read as GGUF: {error}") from error
            tell(f"writing {target}")
            # transformers refuses to save what it takes for a quantized model.
            model.hf_quantizer = None
            model.is_quantized = False
            if hasattr(model.config, "quantization_config"):
                del model.config.quantization_config
            model.save_pretrained(work)
            tokenizer.save_pretrained(work)
        work.chmod(0o755)
        for file in work.iterdir():  # safetensors makes its files private
            file.chmod(0o644)
        if target.exists():
            target.rmdir()
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target
