"""A model's tokenizer: loading it, and telling it from others by its files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from ..model_zoo.errors import CheckpointError

TOKENIZER_FILES = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
"""What a tokenizer may be made of; also any `*.tiktoken`."""


def load_tokenizer(path: Path) -> Any:
    """The tokenizer in a model's directory, as transformers loads it.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    from transformers import AutoTokenizer  # takes a second to import

    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"the tokenizer in {path} cannot be loaded: {reason}") from error


def tokenizer_hash(path: Path) -> str:
    """SHA-256 over the names and contents of the tokenizer's files in a directory."""
    digest = hashlib.sha256()
    names = {file.name for file in path.iterdir() if file.name in TOKENIZER_FILES or file.suffix == ".tiktoken"}
    for name in sorted(names):
        content = (path / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
