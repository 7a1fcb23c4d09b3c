"""Reads the config.json of Medusa heads, of either published layout."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..draft_config import HeadConfig, positive
from ..errors import CheckpointError
from ..safetensors_files import StoredTensor

BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
HEAD = re.compile(r"lm_heads\.(\d+)\.weight")


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(HeadConfig):
    """Heads of residual blocks and a projection to the vocabulary each."""

    method: ClassVar[str] = "medusa"

    num_heads: int
    num_layers: int
    """Residual blocks of a head."""
    bias: bool
    """Of the residual blocks."""
    mapped: bool
    """`token_map` gives the target's id of each token."""


def read_config(hf: Mapping[str, Any], tensors: Mapping[str, StoredTensor], numbering: str | None) -> MedusaConfig:
    """Makes the configuration; heads and blocks are those that the checkpoint has, whatever config.json says.

    Args:
        hf: the contents of config.json.
        tensors: what the checkpoint has, by the names of `checkpoint.rename`.
        numbering: must be None: the heads read no layer but the last.

    Raises:
        CheckpointError: the two do not fit together.
    """
    if numbering is not None:
        raise CheckpointError("aux_layer_numbering is for eagle3 heads; Medusa heads read the last hidden state only")
    heads = [match for name in tensors if (match := HEAD.fullmatch(name))]
    if not heads:
        raise CheckpointError("the checkpoint has no Medusa head: no lm_heads.0.weight, and no 0.1.weight")
    first = tensors["lm_heads.0.weight"] if "lm_heads.0.weight" in tensors else tensors[heads[0].string]
    if len(first.shape) != 2:
        raise CheckpointError(f"lm_heads.0.weight has shape {list(first.shape)}; accepted: [vocabulary, hidden size]")
    draft_vocab, hidden = first.shape
    blocks = [match for name in tensors if (match := BLOCK.fullmatch(name))]
    vocab = positive(hf, "vocab_size") or draft_vocab
    mapped = "token_map" in tensors
    if draft_vocab < vocab and not mapped:
        raise CheckpointError(
            f"the Medusa heads draft {draft_vocab} of {vocab} tokens, but lack token_map, which says which"
        )
    return MedusaConfig(
        format="Medusa, blocks" if hf.get("model_type") == "medusa" else "Medusa, numbered",
        depth=len(heads),
        vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        target_hidden_size=hidden,
        num_heads=len(heads),
        num_layers=1 + max((int(match[2]) for match in blocks), default=-1),
        bias=any(match[3] == "bias" for match in blocks),
        mapped=mapped,
    )
