"""Where the tensors of a DSpark drafter go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..decoder import CompileRegion, DecoderModel
from ..dflash import checkpoint as dflash
from ..draft_files import DraftTensors
from ..draft_weights import HeadBuilder
from ..placement import Placement
from .config import DSparkConfig
from .model import ConfidenceWeights, DSparkModel, MarkovWeights

_ARCHITECTURES = {"Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator"}
_PROJECTIONS = {"gated": "gate_proj", "rnn": "joint_proj"}

rename = dflash.rename
extras = dflash.extras


def recognises(hf: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Whether a checkpoint is one."""
    if hf.get("speculators_model_type") is not None:
        return bool(hf["speculators_model_type"] == "dspark")
    named = bool(_ARCHITECTURES & set(hf.get("architectures") or ()))
    return named or "markov_head.markov_w1.weight" in set(names)


def placements(config: DSparkConfig) -> dict[str, Placement]:
    """Every tensor by name."""
    found, hidden, rank = dflash.placements(config), config.layers.hidden_size, config.markov_rank
    if config.markov_head is not None:
        found["markov_head.markov_w1.weight"] = Placement("markov_embedding", None, 0, (config.vocab_size, rank))
        found["markov_head.markov_w2.weight"] = Placement("markov_head", None, 0, (config.draft_vocab_size, rank))
        rows, columns = {"gated": (rank, hidden + rank), "rnn": (3 * rank, hidden + 2 * rank)}.get(
            config.markov_head, (0, 0)
        )
        if config.markov_head in _PROJECTIONS:
            name = f"markov_head.{_PROJECTIONS[config.markov_head]}"
            found[f"{name}.weight"] = Placement("markov_projection", None, 0, (rows, columns))
            if config.markov_bias:
                found[f"{name}.bias"] = Placement("markov_projection_bias", None, 0, (rows,))
    if config.has_confidence:
        columns = hidden + rank * config.confidence_with_markov
        single = torch.float32
        found["confidence_head.proj.weight"] = Placement("confidence", None, 0, (1, columns), dtype=single)
        if config.confidence_bias:
            found["confidence_head.proj.bias"] = Placement("confidence_bias", None, 0, (1,), dtype=single)
    return found


def build(
    config: DSparkConfig,
    builder: HeadBuilder,
    tensors: DraftTensors,
    names: Mapping[str, str],
    target: DecoderModel,
    *,
    max_positions: int,
    compile_region: CompileRegion,
    attention_backend: str | None = None,
) -> DSparkModel:
    """The drafter, its weights read, beside its target.

    Raises:
        CheckpointError: d2t points outside of the vocabulary, or contradicts t2d.
    """
    embedding, head, confidence = (builder.weight(n) for n in ("markov_embedding", "markov_head", "confidence"))
    markov = None
    if embedding is not None:
        assert head is not None
        projection = builder.matrix("markov_projection")
        markov = MarkovWeights(embedding, head, projection, builder.weight("markov_projection_bias"))
    return DSparkModel(
        config,
        target,
        dflash.block_weights(config, builder, tensors, names, target),
        markov=markov,
        confidence=None if confidence is None else ConfidenceWeights(confidence[0], builder.weight("confidence_bias")),
        target_ids=dflash.reduced_vocabulary(config, tensors, names, target),
        max_positions=max_positions,
        compile_region=compile_region,
        attention_backend=attention_backend,
    )
