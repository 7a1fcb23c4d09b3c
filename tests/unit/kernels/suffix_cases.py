"""What `suffix_propose` is held to: counting everywhere, and the arguments of small random cases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from draftgraph.graphs.buckets import power_of_two_at_least
from draftgraph.kernels.suffix_index import Tree, enter_all
from draftgraph.kernels.suffix_propose import draft_budget

TOKENS, LENGTH, FINISHED, ROWS, HEADS, TREE, INDEXED, G_TOKENS, G_HEADS, G_TREE, BUDGET, DRAFTS, COUNT, CONFIDENCE = (
    range(14)
)


def suffix_arguments(
    *,
    slots: int = 2,
    context: int = 64,
    num_drafts: int = 3,
    depth: int = 5,
    buckets: int = 8,
    finished: list[list[int]] | None = None,
    factor: float = 1.0,
    min_probability: float = 0.1,
) -> list[Any]:
    """The op's arguments for sequences of one token, with a global tree over the sequences `finished`."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    flat = [token for sequence in finished or [] for token in sequence]
    capacity = max(1, len(flat))
    arguments = [
        zeros(slots + 1, context),
        zeros(slots + 1) + 1,
        torch.zeros(slots + 1, dtype=torch.bool),
        torch.arange(slots, dtype=torch.int32),
        zeros(slots + 1, depth, buckets),
        zeros(slots + 1, 4, depth, context),
        zeros(slots + 1),
        zeros(capacity),
        zeros(depth, power_of_two_at_least(capacity)),
        zeros(4, depth, capacity),
        torch.tensor(draft_budget(depth, num_drafts, factor), dtype=torch.int32),
        zeros(slots + 1, num_drafts) + 9,
        zeros(slots + 1) + 9,
        torch.full((slots + 1, num_drafts), 9.0),
        min_probability,
    ]
    if flat:
        arguments[G_TOKENS][:] = torch.tensor(flat)
        enter_all(
            Tree(arguments[G_TOKENS].numpy(), arguments[G_HEADS].numpy(), arguments[G_TREE].numpy()),
            starts_of(finished or []),
        )
    return arguments


def starts_of(sequences: list[list[int]]) -> np.ndarray:
    """For each token where its sequence begins."""
    sizes = [len(sequence) for sequence in sequences]
    return np.repeat(np.cumsum([0, *sizes[:-1]]), sizes).astype(np.int32)


@dataclass(frozen=True)
class Candidate:
    """What one match of one tree drafts."""

    score: float
    match: int
    own: bool
    drafts: tuple[int, ...]
    ratios: tuple[float, ...]


class Counted:
    """Occurrences of every string of up to `depth` tokens in some sequences."""

    def __init__(self, sequences: list[list[int]], depth: int) -> None:
        self.count: dict[tuple[int, ...], int] = {}
        self.last: dict[tuple[int, ...], int] = {}
        place = 0
        for sequence in sequences:
            for end in range(len(sequence)):
                place += 1
                for size in range(1, min(depth, end + 1) + 1):
                    string = tuple(sequence[end + 1 - size : end + 1])
                    self.count[string] = self.count.get(string, 0) + 1
                    self.last[string] = place

    def children(self, string: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [other for other in self.count if len(other) == len(string) + 1 and other[:-1] == string]


def candidates(
    row: list[int],
    finished: list[list[int]],
    *,
    depth: int,
    num_drafts: int,
    factor: float = 1.0,
    min_probability: float = 0.1,
) -> list[Candidate]:
    """Every candidate of a row, with float32 arithmetic in the order of the specification."""
    found = []
    for own, counted in ((True, Counted([row], depth)), (False, Counted(finished, depth))):
        for match in range(1, min(depth, len(row)) + 1):
            string = tuple(row[-match:])
            score, probability = np.float32(0), np.float32(1)
            drafts: list[int] = []
            ratios: list[float] = []
            while len(drafts) < min(num_drafts, int(np.floor(match * factor))) and string in counted.count:
                children = counted.children(string) if len(string) < depth else []
                if not children:
                    break
                child = max(children, key=lambda s: (counted.count[s], counted.last[s]))
                ratio = np.float32(counted.count[child]) / np.float32(counted.count[string])
                probability = probability * ratio
                if probability < np.float32(min_probability):
                    break
                score, string = score + probability, child
                drafts.append(child[-1])
                ratios.append(float(ratio))
            found.append(Candidate(float(score), match, own, tuple(drafts), tuple(ratios)))
    return found


def best_candidate(found: list[Candidate]) -> Candidate:
    """The highest score, then the longer match, then the row's own tree."""
    return max(found, key=lambda c: (c.score, c.match, c.own))
