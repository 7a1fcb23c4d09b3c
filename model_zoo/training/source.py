"""Where a batch's hidden states come from: computed as they are needed, or kept after they were computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .batch import TrainingBatch
from .examples import Example, Span
from .shards import ShardStore, StoredStates
from .target import FrozenTarget


class ExampleSource:
    """Examples beside what the target makes of them: a `BatchSource`."""

    def __init__(
        self,
        examples: Sequence[Example],
        target: FrozenTarget,
        layers: tuple[int, ...],
        *,
        store: ShardStore | None = None,
        spans: Sequence[Sequence[Span]] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Takes the examples.

        Args:
            examples: in the order in which `store` numbers them.
            target: frozen.
            layers: which hidden states the head reads, indices into transformers' `hidden_states`.
            store: where hidden states are kept, and read when they are needed again; None: they are computed every
                time.
            spans: of each example, the positions that count; None: the answers.
            dtype: of the batches' hidden states.
        """
        self.lengths = [len(example.tokens) for example in examples]
        self._examples, self._target, self._layers, self._store = examples, target, layers, store
        self._spans = [example.answer for example in examples] if spans is None else spans
        self._dtype = dtype

    def batch(self, indices: Sequence[int]) -> TrainingBatch:
        """See `BatchSource.batch`."""
        length, device = max(self.lengths[index] for index in indices), self._target.device
        tokens = torch.zeros((len(indices), length), dtype=torch.int64)
        answer, valid = torch.zeros(tokens.shape, dtype=torch.bool), torch.zeros(tokens.shape, dtype=torch.bool)
        for row, index in enumerate(indices):
            tokens[row, : self.lengths[index]] = torch.tensor(self._examples[index].tokens)
            valid[row, : self.lengths[index]] = True
            for start, stop in self._spans[index]:
                answer[row, start:stop] = True
        tokens, answer, valid = tokens.to(device), answer.to(device), valid.to(device)
        states, final = self._hidden(indices, tokens, valid)
        return TrainingBatch(tokens, answer, valid, states, final)

    def fill(self, budget: int, watch: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Computes and keeps what the store does not hold yet, in batches of so many tokens; offline training.

        Args:
            budget: see `plan_batches`.
            watch: told how many examples of how many are done.
        """
        assert self._store is not None
        order = sorted(range(len(self.lengths)), key=lambda index: (self.lengths[index], index))
        done, total = 0, len(self.lengths)
        # What is computed together does not depend on what is there already, so that a kill changes no last bit.
        try:
            while done < total:
                size = max(1, budget // self.lengths[order[done]])
                while size > 1 and size * self.lengths[order[min(done + size, total) - 1]] > budget:
                    size -= 1
                chunk = order[done : done + size]
                if any(index not in self._store for index in chunk):
                    self.batch(chunk)
                done += len(chunk)
                watch(done, total)
        except KeyboardInterrupt:
            self._store.flush()
            raise
        self._store.flush()

    def flush(self) -> None:
        """Puts what was computed on the disk, where it is kept at all."""
        if self._store is not None:
            self._store.flush()

    def _hidden(
        self, indices: Sequence[int], tokens: torch.Tensor, valid: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        store = self._store
        if store is None or any(index not in store for index in indices):
            states, final = self._target.hidden(tokens, valid, self._layers)
            if store is not None:
                for row, index in enumerate(indices):
                    length = self.lengths[index]
                    store.add(index, tokens[row, :length], states[row, :length], final[row, :length])
                # As they will be read again, also by a run that goes on after a kill.
                states, final = (part.to(store.identity.torch_dtype) for part in (states, final))
            return states.to(self._dtype), final.to(self._dtype)
        kept = [store.read(index) for index in indices]
        return self._padded(kept, tokens, "states"), self._padded(kept, tokens, "final")

    def _padded(self, kept: Sequence[StoredStates], tokens: torch.Tensor, name: str) -> torch.Tensor:
        """[B, T, columns]: what is kept of each example, with zeros behind."""
        parts = [getattr(found, name) for found in kept]
        padded = torch.zeros((*tokens.shape, parts[0].shape[1]), dtype=self._dtype)
        for row, part in enumerate(parts):
            padded[row, : len(part)] = part
        return padded.to(self._target.device)


def written_spans(examples: Sequence[Example]) -> list[tuple[Span, ...]]:
    """Of texts that the target wrote throughout, its answers to prompts of its own: all that differs between them.

    Every chat begins with the same tokens of its template, from which there is nothing to learn.

    Returns:
        One span for each example, from the end of the beginning that all share (of two examples at least).
    """
    # The first and the last in order share what all of them do.
    low, high = min(example.tokens for example in examples), max(example.tokens for example in examples)
    shared = next((place for place, pair in enumerate(zip(low, high, strict=False)) if pair[0] != pair[1]), 0)
    return [((max(1, min(shared, example.answer[0][0])), example.answer[-1][1]),) for example in examples]
