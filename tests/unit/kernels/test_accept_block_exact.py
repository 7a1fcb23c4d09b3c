"""Block verification summed over every outcome: vocabularies of 2 to 4 tokens, up to 3 drafts.

The op's own chances are found by bisecting its uniform numbers, and its replacements by noise that only just decides;
with these the probabilities of all texts are added up.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from test_accept_standard import arguments, sample

from draftgraph.graphs.state import DecodeState, StateShape
from draftgraph.kernels import accept_block as module

Text = tuple[int, ...]
NEVER = 2.0


class Model:
    """Random tables of the target's and the drafter's distributions after every prefix."""

    def __init__(self, vocab: int, drafts: int, seed: int) -> None:
        self.vocab, self.drafts = vocab, drafts
        generator = torch.Generator().manual_seed(seed)
        self.logits: dict[Text, torch.Tensor] = {}
        self.p: dict[Text, torch.Tensor] = {}
        self.q: dict[Text, torch.Tensor] = {}
        for length in range(drafts + 1):
            for prefix in itertools.product(range(vocab), repeat=length):
                self.logits[prefix] = 1.5 * torch.randn(vocab, generator=generator)
                self.p[prefix] = self.logits[prefix].double().softmax(0)
                self.q[prefix] = (1.5 * torch.randn(vocab, generator=generator)).softmax(0)

    @property
    def ways(self) -> list[Text]:
        return list(itertools.product(range(self.vocab), repeat=self.drafts))

    def chance(self, drafts: Text) -> float:
        """Of these drafts."""
        product = 1.0
        for place, token in enumerate(drafts):
            product *= float(self.q[drafts[:place]][token])
        return product


class Op:
    """The op on one row per way in which the drafts can turn out."""

    def __init__(self, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model, ways = model, model.ways
        rows, drafts, vocab = len(ways), model.drafts, model.vocab
        self.u = torch.full((rows, drafts + 1), NEVER)
        self.noise = torch.zeros(rows, vocab)
        monkeypatch.setattr(module, "uniform", lambda key, position, stream, token: self.u)
        monkeypatch.setattr(module, "gumbel", lambda key, position, stream, token: self.noise)
        width = rows * (drafts + 1)
        shape = StateShape(slots=rows, context=8, num_drafts=drafts, vocab_size=vocab, max_bucket=rows, max_width=width)
        self.state = state = DecodeState.allocate(shape, dtype=torch.float32, device="cpu")
        state.slot_of_row.copy_(torch.arange(rows))
        state.temperature[:] = 1.0
        state.draft_tokens[:rows] = torch.tensor(ways)
        state.cu_tokens.copy_(torch.arange(rows + 1) * (drafts + 1))
        state.window_rows.copy_(torch.arange(width) // (drafts + 1))
        state.window_positions.copy_(torch.arange(width) % (drafts + 1) + 3)
        state.logits.copy_(torch.stack([model.logits[x[:i]] for x in ways for i in range(drafts + 1)]))
        probs = torch.zeros(rows + 1, drafts, vocab)
        probs[:rows] = torch.stack([torch.stack([model.q[x[:i]] for i in range(drafts)]) for x in ways])
        sample(state, rows)
        self.args: list[Any] = arguments(state, rows, probs)

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """How many drafts every row accepts, and the token after them."""
        module.accept_block_reference(*self.args)
        rows = self.u.shape[0]
        count = self.state.accepted[:rows].long()
        return count, self.state.emitted[:rows].gather(1, count[:, None])[:, 0]

    def chances(self) -> torch.Tensor:
        """float64 [rows, K]: up to which u each draft is held to stand with those before it."""
        found = []
        for column in range(1, self.model.drafts + 1):
            low, high = torch.zeros(len(self.u)), torch.ones(len(self.u))
            for _ in range(24):
                self.u.fill_(NEVER)
                self.u[:, column] = (low + high) / 2
                holds = self.run()[0] == column
                low, high = torch.where(holds, self.u[:, column], low), torch.where(holds, high, self.u[:, column])
            found.append(((low + high) / 2).double())
        return torch.stack(found, 1)

    def check_replacements(self, kept: int, weights: torch.Tensor) -> None:
        """After `kept` accepted drafts a token is drawn by `weights` [rows, V]: noise that makes all equal, and a
        little more for one token, has that one drawn.
        """
        self.u.fill_(NEVER)
        if kept:
            self.u[:, kept] = 0.0
        known = weights > 1e-5
        rows = known.any(1)
        for token in range(self.model.vocab):
            self.noise.copy_(torch.where(known, -weights.clamp_min(1e-30).log(), 0.0))
            self.noise[:, token] += 2e-5 * (1 + self.noise[:, token].abs())
            count, drawn = self.run()
            assert bool((count[rows & known[:, token]] == kept).all())
            assert bool((drawn[rows & known[:, token]] == token).all())
            assert bool(known.gather(1, drawn[:, None].long())[rows].all())


def formulas(model: Model, drafts: Text) -> tuple[list[float], list[float]]:
    """The paper's w and h, in float64."""
    w, h = [1.0], []
    for place, token in enumerate(drafts):
        w.append(min(1.0, w[-1] * float(model.p[drafts[:place]][token]) / float(model.q[drafts[:place]][token])))
        if place + 1 == len(drafts):
            h.append(w[-1])
            continue
        prefix = drafts[: place + 1]
        excess = float((w[-1] * model.p[prefix] - model.q[prefix].double()).clamp_min(0.0).sum())
        total = excess + 1 - w[-1]
        h.append(excess / total if total > 0 else 1.0)
    return w, h


def residual(model: Model, prefix: Text, scale: float) -> torch.Tensor:
    return (scale * model.p[prefix] - model.q[prefix].double()).clamp_min(0.0)


@pytest.mark.parametrize(("vocab", "drafts"), [(2, 1), (2, 2), (2, 3), (3, 2), (3, 3), (4, 1), (4, 2), (4, 3)])
def test_every_outcome_adds_up_to_the_targets_distribution(vocab, drafts, monkeypatch):
    model = Model(vocab, drafts, seed=vocab * 10 + drafts)
    op, ways = Op(model, monkeypatch), model.ways
    chances = op.chances()
    known = [formulas(model, x) for x in ways]
    assert torch.allclose(chances, torch.tensor([h for _, h in known]).double(), atol=1e-6)
    for kept in range(drafts):
        weights = torch.stack([residual(model, x[:kept], w[kept]) for x, (w, _) in zip(ways, known, strict=True)])
        op.check_replacements(kept, weights.float())

    found: Counter[Text] = Counter()
    lengths = {"block": 0.0, "standard": 0.0}
    for x, (w, _), own in zip(ways, known, chances.tolist(), strict=True):
        left = model.chance(x)
        lengths["standard"] += left * standard_length(model, x)
        for kept in range(drafts, -1, -1):
            here = left * (own[kept - 1] if kept else 1.0)
            left -= here
            lengths["block"] += kept * here
            next_token = model.p[x] if kept == drafts else residual(model, x[:kept], w[kept])
            if here > 0 and float(next_token.sum()) > 0:
                for token, p in enumerate((next_token / next_token.sum()).tolist()):
                    spread(model, (*x[:kept], token), here * p, found)
    for text in itertools.product(range(vocab), repeat=drafts + 1):
        exact = 1.0
        for place, token in enumerate(text):
            exact *= float(model.p[text[:place]][token])
        assert found[text] == pytest.approx(exact, abs=1e-6)
    assert lengths["block"] >= lengths["standard"] - 1e-6


def standard_length(model: Model, drafts: Text) -> float:
    """How many of these drafts stand one by one, on the average."""
    chance, length = 1.0, 0.0
    for place, token in enumerate(drafts):
        chance *= min(1.0, float(model.p[drafts[:place]][token]) / float(model.q[drafts[:place]][token]))
        length += chance
    return length


def spread(model: Model, prefix: Text, chance: float, found: Counter[Text]) -> None:
    """Continues a text by the target up to K + 1 tokens."""
    if len(prefix) == model.drafts + 1:
        found[prefix] += chance
        return
    for token, p in enumerate(model.p[prefix].tolist()):
        spread(model, (*prefix, token), chance * p, found)
