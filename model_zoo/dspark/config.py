"""Reads the config.json of a DSpark drafter: its own layout, that nested in a dflash_config, or that of speculators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..dflash.config import DFlashConfig, Fields, block_fields, checked
from ..errors import CheckpointError, UnsupportedModelError
from ..safetensors_files import StoredTensor

MARKOV_HEADS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(DFlashConfig):
    """A drafter of blocks with a Markov head and a confidence head; it may have one of them only."""

    method: ClassVar[str] = "dspark"

    markov_head: str | None
    """One of `MARKOV_HEADS`; None: it has none, and a draft does not depend on those before it."""
    markov_rank: int
    """Columns of the embedding of the token before; 0 without a Markov head."""
    markov_bias: bool
    """The gated and the recurrent head's projection has a bias."""
    has_confidence: bool
    confidence_with_markov: bool
    """The confidence head reads the embedding of the token before, too."""
    confidence_bias: bool

    @property
    def markov_elements(self) -> int:
        """Elements of the Markov head's matrices that one draft reads."""
        hidden, rank = self.layers.hidden_size, self.markov_rank
        projection = {"gated": rank * (hidden + rank), "rnn": 3 * rank * (hidden + 2 * rank)}
        return self.draft_vocab_size * rank + projection.get(self.markov_head or "", 0)


def read_config(hf: Mapping[str, Any], tensors: Mapping[str, StoredTensor], numbering: str | None) -> DSparkConfig:
    """Makes the configuration.

    Args:
        hf: the contents of config.json.
        tensors: what the checkpoint has, by the names of `checkpoint.rename`.
        numbering: of the hidden states, one of `NUMBERINGS`, in place of the format's.

    Raises:
        CheckpointError: the two do not fit together.
        UnsupportedModelError: the layers, the heads or the format are of a kind that is not implemented.
    """
    fields = Fields(hf)
    # As vLLM reads them: the anchor drafts, except in the layout of speculators.
    from_anchor = hf.get("speculators_model_type") is None
    common = block_fields(hf, tensors, numbering, method="dspark", from_anchor=from_anchor)
    kind, rank = str(fields.get("markov_head_type", default="vanilla")), fields.get("markov_rank", default=0)
    if kind not in MARKOV_HEADS:
        raise UnsupportedModelError(f"markov_head_type {kind!r}; supported: {', '.join(MARKOV_HEADS)}")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
        raise CheckpointError(f"markov_rank must be an integer of at least 0, got {rank!r}")
    projection = tensors.get("confidence_head.proj.weight")
    hidden = common["layers"].hidden_size
    with_markov = projection is not None and rank > 0 and projection.shape[-1] == hidden + rank
    with_markov = fields.flag("confidence_head_with_markov", with_markov)
    has_confidence = fields.flag("enable_confidence_head", projection is not None)
    if has_confidence and with_markov and rank == 0:
        raise CheckpointError("confidence_head_with_markov needs a Markov head, but markov_rank is 0")
    config = DSparkConfig(
        **common,
        markov_head=kind if rank else None,
        markov_rank=rank,
        markov_bias=any(f"markov_head.{name}.bias" in tensors for name in ("gate_proj", "joint_proj")),
        has_confidence=has_confidence,
        confidence_with_markov=with_markov,
        confidence_bias="confidence_head.proj.bias" in tensors,
    )
    return checked(config, tensors)  # type: ignore[no-any-return]
