"""Draft models for the tiny target: one that often agrees with it, and one with another vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def save_noisy_copy(target: Path, path: Path, noise: float, **config: Any) -> Path:
    """A copy of a model whose layers and head are disturbed, so that it drafts what the target says now and then."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(target).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "embed" not in name:
            scale = noise * parameter.data.std()
            parameter.data += scale * torch.randn(parameter.shape, generator=generator)
    model.config.update(config)
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(target).save_pretrained(path)
    return path


def sentencepiece_tokenizer(texts: list[str], vocab_size: int = 400):
    """BPE as SentencePiece writes it: block characters for spaces, and byte tokens for what it does not know."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<unk>", "</s>", "<|user|>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # Byte tokens are ordinary ones, which the trainer cannot be told.
    import json

    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = not token["content"].startswith("<0x")
    state["added_tokens"] = [token for token in state["added_tokens"] if token["special"]]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)), unk_token="<unk>", eos_token="</s>"
    )


def save_translated_copy(target: Path, path: Path, tokenizer: Any) -> Path:
    """The target's own model over another vocabulary: rows of both tables in the places of the tokens they share.

    Its vocabulary is padded by 7 tokens that its tokenizer does not know.
    """
    from transformers import AutoTokenizer, LlamaForCausalLM

    from draftgraph.runtime.token_texts import read_vocabulary

    model = LlamaForCausalLM.from_pretrained(target).eval()
    ours, theirs = read_vocabulary(AutoTokenizer.from_pretrained(target)), read_vocabulary(tokenizer)
    size = len(tokenizer) + 7
    for table in (model.model.embed_tokens, model.lm_head):
        generator = torch.Generator().manual_seed(2)
        rows = 0.1 * torch.randn(size, table.weight.shape[1], generator=generator)
        for text, number in theirs.ids.items():
            if text in ours.ids:
                rows[number] = table.weight.data[ours.ids[text]]
        table.weight.data = rows
    model.config.vocab_size = size
    model.config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
