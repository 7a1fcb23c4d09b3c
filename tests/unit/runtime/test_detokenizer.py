import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from draftgraph.runtime.detokenizer import IncrementalDetokenizer, StopMatch

CORPUS = [
    "the quick brown fox jumps over the lazy dog, and then the fox sleeps",
    "def main():\n    return  'hello world'\n",
    "推测解码 — 概念 🙂🙂 naïve café 👩‍👩‍👧",
]
SAMPLES = [
    *CORPUS,
    " leading space",
    "🎉 unseen emoji 🧑🏽‍🚀",
    "中文和 English 混合",
    "tail\n\n",
    "\ufffd kept",
]


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def sentence_piece():
    pieces = ["<unk>", "▁", "▁a", "b", "▁b", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer), {piece: i for i, piece in enumerate(pieces)}


TOKENIZER = byte_level()


def encode(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def split(ids, cuts):
    bounds = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in itertools.pairwise(bounds)]


def run(ids, cuts=(), **options):
    """The pieces, and the number of tokens that were kept in all."""
    detokenizer = IncrementalDetokenizer(TOKENIZER, **options)
    pieces, kept = [], 0
    for part in split(list(ids), cuts):
        pieces.append(detokenizer.push(part))
        if detokenizer.match is not None:
            return pieces, kept + detokenizer.match.kept_tokens, detokenizer.match.string
        kept += len(part)
    pieces.append(detokenizer.finish())
    return pieces, kept, detokenizer.match.string if detokenizer.match else None


cuts_strategy = st.lists(st.integers(0, 400), max_size=60)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(SAMPLES), min_size=1, max_size=4), cuts_strategy)
def test_pieces_join_to_the_decoded_text(samples, cuts):
    text = "".join(samples)
    pieces, kept, _ = run(encode(text), cuts)
    assert "".join(pieces) == text
    assert kept == len(encode(text))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, len(TOKENIZER) + 3), max_size=80), cuts_strategy)
def test_any_tokens_decode_as_the_tokenizer_does(ids, cuts):
    pieces, _, _ = run(ids, cuts)
    assert "".join(pieces) == TOKENIZER.decode(ids, skip_special_tokens=True)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(range(2, 258)), max_size=120), cuts_strategy)
def test_runs_of_lone_bytes(ids, cuts):
    pieces, _, _ = run(ids, cuts)
    assert "".join(pieces) == TOKENIZER.decode(ids)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from(SAMPLES), min_size=1, max_size=3),
    st.lists(
        st.sampled_from(["fox", "🙂", "the fox", "n\n", "解码", " ", "zzz", "🧑🏽‍🚀", "o w"]),
        min_size=1,
        max_size=3,
    ),
    cuts_strategy,
)
def test_stop_strings_do_not_depend_on_the_split(samples, stop, cuts):
    text = "".join(samples)
    ids = encode(text)
    pieces, kept, matched = run(ids, cuts, stop=tuple(stop))
    one_by_one, kept_one_by_one, matched_one_by_one = run(ids, range(len(ids)), stop=tuple(stop))
    assert "".join(pieces) == "".join(one_by_one)
    assert (kept, matched) == (kept_one_by_one, matched_one_by_one)
    if matched is None:
        assert "".join(pieces) == text
        assert not any(string in text for string in stop)
    else:
        joined = "".join(pieces)
        assert not any(string in joined for string in stop)
        assert text.startswith(joined + matched)
        # Kept up to the token that completes the stop string, and not one less.
        decoded = [TOKENIZER.decode(ids[:count]) for count in (kept - 1, kept)]
        assert matched in decoded[1]
        assert not any(string in decoded[0].rstrip("\ufffd") for string in stop)


def test_pieces_never_end_inside_a_character():
    ids = encode("🎉" * 3)
    assert len(ids) > 3
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    pieces = [detokenizer.push([token]) for token in ids]
    assert set(pieces) == {"", "🎉"}
    assert detokenizer.finish() == ""


def test_an_unfinished_character_is_flushed_as_the_tokenizer_shows_it():
    ids = encode("ok 🎉")[:-1]
    pieces, _, _ = run(ids, range(len(ids)))
    assert pieces[-1] == "\ufffd"
    assert "".join(pieces) == TOKENIZER.decode(ids)


def test_a_possible_stop_string_is_held_back_until_it_cannot_be_one():
    detokenizer = IncrementalDetokenizer(TOKENIZER, stop=("END.",))
    assert detokenizer.push(encode("go EN")) == "go "
    assert detokenizer.push(encode("D")) == ""
    assert detokenizer.push(encode("S")) == "ENDS"
    assert detokenizer.push(encode(" EN")) == " "
    assert detokenizer.finish() == "EN"
    assert detokenizer.match is None


def test_the_match_names_string_and_kept_tokens():
    ids = encode("go") + encode("x") + encode("y") + encode("z")
    assert len(ids) == 5
    detokenizer = IncrementalDetokenizer(TOKENIZER, stop=("nothing", "xy"))
    assert detokenizer.push(ids) == "go"
    assert detokenizer.match == StopMatch(string="xy", kept_tokens=4)
    assert detokenizer.push(ids) == ""
    assert detokenizer.finish() == ""


def test_special_tokens_are_left_out_unless_asked_for():
    ids = [*encode("a"), TOKENIZER.eos_token_id, *encode("b")]
    assert "".join(run(ids)[0]) == "ab"
    assert "".join(run(ids, skip_special_tokens=False)[0]) == TOKENIZER.decode(ids)
    assert "</s>" in TOKENIZER.decode(ids)


def test_a_special_token_inside_a_character_does_not_hold_it_up():
    party = encode("🎉")
    ids = [party[0], TOKENIZER.eos_token_id, *party[1:]]
    pieces, _, _ = run(ids, range(len(ids)))
    assert "".join(pieces) == "🎉"


def test_the_prompt_tail_is_context_and_no_text():
    prompt = encode("the quick")
    assert "".join(run(encode(" brown"), prompt_tail_ids=prompt)[0]) == " brown"
    inside_a_character = encode("🎉")[:-1]
    ids = encode("fox")
    assert "".join(run(ids, prompt_tail_ids=inside_a_character)[0]) == "fox"


def test_the_window_stays_short(monkeypatch):
    longest = 0
    decode = type(TOKENIZER).decode

    def counting(self, ids, **options):
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(self, ids, **options)

    monkeypatch.setattr(type(TOKENIZER), "decode", counting)
    lone_bytes = encode("🎉")[:1] * 200
    for ids in (encode("the fox " * 100), lone_bytes):
        run(ids, range(len(ids)))
        assert longest < 40


class TestSentencePiece:
    def run(self, pieces, **options):
        tokenizer, ids = sentence_piece()
        detokenizer = IncrementalDetokenizer(tokenizer, **options)
        return "".join([*(detokenizer.push([ids[piece]]) for piece in pieces), detokenizer.finish()])

    def test_spaces_between_tokens(self):
        assert self.run(["▁a", "▁b", "b", "▁", "▁a"]) == "a bb  a"

    def test_the_space_before_the_answer_needs_the_prompt_tail(self):
        assert self.run(["▁a", "▁b"], prompt_tail_ids=[3]) == " a b"

    @pytest.mark.parametrize("text", ["é", "🎉", "🎉🎉"])
    def test_characters_made_of_byte_tokens(self, text):
        parts = [f"<0x{byte:02X}>" for byte in text.encode()]
        assert self.run(["▁a", *parts, "▁b"]) == f"a{text} b"
