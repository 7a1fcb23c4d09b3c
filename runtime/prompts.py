"""What a caller may pass as a prompt, and how it becomes token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from .errors import RequestError

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or chat messages of the form `{"role": ..., "content": ...}`."""

_ACCEPTED = "a prompt is a string, a list of token ids, or a list of chat messages with 'role' and 'content'"


def is_batch(prompts: Any) -> bool:
    """Whether `prompts` is a list of prompts rather than one prompt."""
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        return False
    return len(prompts) > 0 and not isinstance(prompts[0], (int, Mapping)) and not _is_integer(prompts[0])


def encode_prompt(prompt: Any, tokenizer: Any, *, vocab_size: int, max_model_len: int) -> tuple[int, ...]:
    """Token ids of a prompt: text with the tokenizer's special tokens, messages through its chat template.

    Raises `RequestError` for a prompt that is empty, has ids outside the vocabulary, or leaves no room for an
    answer within `max_model_len` tokens.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise RequestError("the prompt is empty; it needs at least one token")
        ids = encode_text(prompt, tokenizer, add_special_tokens=True)
    elif isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
        ids = _encode_chat(prompt, tokenizer)
    elif isinstance(prompt, Sequence) or hasattr(prompt, "tolist"):
        items = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        wrong = next((i for i in items if not _is_integer(i)), None)
        if wrong is not None:
            raise RequestError(f"{_ACCEPTED}; the list holds {wrong!r}")
        ids = [int(i) for i in items]
    else:
        raise RequestError(f"{_ACCEPTED}; got {type(prompt).__name__}")
    if not ids:
        raise RequestError("the prompt is empty; it needs at least one token")
    for position, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"token id {token} at position {position} of the prompt is outside the vocabulary, "
                f"which is 0 to {vocab_size - 1}"
            )
    if len(ids) >= max_model_len:
        raise RequestError(
            f"the prompt has {len(ids)} tokens; max_model_len is {max_model_len} and at least one must be left for "
            f"the answer, so at most {max_model_len - 1} are accepted"
        )
    return tuple(ids)


def encode_text(text: str, tokenizer: Any, *, add_special_tokens: bool) -> list[int]:
    """Token ids of text; raises `RequestError` where it holds what is no Unicode character."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the prompt is not valid text: it holds {text[error.start]!r} at character {error.start}, "
            "which is no Unicode character (was it decoded from bytes that are not UTF-8?)"
        ) from None
    return [int(i) for i in tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]]


def _encode_chat(messages: Sequence[Message], tokenizer: Any) -> list[int]:
    check_messages(messages)
    return encode_text(render_chat(messages, tokenizer, begin=True), tokenizer, add_special_tokens=False)


def check_messages(messages: Sequence[Any]) -> None:
    """Raises `RequestError` for a chat message that has no role or whose content is no text."""
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise RequestError(f"chat message {number} must have a 'role' and a 'content', got {message!r}")
        if not isinstance(message["content"], str):
            raise RequestError(
                f"the content of chat message {number} must be a string, got {message['content']!r}: models here "
                "read text only"
            )


def render_chat(messages: Sequence[Message], tokenizer: Any, *, begin: bool) -> str:
    """A chat as the model's template writes it; with `begin`, up to where the assistant begins to write.

    Raises `RequestError` if there is no template, or it refuses the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise RequestError("this model's tokenizer has no chat template; pass the prompt as a string")
    try:
        text = tokenizer.apply_chat_template([dict(m) for m in messages], tokenize=False, add_generation_prompt=begin)
    except Exception as error:  # a template may raise anything, often on purpose
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RequestError(f"the model's chat template refused these messages: {reason}") from error
    return str(text)


def _is_integer(value: Any) -> bool:
    return not isinstance(value, bool) and hasattr(value, "__index__")


def chat_or_text(tokenizer: Any, text: str, *, chat: bool | None = None, system: str | None = None) -> Prompt:
    """A user's text as a prompt: the messages of a chat, or the text itself.

    Args:
        tokenizer: of the model.
        text: what the user wrote.
        chat: whether to make a chat of it; None: if there is a system message or the model has a chat template.
        system: the system message.
    """
    if chat is None:
        chat = system is not None or bool(getattr(tokenizer, "chat_template", None))
    if not chat:
        return text
    messages: list[Message] = [{"role": "user", "content": text}]
    return messages if system is None else [{"role": "system", "content": system}, *messages]
