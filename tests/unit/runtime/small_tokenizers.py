"""Small trained tokenizers in every notation."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any


def byte_level(texts: Sequence[str], special: Sequence[str] = ("<eos>",)) -> Any:
    """As GPT-2, Llama 3 and Qwen have it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0])


def word_piece(texts: Sequence[str]) -> Any:
    """As BERT has it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[SEP]")


class TiktokenLike:
    """A slow tokenizer whose vocabulary is of bytes, as the first Qwen's was; it takes the longest token that fits."""

    unk_token_id = None

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._tokens = [*tokens, b"<|endoftext|>"]
        self._ids = {token: number for number, token in enumerate(self._tokens)}
        self.eos_token_id = len(tokens)
        self.all_special_ids = [self.eos_token_id]
        self.added_tokens_decoder = {self.eos_token_id: SimpleNamespace(special=True)}

    def __len__(self) -> int:
        return len(self._tokens)

    def get_vocab(self) -> dict[bytes, int]:
        return self._ids

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        data, ids = text.encode(), []
        while data:
            size = next(size for size in range(len(data), 0, -1) if data[:size] in self._ids)
            ids.append(self._ids[data[:size]])
            data = data[size:]
        return {"input_ids": ids}

    def decode(self, ids: Sequence[int], clean_up_tokenization_spaces: bool = True) -> str:
        return b"".join(self._tokens[number] for number in ids).decode(errors="replace")


def tiktoken_like(texts: Sequence[str]) -> TiktokenLike:
    """Every byte, and the words of the texts with a space before them."""
    words = sorted({f" {word}".encode() for text in texts for word in text.split()})
    return TiktokenLike([*(bytes([byte]) for byte in range(256)), *words])
