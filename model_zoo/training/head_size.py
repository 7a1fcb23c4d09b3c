"""A head's names and shapes, known before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .draft_vocabulary import DraftVocabulary
from .layers import layer_shape_of
from .registry import trainable
from .trainee import TargetFacts, Trainee


def planned_head(
    method: str, config: Mapping[str, Any], options: Any, *, draft_vocab_size: int, intermediate_size: int | None
) -> Trainee:
    """The head that would be trained, on the meta device: it has no weights.

    Args:
        method: see `trainable`.
        config: of the target, of its text model.
        options: of the method.
        draft_vocab_size: of the head.
        intermediate_size: of the head's layers; None: the target's.

    Raises:
        ValueError: the head cannot be made beside this target; says why.
    """
    vocabulary = DraftVocabulary(torch.arange(draft_vocab_size), int(config["vocab_size"]))
    table = torch.empty(vocabulary.vocab_size, int(config["hidden_size"]), device="meta")
    facts = TargetFacts(config=config, name="", embedding=table, head=table, final_norm=None, layers=())
    with torch.device("meta"):
        return trainable(method).build(facts, layer_shape_of(config, intermediate_size), vocabulary, options)


def learning_parameters(trainee: Trainee) -> int:
    """How many weights training changes."""
    return sum(parameter.numel() for parameter in trainee.parameters() if parameter.requires_grad)
