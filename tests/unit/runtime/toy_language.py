"""A language in which every token has one successor, a target that speaks it, and draft heads that know it.

Tokens form cycles. The target's hidden state is about the token's embedding, a random code, and its head maps a code to
the token's successor; its layers add a little noise. Draft heads know the successors too, but in the cycle of length
j + 1 they are wrong about one token: a round that begins after it accepts exactly j drafts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from draft_heads import LLAMA, Draft

HIDDEN, HEADS, HEAD_DIM, LAYERS, INTERMEDIATE = 64, 4, 16, 6, 32
FIRST, LAST = 10, 300
"""Tokens from FIRST to LAST - 1 form the cycles; the long one has what the short ones leave."""
SHORT = 6
"""There are cycles of 1 to SHORT tokens."""
SHARPNESS = 6.0
"""How far a successor's logit is above the others', about."""


def cycles() -> list[list[int]]:
    """The cycles, shortest first; the last is the long one."""
    found, token = [], FIRST
    for length in range(1, SHORT + 1):
        found.append(list(range(token, token + length)))
        token += length
    return [*found, list(range(token, LAST))]


def successor(token: int) -> int:
    """The next token; those outside of the cycles stay."""
    for cycle in cycles():
        if token in cycle:
            return cycle[(cycle.index(token) + 1) % len(cycle)]
    return token


def misjudged() -> dict[int, int]:
    """Of every short cycle its first token, and the token of the long one that heads take it for."""
    return {cycle[0]: cycles()[-1][20 + index] for index, cycle in enumerate(cycles()[:-1])}


def prompt_of(cycle: list[int], length: int) -> list[int]:
    """A prompt that ends with the successor of the cycle's first token."""
    end = 1 % len(cycle)
    return [cycle[(end - i) % len(cycle)] for i in range(length - 1, -1, -1)]


def codes(vocab: int) -> torch.Tensor:
    """[V, HIDDEN], each of length about 1; the last dimension is the same for all tokens."""
    generator = torch.Generator().manual_seed(11)
    found = torch.randn(vocab, HIDDEN, generator=generator)
    found[:, -1] = 0.0
    found /= found.norm(dim=1, keepdim=True)
    found[:, -1] = 0.5
    return found


def successor_head(vocab: int, steps: int = 1, wrong: frozenset[int] = frozenset()) -> torch.Tensor:
    """[V, HIDDEN]: maps a token's code to the token `steps` later; those of `wrong` to some other."""
    code = codes(vocab)
    code[:, -1] = 0.0
    head = torch.zeros(vocab, HIDDEN)
    for token in range(vocab):
        following = token
        for _ in range(steps):
            following = successor(following)
        head[cycles()[-1][-1] if token in wrong else following] += SHARPNESS / HIDDEN**0.5 * code[token]
    return head


def build_target(path: Path, tokenizer: Any) -> None:
    """The target on disk."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=0,
        bos_token_id=None,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval()
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data *= 0.02
        layer.mlp.down_proj.weight.data *= 0.02
    model.model.embed_tokens.weight.data = codes(len(tokenizer))
    model.lm_head.weight.data = successor_head(len(tokenizer))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def _embedding(vocab: int, wrong: bool) -> torch.Tensor:
    table = codes(vocab)
    if wrong:
        for token, other in misjudged().items():
            table[token] = codes(vocab)[other]
    return table


def _config(vocab: int) -> dict[str, Any]:
    return {
        **LLAMA,
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
    }


def _idle_layer(prefix: str, columns: int) -> dict[str, torch.Tensor]:
    """A layer that adds nothing."""
    size = HEADS * HEAD_DIM
    projections = {name: torch.zeros(size, columns) for name in ("q_proj", "k_proj", "v_proj")}
    return {
        **{f"{prefix}.self_attn.{name}.weight": weight for name, weight in projections.items()},
        f"{prefix}.self_attn.o_proj.weight": torch.zeros(HIDDEN, size),
        f"{prefix}.mlp.gate_proj.weight": torch.zeros(INTERMEDIATE, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": torch.zeros(INTERMEDIATE, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": torch.zeros(HIDDEN, INTERMEDIATE),
        f"{prefix}.post_attention_layernorm.weight": torch.ones(HIDDEN),
    }


def eagle(vocab: int, wrong: bool = True) -> Draft:
    """The projection takes the embedding, the layer adds nothing."""
    # About as long as the target's normalised hidden state.
    fc = torch.cat((HIDDEN**0.5 * torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)), 1)
    tensors = {"fc.weight": fc, "embed_tokens.weight": _embedding(vocab, wrong), **_idle_layer("layers.0", HIDDEN)}
    return Draft(_config(vocab), tensors, {"method": "eagle"})


def eagle3(vocab: int, wrong: bool = True) -> Draft:
    """Attention reads each token's own embedding, by queries and keys that fit best at distance 0."""
    tensors = _idle_layer("midlayer", 2 * HIDDEN)
    keys = torch.zeros(HEADS * HEAD_DIM, 2 * HIDDEN)
    keys[:, HIDDEN - 1] = 6.0
    tensors["midlayer.self_attn.q_proj.weight"] = keys
    tensors["midlayer.self_attn.k_proj.weight"] = keys.clone()
    tensors["midlayer.self_attn.v_proj.weight"] = torch.cat((torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)), 1)
    tensors["midlayer.self_attn.o_proj.weight"] = torch.eye(HIDDEN)
    tensors["midlayer.input_layernorm.weight"] = torch.ones(HIDDEN)
    tensors["midlayer.hidden_norm.weight"] = torch.zeros(HIDDEN)
    tensors["fc.weight"] = torch.zeros(HIDDEN, 3 * HIDDEN)
    tensors["norm.weight"] = torch.ones(HIDDEN)
    tensors["lm_head.weight"] = successor_head(vocab)
    tensors["embed_tokens.weight"] = _embedding(vocab, wrong)
    config = {**_config(vocab), "norm_before_residual": True, "draft_vocab_size": vocab}
    return Draft(config, tensors, {"method": "eagle3"})


def peagle(vocab: int, wrong: bool = True, places: int = 7) -> Draft:
    """Attention head h reads the token h places before its own, from which the draft is h + 1 steps away.

    In masked place m the heads below m read masks, which say nothing, and head m reads the anchor; those above it read
    what comes before the anchor and agree, as long as that is of the same cycle. Each head has a part of the hidden
    state to itself, in which the vocabulary's head knows what follows h + 1 steps later: for the cycle of j + 1 tokens
    only if h is below j. Head m outweighs those above it, so place m is right if and only if m is below j.
    """
    size, mask = places * HIDDEN, FIRST - 1
    embedding = torch.zeros(vocab, size)
    embedding[:, :HIDDEN] = codes(vocab)
    embedding[mask, : HIDDEN - 1] = 0.0
    embedding[mask, HIDDEN] = 1.0  # as long as the others
    frequencies = LLAMA["rope_theta"] ** (-torch.arange(0, HIDDEN, 2) / HIDDEN)
    queries, keys, values = (torch.zeros(size, 2 * size) for _ in range(3))
    for h in range(places):
        part = slice(h * HIDDEN, (h + 1) * HIDDEN)
        # Turned back by h places, so that the query fits the key there best.
        queries[part, HIDDEN - 1] = torch.cat((torch.cos(frequencies * h), -torch.sin(frequencies * h))) * 4.0
        keys[part, HIDDEN - 1] = torch.cat((torch.ones(HIDDEN // 2), torch.zeros(HIDDEN // 2))) * 4.0
        values[part, : HIDDEN - 1] = torch.eye(HIDDEN)[:, : HIDDEN - 1]
    head = torch.zeros(vocab, size)
    for h in range(places):
        known = successor_head(vocab, h + 1)
        for token in (token for j, cycle in enumerate(cycles()[:-1]) if wrong and h >= j for token in cycle):
            moved = SHARPNESS / HIDDEN**0.5 * torch.cat((codes(vocab)[token, :-1], torch.zeros(1)))
            following = token
            for _ in range(h + 1):
                following = successor(following)
            known[following] -= moved
            known[cycles()[-1][60 + token]] += moved
        head[:, h * HIDDEN : (h + 1) * HIDDEN] = 8.0**-h * known
    tensors = {
        "midlayer.self_attn.q_proj.weight": queries,
        "midlayer.self_attn.k_proj.weight": keys,
        "midlayer.self_attn.v_proj.weight": values,
        "midlayer.self_attn.o_proj.weight": torch.eye(size),
        "midlayer.mlp.gate_proj.weight": torch.zeros(INTERMEDIATE, size),
        "midlayer.mlp.up_proj.weight": torch.zeros(INTERMEDIATE, size),
        "midlayer.mlp.down_proj.weight": torch.zeros(size, INTERMEDIATE),
        "midlayer.post_attention_layernorm.weight": torch.ones(size),
        "midlayer.input_layernorm.weight": torch.ones(size),
        "midlayer.hidden_norm.weight": torch.zeros(size),
        "fc.weight": torch.zeros(size, 3 * HIDDEN),
        "norm.weight": torch.ones(size),
        "lm_head.weight": head,
        "embed_tokens.weight": embedding,
        "mask_hidden": torch.zeros(1, 1, 3 * HIDDEN),
    }
    config = {
        **_config(vocab),
        "hidden_size": size,
        "num_attention_heads": places,
        "num_key_value_heads": places,
        "head_dim": HIDDEN,
        "target_hidden_size": HIDDEN,
        "draft_vocab_size": vocab,
        "parallel_drafting": True,
        "pard_token": mask,
    }
    return Draft(config, tensors, {"method": "eagle3"})


def medusa(vocab: int, wrong: bool = True, heads: int = 7) -> Draft:
    """Head i maps a code to the token i + 2 later; in the cycle of j + 1 tokens only if i is below j."""
    tensors = {}
    for i in range(heads):
        bad = frozenset(token for j, cycle in enumerate(cycles()[:-1]) if i >= j for token in cycle)
        tensors[f"{i}.0.linear.weight"] = torch.zeros(HIDDEN, HIDDEN)
        tensors[f"{i}.0.linear.bias"] = torch.zeros(HIDDEN)
        tensors[f"{i}.1.weight"] = successor_head(vocab, i + 2, bad if wrong else frozenset())
    config = {"medusa_num_heads": heads, "medusa_num_layers": 1}
    return Draft(config, tensors, {"method": "medusa"}, file="medusa_lm_head.pt")


def _block(vocab: int, **fields: Any) -> Draft:
    """A drafter of blocks whose one layer adds nothing, so that a query drafts what its own token leads to."""
    tensors = _idle_layer("layers.0", HIDDEN)
    tensors |= {f"{name}.weight": torch.ones(HIDDEN) for name in ("hidden_norm", "norm", "layers.0.input_layernorm")}
    tensors |= {f"layers.0.self_attn.{name}_norm.weight": torch.ones(HEAD_DIM) for name in "qk"}
    tensors["fc.weight"] = torch.ones(HIDDEN, 2 * HIDDEN)
    tensors["lm_head.weight"] = successor_head(vocab)
    config = {**_config(vocab), "model_type": "qwen3", "block_size": 16, "num_hidden_layers": 1}
    config["dflash_config"] = {"target_layer_ids": [0, 3], "mask_token_id": FIRST, **fields}
    return Draft(config, tensors, {"method": "dflash"})


def dflash(vocab: int) -> Draft:
    """Its masks stand for the one token of the first cycle."""
    draft = _block(vocab)
    draft.config["architectures"] = ["DFlashDraftModel"]
    draft.tensors["embed_tokens.weight"] = codes(vocab)
    return draft


def dspark(vocab: int, wrong: bool = True) -> Draft:
    """The Markov head knows every token's successor, and the block nothing: its embeddings are empty."""
    draft = _block(vocab, markov_rank=HIDDEN, markov_head_type="vanilla", enable_confidence_head=False)
    draft.config["architectures"] = ["Qwen3DSparkModel"]
    draft.tensors["embed_tokens.weight"] = torch.zeros(vocab, HIDDEN)
    draft.tensors["markov_head.markov_w1.weight"] = HIDDEN**0.5 * _embedding(vocab, wrong)
    draft.tensors["markov_head.markov_w2.weight"] = successor_head(vocab)
    draft.spec = {"method": "dspark"}
    return draft
