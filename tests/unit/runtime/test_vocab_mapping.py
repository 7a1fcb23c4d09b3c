"""Vocabularies in every notation: which tokens are the same, and that each pair decodes to the same text."""

from __future__ import annotations

import logging
import random
from types import SimpleNamespace

import pytest
import torch
from draft_models import sentencepiece_tokenizer
from small_tokenizers import byte_level, tiktoken_like, word_piece

from draftgraph.runtime.errors import ConfigError
from draftgraph.runtime.models import cached_model
from draftgraph.runtime.token_texts import Notation, read_vocabulary
from draftgraph.runtime.tokenizer_files import load_tokenizer, tokenizer_hash
from draftgraph.runtime.vocab_mapping import build_mapping, load_mapping

TEXTS = [
    "The steam engine changed how people worked, and how they lived.\n",
    "def add(a, b):\n    return a + b\n",
    "Größe über alles; naïve café. 你好，世界。",
] * 3


@pytest.fixture(scope="module")
def tokenizers():
    return {
        Notation.BYTE_LEVEL: byte_level(TEXTS),
        Notation.SENTENCE_PIECE: sentencepiece_tokenizer(TEXTS),
        Notation.WORD_PIECE: word_piece(TEXTS),
        Notation.BYTES: tiktoken_like(TEXTS),
    }


def in_context(tokenizer, number: int) -> str:
    """What the token adds to a text."""
    before = tokenizer("The engine", add_special_tokens=False)["input_ids"]
    text = tokenizer.decode(before, clean_up_tokenization_spaces=False)
    longer = tokenizer.decode([*before, number], clean_up_tokenization_spaces=False)
    assert longer.startswith(text)
    return longer[len(text) :]


def mapped(target, draft):
    return build_mapping(read_vocabulary(target), read_vocabulary(draft), draft, len(target), len(draft))


def assert_pairs_agree(target, draft, mapping, count: int) -> None:
    """Pairs of both directions decode to the same text."""
    filler = draft.unk_token_id if draft.unk_token_id is not None else draft.eos_token_id
    forth = [(n, int(t)) for n, t in enumerate(mapping.target_ids) if t >= 0]
    back = [(int(d), n) for n, d in enumerate(mapping.draft_ids) if d != filler]
    assert len(forth) == mapping.shared
    for pairs in (forth, back):
        for ours, theirs in random.Random(0).sample(pairs, min(count, len(pairs))):
            assert in_context(draft, ours) == in_context(target, theirs)


@pytest.mark.parametrize("notation", list(Notation)[:4], ids=str)
def test_the_notation_is_recognised(tokenizers, notation):
    assert read_vocabulary(tokenizers[notation]).notation is notation


@pytest.mark.parametrize("draft", list(Notation)[:4], ids=str)
@pytest.mark.parametrize("target", list(Notation)[:4], ids=str)
def test_every_pair_decodes_to_the_same_text(tokenizers, target, draft):
    ours, theirs = tokenizers[target], tokenizers[draft]
    mapping = mapped(ours, theirs)
    assert mapping.shared > 20
    assert_pairs_agree(ours, theirs, mapping, 10**6)
    if target is draft:
        assert mapping.shared == len(read_vocabulary(theirs).texts)


def test_a_piece_of_text_is_preferred_to_a_byte_token(tokenizers):
    target, draft = tokenizers[Notation.SENTENCE_PIECE], tokenizers[Notation.BYTE_LEVEL]
    mapping = mapped(target, draft)
    letter, byte = target.convert_tokens_to_ids(["e", "<0x65>"])
    assert byte < letter, "the byte token comes first"
    assert mapping.target_ids[draft.convert_tokens_to_ids("e")] == letter
    assert mapping.draft_ids[byte] == mapping.draft_ids[letter] == draft.convert_tokens_to_ids("e")
    space, newline = draft.convert_tokens_to_ids(["\u0120", "\u010a"])
    assert in_context(target, int(mapping.target_ids[space])) == " "
    assert in_context(target, int(mapping.target_ids[newline])) == "\n"


def test_control_tokens_are_not_the_text_of_their_names():
    target = byte_level(TEXTS, special=["<|end|>", "<s>"])
    draft = byte_level([*TEXTS, "<s><s><s>"], special=["<|end|>"])
    draft.add_tokens(["<s>", "<tag>"])
    mapping = mapped(target, draft)
    assert mapping.target_ids[draft.convert_tokens_to_ids("<|end|>")] == target.convert_tokens_to_ids("<|end|>")
    assert mapping.target_ids[draft.convert_tokens_to_ids("<s>")] == -1
    assert not mapping.allowed[draft.convert_tokens_to_ids("<tag>")]
    assert mapping.draft_ids[target.convert_tokens_to_ids("<s>")] == draft.eos_token_id


def test_padded_and_cut_vocabularies(tokenizers):
    target, draft = tokenizers[Notation.BYTE_LEVEL], tokenizers[Notation.SENTENCE_PIECE]
    vocabularies = read_vocabulary(target), read_vocabulary(draft)
    padded = build_mapping(*vocabularies, draft, len(target) + 5, len(draft) + 9)
    assert padded.draft_ids[-5:].tolist() == [draft.unk_token_id] * 5
    assert not padded.allowed[-9:].any()
    assert padded.shared == mapped(target, draft).shared
    cut = build_mapping(*vocabularies, draft, 100, 300)
    assert cut.draft_ids.shape == (100,)
    assert cut.target_ids.shape == (300,)
    assert int(cut.draft_ids.max()) < 300
    assert int(cut.target_ids.max()) < 100


def test_a_drafter_with_nothing_to_stand_for_unknown_tokens(tokenizers):
    vocabulary = read_vocabulary(tokenizers[Notation.BYTE_LEVEL])
    with pytest.raises(ConfigError, match="neither an unknown nor an end token"):
        build_mapping(vocabulary, vocabulary, SimpleNamespace(unk_token_id=None, eos_token_id=None), 10, 10)


class TestCache:
    @pytest.fixture(autouse=True)
    def _cache(self, tmp_path, monkeypatch):
        monkeypatch.setenv("DRAFTGRAPH_CACHE", str(tmp_path / "cache"))

    @pytest.fixture
    def paths(self, tokenizers, tmp_path):
        found = []
        for notation in (Notation.BYTE_LEVEL, Notation.SENTENCE_PIECE):
            tokenizers[notation].save_pretrained(tmp_path / notation.name)
            found.append(tmp_path / notation.name)
        return found

    def test_built_once(self, paths, tmp_path, monkeypatch):
        first = load_mapping(*paths, 300, 400)
        monkeypatch.setattr("draftgraph.runtime.vocab_mapping.load_tokenizer", lambda path: pytest.fail("built again"))
        second = load_mapping(*paths, 300, 400)
        for name in ("draft_ids", "target_ids", "allowed"):
            assert torch.equal(getattr(first, name), getattr(second, name))
        with pytest.raises(pytest.fail.Exception, match="built again"):
            load_mapping(*paths, 301, 400)
        assert [file.suffix for file in (tmp_path / "cache" / "vocabularies").iterdir()] == [".safetensors"]

    def test_another_tokenizer_has_another_hash(self, paths):
        before = tokenizer_hash(paths[0])
        (paths[0] / "unrelated.txt").write_text("x")
        assert tokenizer_hash(paths[0]) == before
        tokenizer = load_tokenizer(paths[0])
        tokenizer.add_tokens(["new"])
        tokenizer.save_pretrained(paths[0])
        assert tokenizer_hash(paths[0]) != before

    def test_a_damaged_file_is_built_again(self, paths, tmp_path, caplog):
        first = load_mapping(*paths, 300, 400)
        (file,) = (tmp_path / "cache" / "vocabularies").iterdir()
        file.write_bytes(file.read_bytes()[:-4])
        with caplog.at_level(logging.WARNING):
            assert torch.equal(load_mapping(*paths, 300, 400).target_ids, first.target_ids)
        assert "is damaged" in caplog.text

    def test_a_cache_that_cannot_be_written(self, paths, tmp_path, caplog):
        (tmp_path / "cache").write_text("a file")
        with caplog.at_level(logging.WARNING):
            assert load_mapping(*paths, 300, 400).shared > 20
        assert "cannot be kept" in caplog.text

    def test_nothing_in_common(self, paths, monkeypatch):
        with pytest.raises(ConfigError, match="have no token in common"):
            load_mapping(*paths, 1, 400)

    def test_little_in_common(self, paths, caplog):
        with caplog.at_level(logging.WARNING):
            assert 0 < load_mapping(*paths, 60, 400).shared < 100
        assert "in common with the target's" in caplog.text


@pytest.mark.models
@pytest.mark.slow
@pytest.mark.parametrize("swapped", [False, True])
def test_ten_thousand_tokens_of_real_vocabularies(smollm2_path, swapped):
    gemma = cached_model("gemma3-270m")
    if gemma is None:
        pytest.skip("Gemma 3 270M is not in the cache: run `draftgraph fetch gemma3-270m`")
    target, draft = (load_tokenizer(path) for path in ((smollm2_path, gemma) if swapped else (gemma, smollm2_path)))
    mapping = mapped(target, draft)
    assert mapping.shared > 40_000
    assert_pairs_agree(target, draft, mapping, 10_000)
