"""The heads that DSpark puts after DFlash's block, as functions of tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...kernels.linear import linear
from ..decoder import CompileRegion, DecoderModel, identity
from ..dflash.model import DFlashModel, DFlashWeights
from .config import DSparkConfig


class MarkovWeights(NamedTuple):
    """What a draft's logits owe to the token before it."""

    embedding: torch.Tensor
    """[V, r], of the token before, in the target's ids."""
    head: torch.Tensor
    """[Vd, r]; plain, since some of its rows may be gathered."""
    projection: torch.Tensor | None = None
    """[r, H + r] of a gated head, [3r, 2r + H] of a recurrent one."""
    projection_bias: torch.Tensor | None = None


class ConfidenceWeights(NamedTuple):
    """In float32, whatever the model's type: a probability near 1 has no room in bfloat16."""

    weight: torch.Tensor
    """float32 [H] or [H + r]."""
    bias: torch.Tensor | None
    """float32 [1]."""


def latent_of(
    previous: torch.Tensor, hidden: torch.Tensor, memory: torch.Tensor, weights: MarkovWeights, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is multiplied with the head, and what a recurrent head keeps for the next draft.

    With e = W1[previous]: vanilla e; gated sigmoid(G [h; e]) * e; recurrent, of (g, c, o) = J [s; e; h], tanh(o), and
    s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c).

    Args:
        previous: [B, r], `e`.
        hidden: [B, H], `h`.
        memory: [B, r], `s`; 0 for a block's first draft.
        weights: of the head.
        kind: one of `MARKOV_HEADS`.

    Returns:
        [B, r] both.
    """
    if kind == "vanilla":
        return previous, memory
    assert weights.projection is not None
    if kind == "gated":
        gate = linear(torch.cat((hidden, previous), 1), weights.projection, weights.projection_bias)
        return torch.sigmoid(gate) * previous, memory
    joint = linear(torch.cat((memory, previous, hidden), 1), weights.projection, weights.projection_bias)
    gate, candidate, output = joint.chunk(3, 1)
    gate = torch.sigmoid(gate)
    return torch.tanh(output), gate * memory + (1.0 - gate) * torch.tanh(candidate)


def correct(
    tokens: torch.Tensor,
    hidden: torch.Tensor,
    base: torch.Tensor,
    memory: torch.Tensor,
    markov: MarkovWeights | None,
    confidence: ConfidenceWeights | None,
    kind: str,
    competing: int,
    with_markov: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """One draft's logits, U + W2 latent, and the probability that it is accepted, sigmoid(w [h; W1[previous]] + b).

    Args:
        tokens: int32 [B], the token before each draft, in the target's ids.
        hidden: [B, H], the block's output there, after the final norm.
        base: [B, Vd], its logits, `U`.
        memory: [B, r], see `latent_of`.
        markov: None: there is no Markov head.
        confidence: None: there is no confidence head.
        kind: of the Markov head.
        competing: only so many of the largest base logits compete, and all others are -inf; 0 for all.
        with_markov: the confidence head reads W1[previous] too.

    Returns:
        The logits, [B, Vd]; the memory, [B, r]; and float32 [B], or None without a confidence head.
    """
    logits, features = base, hidden.float()
    if markov is not None:
        previous = markov.embedding.index_select(0, tokens)
        latent, memory = latent_of(previous, hidden, memory, markov, kind)
        if with_markov:
            features = torch.cat((features, previous.float()), 1)
        if not competing:
            logits = base + linear(latent, markov.head)
    if competing:
        values, ids = base.topk(competing, dim=1)
        if markov is not None:
            rows = markov.head.index_select(0, ids.flatten()).unflatten(0, ids.shape)
            values = values + torch.bmm(rows, latent[:, :, None])[:, :, 0]
        logits = torch.full_like(base, -torch.inf).scatter(1, ids, values)
    if confidence is None:
        return logits, memory, None
    # Not a product of matrices: a device may compute those of float32 with fewer bits.
    score = (features * confidence.weight).sum(1)
    return logits, memory, torch.sigmoid(score if confidence.bias is None else score + confidence.bias)


class DSparkModel(DFlashModel):
    """A DSpark drafter."""

    config: DSparkConfig

    def __init__(
        self,
        config: DSparkConfig,
        target: DecoderModel,
        weights: DFlashWeights,
        *,
        markov: MarkovWeights | None,
        confidence: ConfidenceWeights | None,
        target_ids: torch.Tensor | None = None,
        max_positions: int,
        compile_region: CompileRegion = identity,
        attention_backend: str | None = None,
    ) -> None:
        """Takes the weights as they were loaded.

        Args:
            config: of the drafter.
            target: see `DFlashModel`.
            weights: of what drafts the block.
            markov: of the Markov head.
            confidence: of the confidence head.
            target_ids: see `DFlashModel`.
            max_positions: the longest context that will be used.
            compile_region: see `DecoderModel`.
            attention_backend: see `DecoderModel`.
        """
        super().__init__(
            config,
            target,
            weights,
            target_ids=target_ids,
            max_positions=max_positions,
            compile_region=compile_region,
            attention_backend=attention_backend,
        )
        self._markov, self._confidence = markov, confidence
        self._correct = compile_region(correct)

    @property
    def has_confidence(self) -> bool:
        """Whether `correct` tells how likely a draft is to be accepted."""
        return self._confidence is not None

    def correct(
        self,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        base: torch.Tensor,
        memory: torch.Tensor,
        competing: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """See the function of this name."""
        config = self.config
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] = self._correct(
            tokens,
            hidden,
            base,
            memory,
            self._markov,
            self._confidence,
            config.markov_head or "",
            competing,
            config.confidence_with_markov,
        )
        return found
