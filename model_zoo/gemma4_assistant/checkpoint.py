"""Where the tensors of a Gemma 4 assistant go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..decoder import CompileRegion, DecoderModel
from ..draft_files import DraftTensors
from ..draft_weights import HeadBuilder, layer_placements
from ..errors import CheckpointError
from ..gemma4.checkpoint import LAYER_NORMS
from ..placement import Placement
from .config import Gemma4AssistantConfig
from .model import Gemma4AssistantModel, Gemma4AssistantWeights

_ORDERING = "masked_embedding.token_ordering"


def recognises(hf: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Whether a checkpoint is one."""
    kind = hf.get("model_type")
    return isinstance(kind, str) and kind.startswith("gemma4") and kind.endswith("_assistant")


def rename(name: str) -> str | None:
    """The name that the shared loader knows a tensor by; None for one that is not needed."""
    return None if name.endswith("rotary_emb.inv_freq") else name


def placements(config: Gemma4AssistantConfig) -> dict[str, Placement]:
    """Every tensor by name."""
    hidden, of_target, vocab = config.layers.hidden_size, config.target_hidden_size, config.vocab_size
    found = layer_placements(config.layers, LAYER_NORMS)
    found["pre_projection.weight"] = Placement("before", None, 0, (hidden, 2 * of_target))
    found["post_projection.weight"] = Placement("after", None, 0, (of_target, hidden))
    found["model.norm.weight"] = Placement("final_norm", None, 0, (hidden,))
    found["model.embed_tokens.weight"] = Placement("embedding", None, 0, (vocab, hidden))
    if config.own_head:
        found["lm_head.weight"] = Placement("vocabulary", None, 0, (vocab, hidden))
    if config.centroids:
        found["masked_embedding.centroids.weight"] = Placement("centroids", None, 0, (config.centroids, hidden))
    return found


def extras(config: Gemma4AssistantConfig) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Tensors that are no weights, by name: their shapes and the types that are accepted."""
    return {_ORDERING: ((config.vocab_size,), ("I64", "I32"))} if config.centroids else {}


def build(
    config: Gemma4AssistantConfig,
    builder: HeadBuilder,
    tensors: DraftTensors,
    names: Mapping[str, str],
    target: DecoderModel,
    *,
    max_positions: int,
    compile_region: CompileRegion,
) -> Gemma4AssistantModel:
    """The assistant, its weights read, beside its target.

    Raises:
        CheckpointError: the ordering of the vocabulary has not every token once.
    """
    before, after, norm = builder.matrix("before"), builder.matrix("after"), builder.weight("final_norm")
    assert before is not None
    assert after is not None
    assert norm is not None
    field = "vocabulary" if config.own_head else "embedding"
    # Rows are looked up in an ordered head, which a packed one cannot do.
    head = builder.weight(field) if config.centroids else builder.matrix(field)
    assert head is not None
    ordering = None
    if config.centroids:
        ordering = tensors.get(names[_ORDERING]).long()
        if ordering.sort().values.tolist() != list(range(config.vocab_size)):
            raise CheckpointError(f"{_ORDERING} must hold each of the {config.vocab_size} tokens once")
        ordering = ordering.unflatten(0, (config.centroids, -1)).to(target.device)
    weights = Gemma4AssistantWeights(
        before=before,
        layers=builder.layers(),
        final_norm=norm,
        after=after,
        head=head,
        centroids=builder.matrix("centroids"),
        ordering=ordering,
    )
    return Gemma4AssistantModel(config, target, weights, max_positions=max_positions, compile_region=compile_region)
