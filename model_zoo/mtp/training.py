"""A prediction module of DeepSeek-V3's kind, as it learns beside a frozen target (arXiv 2412.19437, section 2.2).

It is applied again and again to its own output, and learns to be, as EAGLE's heads do in their training-time test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import nn

from ..training.batch import TrainingBatch
from ..training.chains import DraftingRows, attend, compare_chains, drafting_rows, shifted
from ..training.draft_vocabulary import DraftVocabulary
from ..training.initial import copy_layer, read_last_state
from ..training.layers import DecoderLayer, LayerShape, RMSNorm, Rotary
from ..training.speculators_format import layers_json, proposals_json
from ..training.target_trainee import TargetTrainee
from ..training.trainee import Outcome, TargetFacts


@dataclass(frozen=True, kw_only=True)
class MtpOptions:
    """What is chosen of a prediction module's training."""

    num_drafts: int = 3
    """How often it is applied in a row."""
    step_decay: float = 0.8
    """The loss of each step counts this much of the one before."""

    def __post_init__(self) -> None:
        if self.num_drafts < 1:
            raise ValueError(f"num_drafts must be at least 1, got {self.num_drafts}")
        if not 0.0 < self.step_decay <= 1.0:
            raise ValueError(f"step_decay must lie in (0, 1], got {self.step_decay}")


class PredictionModule(DecoderLayer):
    """A decoder layer, what joins its two inputs, and the norm after it."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape)
        size, eps = shape.hidden_size, shape.norm_eps
        self.enorm, self.hnorm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(size, eps)})


class MtpTrainee(TargetTrainee):
    """Row t of step s reads token t + 1 + s beside a hidden state and drafts token t + 2 + s.

    The hidden state is the target's last, after its final norm, in step 0, and the module's own after its norm
    afterwards. Who sees whom is as with EAGLE-3's head. Embedding and head are the target's.
    """

    method: ClassVar[str] = "mtp"

    def __init__(
        self, target: TargetFacts, shape: LayerShape, vocabulary: DraftVocabulary, options: MtpOptions
    ) -> None:
        """Begins at the target's last layer and its final norm.

        Args:
            target: whose last hidden state, embedding and head it reads.
            shape: of its layer; as wide as the target.
            vocabulary: all of the target's tokens.
            options: of its training.

        Raises:
            ValueError: the target has another width, or the vocabulary is a reduced one.
        """
        super().__init__(target, vocabulary, num_drafts=options.num_drafts)
        width = target.embedding.shape[1]
        if shape.hidden_size != width:
            raise ValueError(f"the module's hidden size must be the target's, {width}, got {shape.hidden_size}")
        if vocabulary.size != vocabulary.vocab_size:
            raise ValueError(
                f"a prediction module drafts with the target's own head, all {vocabulary.vocab_size} tokens: it cannot "
                f"have a draft vocabulary of {vocabulary.size}"
            )
        self.options, self.shape = options, shape
        self._rotary = Rotary(shape)
        module = PredictionModule(shape)
        read_last_state(module.eh_proj, 2)
        if target.layers:
            copy_layer(module, target.layers[-1])
        if target.final_norm is not None:
            with torch.no_grad():
                cast(RMSNorm, module.shared_head["norm"]).weight.copy_(target.final_norm)
        # It is numbered as the layer that would follow the target's.
        self._number = str(int(target.config["num_hidden_layers"]))
        self.model = nn.ModuleDict({"layers": nn.ModuleDict({self._number: module})})

    def forward(self, batch: TrainingBatch, generator: torch.Generator) -> Outcome:
        """See `Trainee.forward`; nothing is random here."""
        rows = drafting_rows(batch, self.num_drafts)
        steps = self.draft_logits(batch, rows)
        return compare_chains(batch, rows, steps, self._vocabulary, self.goal_logits, self.options.step_decay)

    def draft_logits(self, batch: TrainingBatch, rows: DraftingRows) -> Iterator[torch.Tensor]:
        """Of each step, the logits of the drafts that can be compared, [N of that step, V], in the order of `rows`."""
        hidden = batch.final
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for step in range(self.num_drafts):
            hidden = self._step(step, shifted(batch.tokens, 1 + step), hidden, keys, values)
            yield self.target_logits(hidden.flatten(0, 1).index_select(0, rows.places(step)))

    def _step(
        self,
        step: int,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
    ) -> torch.Tensor:
        """One step of all rows: int64 [B, T] and [B, T, H] to [B, T, H]; keys and values are added to."""
        module = cast(PredictionModule, cast(nn.ModuleDict, self.model["layers"])[self._number])
        embedded = self.embed(tokens, hidden.dtype)
        if step == 0:  # The embedding beside the hidden state at position 0 is taken for zero.
            embedded = nn.functional.pad(embedded[:, 1:], (0, 0, 1, 0))
        hidden = module.eh_proj(torch.cat((module.enorm(embedded), module.hnorm(hidden)), -1))
        hidden = hidden + attend(module.self_attn, module.input_layernorm(hidden), self._rotary, step, keys, values)
        hidden = hidden + module.mlp(module.post_attention_layernorm(hidden))
        normed: torch.Tensor = module.shared_head["norm"](hidden)
        return normed

    def config_json(self) -> dict[str, Any]:
        """The exported config.json: a model's, as modules have it that lie in the checkpoint of their target."""
        layers = int(self._target.config["num_hidden_layers"])
        return {
            **layers_json(self.shape, layers, self._target),
            "architectures": ["MTPModel"],
            "n_predict": 1,
            "num_nextn_predict_layers": 1,
            "speculators_config": proposals_json(self._target, "mtp", self.num_drafts),
        }
