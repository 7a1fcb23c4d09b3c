"""How much two vocabularies share: by token, and by frequency on a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from .errors import ConfigError
from .models import resolve_model
from .speculative_methods import vocabulary_size
from .token_texts import read_vocabulary
from .tokenizer_files import load_tokenizer
from .vocab_mapping import build_mapping


def sample_text(file: Path | None) -> str:
    """A file's text; without one the reference of the Python language, which is English and comes with Python.

    Raises:
        ConfigError: the file cannot be read as UTF-8, or is empty.
    """
    if file is None:
        from pydoc_data import topics

        return "\n".join(topics.topics.values())
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"text must be a file of UTF-8 text; {str(file)!r} cannot be read: {error}") from None
    if not text:
        raise ConfigError(f"text must not be empty, but {str(file)!r} is")
    return text


def compare(target: str, draft: str, text: str) -> dict[str, Any]:
    """Compares a target's vocabulary with a draft model's.

    Args:
        target: a directory with a tokenizer, or the name of a model.
        draft: the same of the draft model.
        text: on which frequency is counted.

    Returns:
        Of both sides: `tokens`, the model's vocabulary; `shared`, those that the other side has too; `shared_of_tokens`
        and `shared_of_text`, their share of the vocabulary and of the text's tokens; `text_tokens`.

    Raises:
        ModelNotFoundError, FetchError, CheckpointError: a model or its tokenizer cannot be had.
    """
    paths = [_directory(name) for name in (target, draft)]
    tokenizers = [load_tokenizer(path) for path in paths]
    sizes = [_size(path, tokenizer) for path, tokenizer in zip(paths, tokenizers, strict=True)]
    ours, theirs = (read_vocabulary(tokenizer) for tokenizer in tokenizers)
    mapping = build_mapping(ours, theirs, tokenizers[1], *sizes)
    known = torch.zeros(sizes[0], dtype=torch.bool)
    for number, meaning in ours.texts.items():
        if number < sizes[0] and theirs.ids.get(meaning, sizes[1]) < sizes[1]:
            known[number] = True
    sides = []
    for name, tokenizer, size, vocabulary, shared in zip(
        (target, draft), tokenizers, sizes, (ours, theirs), (known, mapping.allowed), strict=True
    ):
        # Without the warning that the text is longer than the model's context.
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        present = shared[torch.tensor([number for number in ids if number < size], dtype=torch.long)].sum()
        sides.append(
            {
                "name": name,
                "notation": vocabulary.notation.value,
                "tokens": size,
                "shared": int(shared.sum()),
                "shared_of_tokens": int(shared.sum()) / size,
                "text_tokens": len(ids),
                "shared_of_text": int(present) / max(len(ids), 1),
            }
        )
    return {"characters": len(text), "target": sides[0], "draft": sides[1]}


def _directory(name: str) -> Path:
    """A directory as it is, weights or none; or that of a model."""
    path = Path(name).expanduser()
    return path if path.is_dir() else resolve_model(name)


def _size(path: Path, tokenizer: Any) -> int:
    """Tokens that the model has logits for, or that its tokenizer knows where there is no model."""
    config = path / "config.json"
    size = vocabulary_size(json.loads(config.read_text(encoding="utf-8"))) if config.is_file() else None
    return len(tokenizer) if size is None else size
