"""What a head computes while it learns is what it computes in the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_training import DRAFTS, HIDDEN, VOCAB, Loaded, make_batch, make_trainee, save_target
from tiny_models import tiny_model

from draftgraph.model_zoo.training.blocks import choose_blocks
from draftgraph.model_zoo.training.chains import drafting_rows
from draftgraph.model_zoo.training.target import FrozenTarget

FIRST = 2
TEXTS = [torch.randint(1, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (13, 9)]


def frozen(path: Path) -> tuple[Path, FrozenTarget]:
    return path, FrozenTarget(path, dtype=torch.float32, device=torch.device("cpu"), name="some/target")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, FrozenTarget]:
    return frozen(save_target(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, FrozenTarget]:
    """A target that scales its embeddings and caps its logits."""
    path = tmp_path_factory.mktemp("gemma")
    tiny_model("gemma3", vocab_size=VOCAB, hidden_size=HIDDEN, max_position_embeddings=128).save_pretrained(path)
    return frozen(path)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


CHAINS: dict[str, Callable[..., list[torch.Tensor]]] = {
    "eagle3": Loaded.chain,
    "mtp": Loaded.chain,
    "p-eagle": Loaded.parallel,
    "medusa": Loaded.heads,
}
"""Of heads whose drafts follow every position, how the engine makes them."""


def check_chains(kind: str, directory: Path, target: tuple[Path, FrozenTarget], draft_vocab: bool) -> None:
    trainee: Any = make_trainee(kind, target[1], draft_vocab=draft_vocab, noise=0.1)
    batch, loaded = make_batch(target[1], trainee, TEXTS, FIRST), Loaded(trainee, directory, target[0])
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


def check_blocks(kind: str, directory: Path, target: tuple[Path, FrozenTarget], draft_vocab: bool) -> None:
    trainee: Any = make_trainee(kind, target[1], draft_vocab=draft_vocab, noise=0.1, anchors=5)
    batch, loaded = make_batch(target[1], trainee, TEXTS, FIRST), Loaded(trainee, directory, target[0])
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


@pytest.mark.parametrize(
    ("kind", "draft_vocab"),
    [("eagle3", True), ("eagle3", False), ("p-eagle", True), ("medusa", True), ("medusa", False), ("mtp", False)],
)
def test_drafts_after_every_position(tmp_path, llama, kind, draft_vocab):
    check_chains(kind, tmp_path, llama, draft_vocab)


@pytest.mark.parametrize("draft_vocab", [True, False])
@pytest.mark.parametrize("kind", ["dflash", "dflash, all see each other", "dflash, from the anchor", "dspark"])
def test_drafts_of_a_block(tmp_path, llama, kind, draft_vocab):
    check_blocks(kind, tmp_path, llama, draft_vocab)


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "dflash"])
def test_drafts_beside_a_target_with_scaled_embeddings_and_capped_logits(tmp_path, gemma, kind):
    (check_blocks if kind == "dflash" else check_chains)(kind, tmp_path, gemma, False)
