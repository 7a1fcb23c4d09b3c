"""What a head computes while it learns is what it computes in the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_training import DRAFTS, VOCAB, Loaded, make_batch, make_trainee, save_target

from draftgraph.model_zoo.training.blocks import choose_blocks
from draftgraph.model_zoo.training.chains import drafting_rows
from draftgraph.model_zoo.training.target import FrozenTarget

FIRST = 2
TEXTS = [
    torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (13, 9)
]


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(target_path: Path) -> FrozenTarget:
    return FrozenTarget(target_path, dtype=torch.float32, device=torch.device("cpu"), name="some/target")


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


CHAINS = {
    "eagle3": Loaded.chain,
    "mtp": Loaded.chain,
    "p-eagle": Loaded.parallel,
    "medusa": Loaded.heads,
}
"""Of heads whose drafts follow every position, how the engine makes them."""


@pytest.mark.parametrize(
    ("kind", "draft_vocab"),
    [("eagle3", True), ("eagle3", False), ("p-eagle", True), ("medusa", True), ("medusa", False), ("mtp", False)],
)
def test_drafts_after_every_position(tmp_path, target_path, target, kind, draft_vocab):
    trainee = make_trainee(kind, target, draft_vocab=draft_vocab, noise=0.1)
    batch, loaded = make_batch(target, trainee, TEXTS, FIRST), Loaded(trainee, tmp_path, target_path)
    rows = drafting_rows(batch, DRAFTS)
    with torch.no_grad():
        found = list(trainee.draft_logits(batch, rows))
    assert rows.known.all(1).any()
    assert not rows.known.all()
    compared = 0
    for step, logits in enumerate(found):
        places = rows.places(step).tolist()
        assert len(logits) == len(places)
        for values, place in zip(logits, places, strict=True):
            text, at = divmod(place, batch.tokens.shape[1])
            close(values, CHAINS[kind](loaded, TEXTS[text], at, step + 1)[step])
            compared += 1
    assert compared == int(rows.known.sum())


@pytest.mark.parametrize("draft_vocab", [True, False])
@pytest.mark.parametrize("kind", ["dflash", "dflash, all see each other", "dflash, from the anchor", "dspark"])
def test_drafts_of_a_block(tmp_path, target_path, target, kind, draft_vocab):
    trainee = make_trainee(kind, target, draft_vocab=draft_vocab, noise=0.1, anchors=5)
    batch, loaded = make_batch(target, trainee, TEXTS, FIRST), Loaded(trainee, tmp_path, target_path)
    close(batch.states[0, : len(TEXTS[0])], loaded.states(TEXTS[0]))
    blocks = choose_blocks(batch, DRAFTS, 5, torch.Generator().manual_seed(3))
    scores = None
    with torch.no_grad():
        if kind == "dspark":
            logits, scores = trainee.corrected(batch, blocks)
        else:
            logits = trainee.draft_logits(batch, blocks)
    assert len(logits) == int(blocks.known.sum()) > 15
    for index, (text, block, draft) in enumerate(blocks.known.nonzero().tolist()):
        tokens, anchor = TEXTS[text], int(blocks.anchor[text, block])
        hidden, expected = loaded.block(tokens, anchor, DRAFTS)
        expected = expected[draft]
        if scores is not None:
            before, memory = torch.tensor([tokens[anchor + draft]], dtype=torch.int32), torch.zeros(1, 6)
            with torch.inference_mode():
                corrected, _, chance = loaded.head.correct(before, hidden[draft : draft + 1], expected[None], memory, 0)
            expected = corrected[0]
            close(scores[index].sigmoid(), chance[0])
        close(logits[index], expected)
