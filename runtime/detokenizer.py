"""From tokens to text as they arrive: whole characters, and nothing that a stop string may cut off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

REPLACEMENT = "\ufffd"
"""What a tokenizer shows for bytes that are not, or not yet, a character."""

_MOST_UNRESOLVED = 16
"""Tokens that may wait for the end of a character. A character has at most four: more are no UTF-8."""


@dataclass(frozen=True, kw_only=True)
class StopMatch:
    """A stop string that the text came to hold."""

    string: str
    kept_tokens: int
    """How many tokens of the push that completed it are kept, the completing one included."""


class IncrementalDetokenizer:
    """Turns the tokens of one answer into text, push by push.

    The pieces join to the same text however the tokens are split over pushes. Without stop strings and a
    prompt tail that is, for a byte-level tokenizer, `tokenizer.decode` of all tokens. Each push decodes its
    own tokens and those of the push before it, never the whole text.

    Args:
        tokenizer: a transformers tokenizer.
        prompt_tail_ids: the last few tokens of the prompt. SentencePiece tokenizers drop the space before the
            first token that they are given, so that they need some to keep the one before the answer.
        skip_special_tokens: leave special tokens out of the text.
        stop: strings that end the answer.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        prompt_tail_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stop = tuple(stop)
        self._added_tokens = tokenizer.added_tokens_decoder
        self._pending = ""
        self._match: StopMatch | None = None
        self._window = [token for token in prompt_tail_ids if not self._is_silent(token)]
        context = self._decode(self._window)
        if context.endswith(REPLACEMENT):
            # The prompt ends inside a character: the answer's text begins on its own.
            self._window, context = [], ""
        self._resolved = len(self._window)
        self._shown = len(context)

    @property
    def match(self) -> StopMatch | None:
        """The stop string that ended the text, or None."""
        return self._match

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens of the answer.

        Returns:
            The text that can be shown now: it ends with a whole character and holds no part of a stop string.
            After a stop string was matched it is empty.
        """
        if self._match is not None:
            return ""
        before = (list(self._window), self._resolved, self._shown, self._pending)
        piece = self._release(self._advance(token_ids), len(token_ids))
        if self._match is None or len(token_ids) == 1:
            return piece
        # A stop string is in there: find the token that completed it.
        self._match = None
        self._window, self._resolved, self._shown, self._pending = before
        pieces = []
        for position, token in enumerate(token_ids):
            pieces.append(self._release(self._advance([token]), position + 1))
            if self._match is not None:
                break
        return "".join(pieces)

    def finish(self) -> str:
        """Ends the answer.

        Returns:
            The text that was held back; empty after a stop string.
        """
        if self._match is not None:
            return ""
        rest = self._decode(self._window)[self._shown :]
        self._shown += len(rest)
        piece = self._release(rest, 0) + self._pending
        self._pending = ""
        return piece

    def _decode(self, ids: list[int]) -> str:
        # Cleaning up spaces looks at pairs of tokens and would change text that was shown already.
        return self._tokenizer.decode(
            ids, skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def _is_silent(self, token: int) -> bool:
        """Whether the token has no text, so that it must not count as one that may complete a character."""
        added = self._added_tokens.get(token)
        if added is not None:
            return added.special and self._skip_special_tokens
        return token >= len(self._tokenizer)

    def _advance(self, token_ids: Sequence[int]) -> str:
        """Adds tokens to the window and returns the new text that later tokens cannot change."""
        window = self._window
        window += [token for token in token_ids if not self._is_silent(token)]
        text = self._decode(window)
        final = len(text.rstrip(REPLACEMENT))
        cut = None
        if final < len(text) and len(window) - self._resolved > _MOST_UNRESOLVED:
            cut = self._boundary(text)
            if cut is not None:
                final = max(final, len(self._decode(window[:cut])))
        piece = text[self._shown : final]
        self._shown = max(self._shown, final)
        if cut is not None:
            self._shown -= len(self._decode(window[:cut]))
            self._window, self._resolved = window[cut:], 0
        elif final == len(text) and piece:
            # The tokens since the last whole character stay as context of the next ones.
            self._window = window[self._resolved :]
            self._resolved = len(self._window)
            self._shown = len(self._decode(self._window))
        return piece

    def _boundary(self, text: str) -> int | None:
        """A place to split a window that ends in bytes which are not UTF-8, so that it stays short.

        Later tokens change only the last, incomplete character, of at most three bytes, and a
        character of four bytes holds at most three inner token boundaries. So one of the four boundaries
        tried here is no inner one, and what is before it is final.
        """
        window = self._window
        for cut in range(len(window) - 4, len(window) - 8, -1):
            if self._decode(window[:cut]) + self._decode(window[cut:]) == text:
                return cut
        return None

    def _release(self, piece: str, tokens: int) -> str:
        """Passes on the text that no stop string can reach any more; notes a match."""
        if not self._stop:
            return piece
        text = self._pending + piece
        found = [(text.find(string), order) for order, string in enumerate(self._stop) if string in text]
        if found:
            start, order = min(found)
            self._match = StopMatch(string=self._stop[order], kept_tokens=tokens)
            self._pending = ""
            return text[:start]
        held = max(_overlap(text, string) for string in self._stop)
        self._pending = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, string: str) -> int:
    """The length of the longest end of `text` that is a beginning of `string`."""
    for length in range(min(len(text), len(string) - 1), 0, -1):
        if text.endswith(string[:length]):
            return length
    return 0
