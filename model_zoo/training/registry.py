"""The heads that can be trained, by the name of their method."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..dflash.training import DFlashOptions, DFlashTrainee
from ..dspark.training import DSparkOptions, DSparkTrainee
from ..eagle3.parallel_training import ParallelEagle3Options, ParallelEagle3Trainee
from ..eagle3.training import Eagle3Options, Eagle3Trainee
from ..errors import TrainingConfigError
from ..medusa.training import MedusaOptions, MedusaTrainee
from ..mtp.training import MtpOptions, MtpTrainee
from .draft_vocabulary import DraftVocabulary
from .layers import LayerShape
from .trainee import TargetFacts, Trainee


@dataclass(frozen=True)
class TrainableMethod:
    """How a head of a method is made."""

    options: type
    """A dataclass that checks itself; what its fields mean stands under each."""
    build: Callable[[TargetFacts, LayerShape, DraftVocabulary, Any], Trainee]
    """Takes the target, the shape of the head's layers, what it can draft, and the options."""
    reduced_vocabulary: bool = True
    """Whether it can draft from a choice of the target's tokens; else always from all of them."""


METHODS: dict[str, TrainableMethod] = {
    "eagle3": TrainableMethod(Eagle3Options, Eagle3Trainee),
    "dflash": TrainableMethod(DFlashOptions, DFlashTrainee),
    "dspark": TrainableMethod(DSparkOptions, DSparkTrainee),
    "p-eagle": TrainableMethod(ParallelEagle3Options, ParallelEagle3Trainee),
    "medusa": TrainableMethod(MedusaOptions, MedusaTrainee),
    "mtp": TrainableMethod(MtpOptions, MtpTrainee, reduced_vocabulary=False),
}


def trainable(name: str) -> TrainableMethod:
    """The method of this name.

    Raises:
        TrainingConfigError: there is none; names those that there are.
    """
    if name not in METHODS:
        close = difflib.get_close_matches(name, METHODS, n=1, cutoff=0.5)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise TrainingConfigError(f"no head of method {name!r} can be trained{hint}; methods: {', '.join(METHODS)}")
    return METHODS[name]
