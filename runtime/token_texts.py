"""The text that each token of a vocabulary stands for, whatever notation its tokenizer keeps it in."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

G_DOT, BLOCK, WORD_PIECE_PREFIX = "\u0120", "\u2581", "##"
"""How byte-level BPE and SentencePiece write a space, and WordPiece a token that continues a word."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LEAST_WORD_PIECES = 0.01
# The share of tokens that begin with ## above which a vocabulary without a space marker is WordPiece's.


class Notation(enum.Enum):
    """How a vocabulary writes its tokens."""

    BYTE_LEVEL = "byte-level BPE"
    """A character for each byte; a space is G-dot."""
    SENTENCE_PIECE = "SentencePiece"
    """Text in which a space is a block character, and tokens <0x00> to <0xFF> for single bytes."""
    WORD_PIECE = "WordPiece"
    """Words, each with a space before it, and their continuations with ## before them."""
    BYTES = "tiktoken"
    """The bytes themselves."""
    PLAIN = "plain text"
    """The text itself."""


@dataclass(frozen=True)
class TokenText:
    """What a token stands for, for comparison with a token of another vocabulary."""

    text: bytes
    """UTF-8, possibly a part of a character. Of a control token, its name."""
    control: bool
    """A control token, such as an end of sequence, which is not the same as the text of its name."""


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer's tokens by what they stand for."""

    notation: Notation
    texts: Mapping[int, TokenText]
    """By id. Tokens that stand for nothing are left out."""
    ids: Mapping[TokenText, int]
    """The token that tokenizing uses for a text: the first of those that stand for it."""


def read_vocabulary(tokenizer: Any) -> Vocabulary:
    """The vocabulary of a transformers tokenizer."""
    ids_of_token: Mapping[str | bytes, int] = tokenizer.get_vocab()
    notation = _notation(tokenizer, ids_of_token)
    control = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    control.update(tokenizer.all_special_ids)
    texts: dict[int, TokenText] = {}
    ids: dict[TokenText, int] = {}
    stand_ins: list[int] = []
    for token, number in sorted(ids_of_token.items(), key=lambda item: item[1]):
        if number in control:
            name = token if isinstance(token, bytes) else token.encode()
            text = TokenText(name, control=True)
        else:
            text = TokenText(_text(token, notation), control=False)
        if not text.text:
            continue
        texts[number] = text
        if notation is Notation.SENTENCE_PIECE and _is_byte_token(token):
            # Stands in where no other token fits, so it is never the one for a text that has a token of its own.
            stand_ins.append(number)
        else:
            ids.setdefault(text, number)
    for number in stand_ins:
        ids.setdefault(texts[number], number)
    return Vocabulary(notation, texts, ids)


def _notation(tokenizer: Any, ids_of_token: Mapping[str | bytes, int]) -> Notation:
    """Found by tokenizing a space and a letter; where that shows no marker, by what the tokens look like."""
    if any(isinstance(token, bytes) for token in ids_of_token):
        return Notation.BYTES
    pieces = tokenizer.tokenize(" a")
    first = str(pieces[0])[:1] if pieces else ""
    if first == G_DOT:
        return Notation.BYTE_LEVEL
    if first == BLOCK:
        return Notation.SENTENCE_PIECE
    tokens = [str(token) for token in ids_of_token]
    continuing = sum(token.startswith(WORD_PIECE_PREFIX) and len(token) > 2 for token in tokens)
    if continuing > _LEAST_WORD_PIECES * len(tokens):
        return Notation.WORD_PIECE
    dots, blocks = (sum(token.startswith(marker) for token in tokens) for marker in (G_DOT, BLOCK))
    if dots == blocks:  # none of either, in all likelihood
        return Notation.PLAIN
    return Notation.BYTE_LEVEL if dots > blocks else Notation.SENTENCE_PIECE


def _text(token: str | bytes, notation: Notation) -> bytes:
    """What decoding makes of one token between others."""
    if isinstance(token, bytes):
        return token
    if notation is Notation.BYTE_LEVEL:
        byte_of = _byte_of_character()
        # As the decoder does, take a token that is not in the alphabet as it stands: it was added to the vocabulary.
        if all(character in byte_of for character in token):
            return bytes(byte_of[character] for character in token)
    elif notation is Notation.SENTENCE_PIECE:
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(BLOCK, " ").encode()
    elif notation is Notation.WORD_PIECE:
        continues = token.startswith(WORD_PIECE_PREFIX) and len(token) > 2
        return (token[2:] if continues else " " + token).encode()
    return token.encode()


def _is_byte_token(token: str | bytes) -> bool:
    return isinstance(token, str) and _BYTE_TOKEN.fullmatch(token) is not None


@cache
def _byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level BPE (GPT-2): printable bytes stand for themselves, the rest for 256 and up."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
