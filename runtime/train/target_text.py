"""How a target reads prompts and chats, as token ids, and which of them it wrote."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...model_zoo.checkpoint import read_config
from ...model_zoo.training.examples import Example
from ..errors import RequestError
from ..prompts import Message, Prompt, chat_or_text, check_messages, encode_prompt, encode_text, render_chat
from ..tokenizer_files import load_tokenizer


class EmptyAnswerError(RequestError):
    """An answer without text, of which nothing can be learnt."""


@dataclass(frozen=True, kw_only=True)
class TargetText:
    """A target's tokenizer and the tokens that end its answers; no weights."""

    tokenizer: Any
    vocab_size: int
    """Of the model, which may be larger than the tokenizer's."""
    end_ids: tuple[int, ...]
    """Tokens that end an answer. The first is put behind answers that are given as text; may be empty."""
    max_positions: int
    """The most tokens of a text that the model was made for."""

    @classmethod
    def of_directory(cls, path: Path) -> TargetText:
        """Reads what a model's directory says.

        Raises:
            CheckpointError: its config or tokenizer is missing or damaged.
            UnsupportedModelError: its family is not supported.
        """
        config, tokenizer = read_config(path), load_tokenizer(path)
        end_ids = config.eos_token_ids
        own = tokenizer.eos_token_id
        if own is not None:  # what the tokenizer calls its end is what the chat template ends a turn with
            end_ids = (own, *(token for token in end_ids if token != own))
        return cls(
            tokenizer=tokenizer,
            vocab_size=config.vocab_size,
            end_ids=end_ids,
            max_positions=config.max_position_embeddings,
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether it can be given chats."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def chat_or_text(self, text: str) -> Prompt:
        """A user's message if the target has a chat template, otherwise the text itself."""
        return chat_or_text(self.tokenizer, text)

    def encode_prompt(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids as the engine would feed them, of any length; raises `RequestError` for what is no prompt."""
        return encode_prompt(prompt, self.tokenizer, vocab_size=self.vocab_size, max_model_len=sys.maxsize)

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a piece of text, without special tokens at its ends. Raises `RequestError` for no text."""
        return encode_text(text, self.tokenizer, add_special_tokens=False)

    def text_start(self) -> tuple[int, ...]:
        """What the tokenizer puts before every text, such as a token for its beginning."""
        bos = getattr(self.tokenizer, "bos_token_id", None)
        ids = self.tokenizer("a", add_special_tokens=True)["input_ids"]
        return (int(bos),) if bos is not None and ids and ids[0] == bos else ()

    def answered(self, prompt: Prompt, answer: str) -> Example:
        """A prompt with an answer that is given as text, closed with the token that ends an answer.

        Raises:
            RequestError: either is no text or cannot be encoded.
            EmptyAnswerError: the answer is empty or blank.
        """
        if not answer.strip():
            raise EmptyAnswerError("the answer is empty")
        if not isinstance(prompt, str) and isinstance(prompt[0], dict):
            return self.chat([*prompt, {"role": "assistant", "content": answer}])
        ids = self.encode_prompt(prompt)
        whole = self.encode_prompt(prompt + answer) if isinstance(prompt, str) else ()
        own = whole[len(ids) :] if whole[: len(ids)] == ids else self.encode_text(answer)
        return Example.answered(ids, (*own, *self.end_ids[:1]))

    def chat(self, messages: Sequence[Message]) -> Example:
        """A chat with the assistant's turns as answers.

        A turn is what the template writes behind where it lets the model begin, up to and with the token that ends
        an answer. Templates that write an earlier turn differently once the chat goes on, as those that drop the
        thoughts of earlier turns do, are followed up to the turn before.

        Raises:
            RequestError: there is no turn of the assistant, or the template does not let the model begin it.
            EmptyAnswerError: no turn of the assistant has text. One that has none among others counts as context.
        """
        check_messages(messages)
        turns = [number for number, message in enumerate(messages) if message.get("role") == "assistant"]
        if not turns or turns[0] == 0:
            raise RequestError("a chat needs a turn of the assistant, after one of the user")
        if all(_is_blank(messages[turn]) for turn in turns):
            raise EmptyAnswerError("the turns of the assistant are empty")
        tokens: list[int] = []
        spans: list[tuple[int, int]] = []
        written = ""
        for turn in turns:
            before = render_chat(messages[:turn], self.tokenizer, begin=True)
            after = render_chat(messages[: turn + 1], self.tokenizer, begin=False)
            if not before.startswith(written) or not after.startswith(before):
                break
            context = self._continued(tokens, written, before)
            tokens, written = self._continued(context, before, after), after
            own = self._own_length(tokens[len(context) :])
            if not own:
                break
            if not _is_blank(messages[turn]):
                spans.append((len(context), len(context) + own))
        if not spans:
            raise RequestError(
                "the target's chat template does not write the assistant's turn behind where it lets the model begin, "
                "so that it cannot be told which tokens are the answer"
            )
        return Example(tuple(tokens[: spans[-1][1]]), tuple(spans))

    def _continued(self, tokens: list[int], written: str, text: str) -> list[int]:
        """Token ids of `text`, which begins with `written`, behind the `tokens` of that.

        Encoded as a whole if those are its beginning: some tokenizers put a space before what is encoded by itself.
        """
        whole = self.encode_text(text)
        return whole if whole[: len(tokens)] == tokens else [*tokens, *self.encode_text(text[len(written) :])]

    def _own_length(self, answer: list[int]) -> int:
        """How many tokens of a turn the model wrote: the template may write more behind the one that ends it."""
        last = max((place for place, token in enumerate(answer) if token in self.end_ids), default=len(answer) - 1)
        return last + 1


def _is_blank(message: Message) -> bool:
    content = message.get("content")
    return isinstance(content, str) and not content.strip()
