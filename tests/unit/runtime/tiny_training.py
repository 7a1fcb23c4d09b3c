"""Draft heads to train beside the tiny random Llama."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from draftgraph.model_zoo.dflash.training import DFlashOptions, DFlashTrainee
from draftgraph.model_zoo.dspark.training import DSparkOptions, DSparkTrainee
from draftgraph.model_zoo.eagle3.training import Eagle3Options, Eagle3Trainee
from draftgraph.model_zoo.training.draft_vocabulary import DraftVocabulary
from draftgraph.model_zoo.training.target import FrozenTarget
from draftgraph.model_zoo.training.trainee import Trainee

MAKERS: dict[str, tuple[type, type]] = {
    "eagle3": (Eagle3Trainee, Eagle3Options),
    "dflash": (DFlashTrainee, DFlashOptions),
    "dspark": (DSparkTrainee, DSparkOptions),
}


def frozen(path: Path) -> FrozenTarget:
    return FrozenTarget(path, dtype=torch.float32, device=torch.device("cpu"), name=str(path))


def trainee_of(method: str, target: FrozenTarget, vocabulary: torch.Tensor, **options: Any) -> Trainee:
    make, options_of = MAKERS[method]
    facts = target.facts()
    kept = DraftVocabulary(vocabulary, facts.embedding.shape[0])
    return make(facts, target.layer_shape(), kept, options_of(**options))


def scramble(trainee: Trainee, seed: int = 5) -> None:
    """Moves every weight away from where it begins, so that none is 0, 1 or the target's."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainee.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.15)
