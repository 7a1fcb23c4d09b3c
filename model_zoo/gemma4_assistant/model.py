"""The assistant as functions of tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...kernels.eh_norm import eh_norm
from ...kernels.linear import linear
from ...kernels.project_logits import project_logits
from ...kernels.rms_norm import rms_norm
from ...kernels.window import Window
from ..decoder import (
    WINDOW_OVERHANG,
    CompileRegion,
    DecoderModel,
    KvCache,
    LayerWeights,
    decoder_layer,
    identity,
    layer_constants,
)
from ..rope import rope_tables
from .config import Gemma4AssistantConfig


class Gemma4AssistantWeights(NamedTuple):
    """The whole assistant; H is its hidden size, Ht the target's."""

    before: torch.Tensor
    """[H, 2 Ht]."""
    layers: tuple[LayerWeights, ...]
    """With queries alone in `qkv`."""
    final_norm: torch.Tensor
    """[H]."""
    after: torch.Tensor
    """[Ht, H]."""
    head: torch.Tensor
    """[V, H]; not packed where the vocabulary is ordered."""
    centroids: torch.Tensor | None = None
    """[C, H]."""
    ordering: torch.Tensor | None = None
    """int64 [C, V / C], the tokens of each centroid's group."""


def enter(
    tokens: torch.Tensor,
    rows: torch.Tensor,
    embedding: torch.Tensor,
    scale: float,
    hidden: torch.Tensor,
    states: torch.Tensor | None,
    before: torch.Tensor,
) -> torch.Tensor:
    """The projection of [the target's scaled embedding, hidden state].

    Args:
        tokens: int32 [W].
        rows: int32 [W], -1 in padding.
        embedding: [V, Ht], the target's.
        scale: of the target's embeddings.
        hidden: [N, Ht].
        states: int32 [W] into `hidden`, or None.
        before: [H, 2 Ht].

    Returns:
        [W, H].
    """
    return linear(eh_norm(tokens, rows, embedding, hidden, states, embedding_scale=scale), before)


def leave(
    hidden: torch.Tensor, norm: torch.Tensor, eps: float, after: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the head takes, [W, H], and what stands in for the target's next hidden state, [W, Ht]."""
    normed = rms_norm(hidden, norm, eps)
    return normed, linear(normed, after)


def ordered_logits(
    hidden: torch.Tensor, head: torch.Tensor, centroids: torch.Tensor, ordering: torch.Tensor, chosen: int
) -> torch.Tensor:
    """The logits of the tokens in the groups of the best centroids; minus infinity elsewhere.

    Args:
        hidden: [W, H].
        head: [V, H].
        centroids: [C, H].
        ordering: int64 [C, V / C].
        chosen: how many groups.

    Returns:
        [W, V].
    """
    best = linear(hidden, centroids).topk(chosen, dim=-1).indices
    tokens = ordering.index_select(0, best.flatten()).view(hidden.shape[0], -1)
    rows = head.index_select(0, tokens.flatten()).unflatten(0, tokens.shape)
    logits = torch.bmm(rows, hidden.unsqueeze(2)).squeeze(2)
    return hidden.new_full((hidden.shape[0], head.shape[0]), -torch.inf).scatter(1, tokens, logits)


class Gemma4AssistantModel:
    """A Gemma 4 assistant: a `DraftHead` without a cache of its own.

    The pair of the hidden state at j and token j + 1 sees the target's keys and values up to j. Its queries are turned
    as at j + 1, and in sliding layers they see one position more than the target's do: so it is in transformers' code,
    whose masks reach back by the window's size from the last key.
    """

    target_ids = None
    mask_token = 0
    mask_state = None

    def __init__(
        self,
        config: Gemma4AssistantConfig,
        target: DecoderModel,
        weights: Gemma4AssistantWeights,
        *,
        max_positions: int,
        compile_region: CompileRegion = identity,
    ) -> None:
        """Takes the weights as they were loaded.

        Args:
            config: of the assistant.
            target: whose embeddings, keys and values it reads.
            weights: of the assistant.
            max_positions: the longest context that will be used.
            compile_region: see `DecoderModel`.
        """
        self.config, self._target, self._weights = config, target, weights
        self.layers = config.layers
        self.device, self.dtype = target.device, target.dtype
        self.state_size = config.target_hidden_size
        self._sources = config.source_layers(target.config)
        # One row further than positions say.
        tables = {
            kind: [table[1:] for table in rope_tables(rope, max_positions + WINDOW_OVERHANG + 1, target.device)]
            for kind, rope in config.layers.rope_by_type.items()
        }
        self._tables = [tables[kind] for kind in config.layers.layer_types]
        self._constants = [layer_constants(config.layers, layer) for layer in range(config.layers.num_layers)]
        self._constants = [
            constants._replace(sliding_window=constants.sliding_window + 1) if constants.sliding_window else constants
            for constants in self._constants
        ]
        # Rounded to the model's type, as the target's is.
        self._embedding_scale = float(torch.tensor(config.target_hidden_size**0.5).to(self.dtype))
        self._enter, self._leave = compile_region(enter), compile_region(leave)
        self._layer, self._ordered = compile_region(decoder_layer), compile_region(ordered_logits)

    def allocate_cache(self, slots: int, context: int) -> KvCache:
        """There is none to allocate; see `HeadConfig.reads_target_cache`."""
        raise TypeError("an assistant reads the target's keys and values and has none of its own")

    def read_target(
        self, window: Window, hidden: torch.Tensor, states: torch.Tensor | None, cache: KvCache
    ) -> torch.Tensor:
        """See `DraftHead.read_target`; `hidden` is the target's last, after its final norm, and `cache` the target's,
        which is read only.
        """
        table, scale = self._target.weights.embedding, self._embedding_scale
        hidden = self._enter(window.tokens, window.rows, table, scale, hidden, states, self._weights.before)
        for layer, source in enumerate(self._sources):
            hidden = self._layer(
                hidden,
                self._weights.layers[layer],
                *self._target.layer_cache(cache, source),
                *self._tables[layer],
                window,
                self._constants[layer],
            )
        return hidden

    def read_own(self, window: Window, hidden: torch.Tensor, cache: KvCache) -> torch.Tensor:
        """See `DraftHead.read_own`: what it projects back stands in for the target's hidden state."""
        return self.read_target(window, hidden, None, cache)

    def read_out(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DraftHead.read_out`; both come after the final norm."""
        w = self._weights
        normed, feedback = self._leave(hidden, w.final_norm, self.config.layers.norm_eps, w.after)
        if w.centroids is not None and w.ordering is not None:
            return feedback, self._ordered(normed, w.head, w.centroids, w.ordering, self.config.chosen_centroids)
        logits = normed.new_empty((normed.shape[0], self.config.vocab_size))
        project_logits(normed, w.head, 0.0, logits)
        return feedback, logits
