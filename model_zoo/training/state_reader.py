"""What heads have in common that read several of the target's hidden states and draft from a reduced vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .draft_vocabulary import DraftVocabulary
from .initial import read_last_state
from .layers import LayerShape, RMSNorm, Rotary
from .speculators_format import layers_json, speculators_json
from .target_trainee import TargetTrainee
from .trainee import TargetFacts


class StateReader(TargetTrainee):
    """A projection of the hidden states, a final norm, and a head to the vocabulary, all beginning at the target's."""

    def __init__(
        self,
        target: TargetFacts,
        shape: LayerShape,
        vocabulary: DraftVocabulary,
        *,
        num_drafts: int,
        aux_layers: tuple[int, ...] | None,
        train_head: bool,
    ) -> None:
        """Makes what is common.

        Args:
            target: whose embedding it reads.
            shape: of its layers; as wide as the target.
            vocabulary: what it can draft.
            num_drafts: `K`.
            aux_layers: indices into transformers' `hidden_states`; None: EAGLE-3's published default.
            train_head: the head to the vocabulary learns too; otherwise it stays the target's rows.

        Raises:
            ValueError: the target has no such hidden states or another width, or none or one twice is named.
        """
        super().__init__(target, vocabulary, num_drafts=num_drafts)
        width, layers = target.embedding.shape[1], int(target.config["num_hidden_layers"])
        if shape.hidden_size != width:
            raise ValueError(f"the head's hidden size must be the target's, {width}, got {shape.hidden_size}")
        published = tuple(sorted({min(2, layers - 1), layers // 2, max(layers - 3, 0)}))
        states = published if aux_layers is None else aux_layers
        if not states:
            raise ValueError("aux_layers must name at least one hidden state of the target, or be none")
        if any(not 0 <= state < layers for state in states):
            raise ValueError(f"aux_layers must be hidden states 0 to {layers - 1} of the target, got {list(states)}")
        if len(set(states)) < len(states):
            raise ValueError(f"aux_layers must be hidden states that are all different, got {list(states)}")
        self.shape, self._states = shape, states
        self._rotary = Rotary(shape)
        self.fc = nn.Linear(len(states) * width, shape.hidden_size, bias=False)
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, vocabulary.size, bias=False)
        with torch.no_grad():
            self.lm_head.weight.copy_(self._goal_head)
            if target.final_norm is not None:
                self.norm.weight.copy_(target.final_norm)
        self.lm_head.weight.requires_grad_(train_head)
        read_last_state(self.fc, len(states))

    def states_of(self, num_layers: int) -> tuple[int, ...]:
        """See `Trainee.states_of`."""
        return self._states

    def common_json(self, num_layers: int) -> dict[str, Any]:
        """The common part of config.json."""
        return {
            **speculators_json(self._target, self.method, self.num_drafts),
            "transformer_layer_config": layers_json(self.shape, num_layers, self._target),
            "draft_vocab_size": self._vocabulary.size,
            "target_hidden_size": self._target.embedding.shape[1],
        }

    def export_tensors(self) -> dict[str, torch.Tensor]:
        """See `Trainee.export_tensors`."""
        return {**super().export_tensors(), **self._vocabulary.tensors()}
