"""Drafting with another vocabulary: which tokens two vocabularies share, as tensors that a captured step reads.

Token-level intersection (TLI): Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms
for Heterogeneous Vocabularies", ICML 2025.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .cache import cache_directory
from .errors import ConfigError
from .token_texts import Vocabulary, read_vocabulary
from .tokenizer_files import load_tokenizer, tokenizer_hash

logger = logging.getLogger(__name__)

FEW_SHARED_TOKENS = 100
"""With fewer tokens in common, a warning is due."""

_FORMAT = "1"
# Part of a cached mapping's name: another rule of comparison must not find old files.


@dataclass(frozen=True)
class VocabMapping:
    """Between the token ids of a target and those of a drafter with another vocabulary.

    `kernels/vocabulary.py` has the two steps that read it in a round.
    """

    draft_ids: torch.Tensor
    """int32 [target's V]: the drafter's id of each of the target's tokens; its unknown token (or else its end token)
    where it has none."""
    target_ids: torch.Tensor
    """int32 [drafter's V]: the target's id of each of the drafter's tokens, -1 where it has none."""
    allowed: torch.Tensor
    """bool [drafter's V]: the target has the token, so that it can be a draft."""

    @property
    def shared(self) -> int:
        """How many tokens can be drafts."""
        return int(self.allowed.sum())


def build_mapping(
    target: Vocabulary, draft: Vocabulary, draft_tokenizer: Any, target_size: int, draft_size: int
) -> VocabMapping:
    """Compares two vocabularies by the texts of their tokens; of several tokens for one text the first is used.

    Args:
        target: of the target.
        draft: of the drafter.
        draft_tokenizer: of the drafter: its unknown and end tokens.
        target_size: tokens that the target has logits for; those that its tokenizer does not know are shared with none.
        draft_size: the same of the drafter.

    Raises:
        ConfigError: the drafter has no token that can stand for those that it lacks.
    """
    filler = draft_tokenizer.unk_token_id
    if filler is None or filler >= draft_size:
        filler = draft_tokenizer.eos_token_id
    if filler is None or filler >= draft_size:
        raise ConfigError(
            "the draft model's tokenizer has neither an unknown nor an end token that the model knows: nothing can "
            "stand for the target's tokens that it lacks"
        )
    draft_ids = torch.full((target_size,), filler, dtype=torch.int32)
    target_ids = torch.full((draft_size,), -1, dtype=torch.int32)
    for number, text in target.texts.items():
        found = draft.ids.get(text)
        if number < target_size and found is not None and found < draft_size:
            draft_ids[number] = found
    for number, text in draft.texts.items():
        found = target.ids.get(text)
        if number < draft_size and found is not None and found < target_size:
            target_ids[number] = found
    return VocabMapping(draft_ids, target_ids, target_ids >= 0)


def load_mapping(target: Path, draft: Path, target_size: int, draft_size: int) -> VocabMapping:
    """The mapping between two models in local directories, built once and kept in the user's cache.

    Args:
        target: the target's directory.
        draft: the drafter's directory.
        target_size: tokens that the target has logits for.
        draft_size: the same of the drafter.

    Raises:
        ConfigError: the vocabularies share no token.
        CheckpointError: a tokenizer cannot be loaded.
    """
    parts = (_FORMAT, tokenizer_hash(target), tokenizer_hash(draft), str(target_size), str(draft_size))
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    file = cache_directory() / "vocabularies" / f"{key}.safetensors"
    mapping = _read(file, target_size, draft_size)
    if mapping is None:
        tokenizer = load_tokenizer(draft)
        vocabularies = read_vocabulary(load_tokenizer(target)), read_vocabulary(tokenizer)
        mapping = build_mapping(*vocabularies, tokenizer, target_size, draft_size)
        _write(file, mapping)
    if mapping.shared == 0:
        raise ConfigError(
            f"the vocabularies of the target ({target}) and of the draft model ({draft}) have no token in common: this "
            "draft model cannot draft for this target"
        )
    if mapping.shared < FEW_SHARED_TOKENS:
        logger.warning(
            "the draft model's vocabulary of %d tokens has only %d in common with the target's: expect few accepted "
            "drafts",
            draft_size,
            mapping.shared,
        )
    return mapping


def _read(file: Path, target_size: int, draft_size: int) -> VocabMapping | None:
    """The mapping in a file, or None where there is none or a damaged one."""
    from safetensors.torch import load_file

    if not file.is_file():
        return None
    try:
        tensors = load_file(file)
        mapping = VocabMapping(tensors["draft_ids"], tensors["target_ids"], tensors["target_ids"] >= 0)
        if mapping.draft_ids.shape != (target_size,) or mapping.target_ids.shape != (draft_size,):
            raise ValueError("it has other sizes")
    except Exception as error:  # whatever safetensors raises for a file that was cut short
        logger.warning("the cached vocabulary mapping %s is damaged (%s): building it again", file, error)
        return None
    return mapping


def _write(file: Path, mapping: VocabMapping) -> None:
    """Puts a mapping into the cache, whole or not at all; without a writable cache it is built every time."""
    from safetensors.torch import save

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        content = save({"draft_ids": mapping.draft_ids, "target_ids": mapping.target_ids})
        # Another process may write the same file at the same time: each its own copy, and the last one stays.
        with tempfile.TemporaryDirectory(dir=file.parent) as directory:
            whole = Path(directory) / file.name
            whole.write_bytes(content)
            whole.replace(file)
    except OSError as error:
        logger.warning("the vocabulary mapping cannot be kept in %s: %s", file.parent, error.strerror or error)
