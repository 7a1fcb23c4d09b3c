"""A draft head that learns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from ..errors import CheckpointError
from .batch import TrainingBatch


@dataclass(frozen=True)
class Outcome:
    """What a head made of a batch."""

    loss: torch.Tensor
    """Mean over the batch's drafts, to be minimised; float32, a scalar."""
    accepted: torch.Tensor
    """float32 [K], without gradient: in how many places the drafts up to the i-th were all what the target wrote."""
    counted: torch.Tensor
    """float32 [K]: in how many places that many drafts could be compared."""
    parts: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Terms of the loss by name, for the log."""


@dataclass(frozen=True)
class TargetFacts:
    """Of the target, what a head is built beside: never trained, never exported unless the head has its own copy."""

    config: Mapping[str, Any]
    """Its config.json, of the text model."""
    name: str
    """As the user gave it."""
    embedding: torch.Tensor
    """[V, Ht]."""
    head: torch.Tensor
    """[V, Ht]."""
    final_norm: torch.Tensor | None
    """[Ht], the weight of the norm before the head; None where its form is another than x / rms(x) * weight."""
    layers: tuple[Mapping[str, torch.Tensor], ...]
    """Of its last layers, the weights by their names within a layer, where they are Llama's; the last one last."""
    embedding_scale: float = 1.0
    """What it multiplies embeddings with."""
    soft_cap: float = 0.0
    """Its logits are soft_cap * tanh(logits / soft_cap), as Gemma's are; 0: they are not capped."""


class Trainee(nn.Module, ABC):
    """A head's differentiable twin. Its parameters have the names of the exported checkpoint."""

    method: ClassVar[str]
    num_drafts: int
    """K: how many tokens it learns to draft."""

    @abstractmethod
    def states_of(self, num_layers: int) -> tuple[int, ...]:
        """Which of the target's hidden states it reads: indices into transformers' `hidden_states`."""

    @abstractmethod
    def forward(self, batch: TrainingBatch, generator: torch.Generator) -> Outcome:
        """Drafts everywhere and compares.

        Args:
            batch: on the head's device.
            generator: of what the method draws at random, on the CPU.
        """

    @abstractmethod
    def config_json(self) -> dict[str, Any]:
        """The exported config.json, in the format of the speculators library."""

    def export_tensors(self) -> dict[str, torch.Tensor]:
        """The exported tensors by name, as they are."""
        return {name: tensor.detach() for name, tensor in self.state_dict().items()}

    @torch.no_grad()
    def import_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes the weights of an exported head, which `export_tensors` then gives again.

        Args:
            tensors: by name, of any floating type where the head's own are floating.

        Raises:
            CheckpointError: they are of a head of other sizes or another draft vocabulary; nothing was taken.
        """
        own = self.export_tensors()
        lacking, unknown = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
        if lacking or unknown:
            what = [f"it lacks {', '.join(lacking)}"] if lacking else []
            what += [f"it has {', '.join(unknown)}"] if unknown else []
            raise CheckpointError(f"the tensors are of another head than this {self.method} one: {'; '.join(what)}")
        for name, tensor in tensors.items():
            if tensor.shape != own[name].shape:
                raise CheckpointError(f"{name} has shape {list(tensor.shape)}, but must have {list(own[name].shape)}")
            if not own[name].is_floating_point() and not torch.equal(tensor.cpu(), own[name].cpu()):
                raise CheckpointError(f"{name} is of another draft vocabulary than this head's")
        parameters = self.state_dict()
        self.load_state_dict({name: tensors[name].to(parameter) for name, parameter in parameters.items()})
