"""Draft checkpoints with the published names, and the mathematics of every head written down plainly.

The transcriptions take a whole sequence, without cache, windows or packing, and share no code with the package.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 32, 48, 4, 2, 8, 8
EPS, THETA = 1e-5, 10_000.0
Tensors = dict[str, torch.Tensor]

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "max_position_embeddings": 512,
}


def build_target(path: Path, tokenizer: Any) -> Any:
    """A random Llama of 8 layers on disk, whose text goes on; in memory as transformers has it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=1024,
        rms_norm_eps=EPS,
        tie_word_embeddings=False,
        eos_token_id=0,
        bos_token_id=None,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return model


class Maker:
    """Random tensors, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=self._generator) * scale / columns**0.5

    def norm(self, size: int) -> torch.Tensor:
        return 1.0 + 0.3 * torch.randn(size, generator=self._generator)

    def vector(self, size: int) -> torch.Tensor:
        return 0.3 * torch.randn(size, generator=self._generator)


def decoder_tensors(
    make: Maker, prefix: str, columns: int = HIDDEN, *, bias: bool = False, qk: bool = False
) -> Tensors:
    """Attention and feed-forward of one layer."""
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    found = {
        f"{prefix}.self_attn.q_proj.weight": make.matrix(queries, columns),
        f"{prefix}.self_attn.k_proj.weight": make.matrix(keys, columns),
        f"{prefix}.self_attn.v_proj.weight": make.matrix(keys, columns),
        f"{prefix}.self_attn.o_proj.weight": make.matrix(HIDDEN, queries),
        f"{prefix}.mlp.gate_proj.weight": make.matrix(INTERMEDIATE, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": make.matrix(INTERMEDIATE, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": make.matrix(HIDDEN, INTERMEDIATE),
        f"{prefix}.post_attention_layernorm.weight": make.norm(HIDDEN),
    }
    if bias:
        for name, size in (("q", queries), ("k", keys), ("v", keys)):
            found[f"{prefix}.self_attn.{name}_proj.bias"] = make.vector(size)
    if qk:
        found |= {f"{prefix}.self_attn.{name}_norm.weight": make.norm(HEAD_DIM) for name in ("q", "k")}
    return found


@dataclass
class Draft:
    """A checkpoint: what its files hold."""

    config: dict[str, Any]
    tensors: Tensors
    spec: dict[str, Any]
    """Options of the speculative config, besides `model` and K."""
    states: tuple[int, ...] = (LAYERS,)
    """Which of transformers' hidden states it reads."""
    file: str = "model.safetensors"
    drafts: Callable[..., list[torch.Tensor]] | None = None
    """The transcription; see `draft_logits`."""
    extra: dict[str, Any] = field(default_factory=dict)

    def save(self, path: Path) -> Path:
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(self.config))
        if self.file.endswith(".safetensors"):
            save_file({name: t.contiguous() for name, t in self.tensors.items()}, path / self.file)
        else:
            torch.save(self.tensors, path / self.file)
        if "mask_embedding" in self.extra:
            torch.save({"mask_token_id": 7, "embedding": self.extra["mask_embedding"]}, path / "mask_embedding.pt")
        return path


def eagle(vocab: int, *, seed: int = 0, bias: bool = False, wrapped: bool = False, own: bool = False) -> Draft:
    """An EAGLE-1 or -2 head; `bias`: on fc and on queries, keys and values; `own`: with an embedding of its own."""
    make = Maker(seed)
    tensors = {"fc.weight": make.matrix(HIDDEN, 2 * HIDDEN), **decoder_tensors(make, "layers.0", bias=bias)}
    if bias:
        tensors["fc.bias"] = make.vector(HIDDEN)
    if own:
        tensors["embed_tokens.weight"] = make.matrix(vocab, HIDDEN)
    config = {**LLAMA, "vocab_size": vocab, "architectures": ["LlamaForCausalLM"], "bias": bias}
    if wrapped:
        config = {"model_type": "eagle", "architectures": ["EagleModel"], "model": config}
    file = "pytorch_model.bin" if bias else "model.safetensors"
    return Draft(config, tensors, {"method": "eagle"}, file=file, drafts=eagle_drafts)


def eagle3(
    vocab: int,
    *,
    seed: int = 1,
    speculators: bool = False,
    draft_vocab: int | None = None,
    layers: int = 1,
    qwen: bool = False,
    fc_norm: bool = False,
    input_norm: bool = False,
    norm_output: bool = False,
    norm_before_residual: bool | None = None,
    ids: list[int] | None = None,
    nested_ids: list[int] | None = None,
    parallel: bool = False,
    own: bool = False,
) -> Draft:
    """An EAGLE-3 head of either layout."""
    make = Maker(seed)
    first = "layers.0" if speculators else "midlayer"
    states = tuple(ids) if ids else tuple(i + 1 for i in nested_ids) if nested_ids else (2, LAYERS // 2, LAYERS - 3)
    size, count = draft_vocab or vocab, len(states)
    tensors = decoder_tensors(make, first, 2 * HIDDEN, qk=qwen)
    tensors |= {f"{first}.{name}.weight": make.norm(HIDDEN) for name in ("hidden_norm", "input_layernorm")}
    for index in range(1, layers):
        tensors |= decoder_tensors(make, f"layers.{index}", qk=qwen)
        tensors[f"layers.{index}.input_layernorm.weight"] = make.norm(HIDDEN)
    tensors["fc.weight"] = make.matrix(HIDDEN, count * HIDDEN)
    tensors["norm.weight"] = make.norm(HIDDEN)
    tensors["lm_head.weight"] = make.matrix(size, HIDDEN, 3.0)
    if fc_norm:
        tensors |= {f"fc_norm.{i}.weight": make.norm(HIDDEN) for i in range(count)}
    if input_norm:
        tensors["input_norm.weight"] = make.norm(count * HIDDEN)
    if own:
        tensors["embed_tokens.weight"] = make.matrix(vocab, HIDDEN)
    if parallel:
        tensors["mask_hidden"] = make.vector(count * HIDDEN).reshape(1, 1, -1)
    if draft_vocab is not None:
        chosen = torch.arange(vocab)[:: max(1, vocab // draft_vocab)][:draft_vocab]
        tensors["d2t"] = chosen - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, chosen, True)
    inner = {**LLAMA, "vocab_size": vocab, "num_hidden_layers": layers}
    if qwen:
        inner["model_type"] = "qwen3"
    outer: dict[str, Any] = {"draft_vocab_size": size}
    if norm_before_residual is not None:
        outer["norm_before_residual"] = norm_before_residual
    flags = {"fc_norm": fc_norm, "norm_before_fc": input_norm, "norm_output": norm_output}
    outer |= {name: True for name, wanted in flags.items() if wanted}
    if ids:
        outer["eagle_aux_hidden_state_layer_ids"] = ids
    if nested_ids:
        outer["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": nested_ids, "use_aux_hidden_state": True}
    if parallel:
        outer |= {"parallel_drafting": True, "ptd_token_id": 7}
    if speculators:
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": inner,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "verifier": {"name_or_path": "some/verifier", "architectures": ["LlamaForCausalLM"]},
            },
            **outer,
        }
    else:
        config = {**inner, "architectures": ["LlamaForCausalLMEagle3"], **outer}
    drafts = peagle_drafts if parallel else eagle3_drafts
    return Draft(config, tensors, {"method": "eagle3"}, states, drafts=drafts, extra={"first": first})


def medusa(
    vocab: int, *, seed: int = 2, heads: int = 7, layers: int = 1, blocks: bool = False, size: int | None = None
) -> Draft:
    """Medusa heads; `blocks`: of the layout with names, which may know `size` tokens only."""
    make = Maker(seed)
    tensors: Tensors = {}
    for i in range(heads):
        for j in range(layers):
            name = f"blocks.{i}.layers.{j}" if blocks else f"{i}.{j}.linear"
            tensors[f"{name}.weight"] = make.matrix(HIDDEN, HIDDEN)
            if not blocks:
                tensors[f"{name}.bias"] = make.vector(HIDDEN)
        name = f"lm_heads.{i}.weight" if blocks else f"{i}.{layers}.weight"
        tensors[name] = make.matrix(size or vocab, HIDDEN, 3.0)
    if not blocks:
        # Published counts are often wrong.
        config = {"medusa_num_heads": heads - 2, "medusa_num_layers": layers, "base_model_name_or_path": "some/base"}
        return Draft(config, tensors, {"method": "medusa"}, file="medusa_lm_head.pt", drafts=medusa_drafts)
    config = {"model_type": "medusa", "num_heads": heads, "num_hidden_layers": layers, "hidden_size": HIDDEN}
    config |= {"vocab_size": vocab, "truncated_vocab_size": size or vocab}
    if size is not None:
        tensors["token_map"] = torch.arange(vocab)[:: vocab // size][:size].flip(0)
    tensors = {f"medusa_heads.{name}": t for name, t in tensors.items()} if size is None else tensors
    return Draft(config, tensors, {"method": "medusa"}, drafts=medusa_drafts)


# The mathematics


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def rotate(x: torch.Tensor) -> torch.Tensor:
    """The rotary embedding of [T, heads, D] at positions 0 to T - 1."""
    length, _, size = x.shape
    angles = torch.arange(length)[:, None] * THETA ** (-torch.arange(0, size, 2) / size)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def decoder(t: Tensors, prefix: str, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Attention of [T, columns] over itself, then the feed-forward, around the residual stream [T, H]."""
    length = len(attended)

    def project(name: str, heads: int) -> torch.Tensor:
        weight, bias = t[f"{prefix}.self_attn.{name}_proj.weight"], t.get(f"{prefix}.self_attn.{name}_proj.bias")
        return F.linear(attended, weight, bias).view(length, heads, HEAD_DIM)

    q, k, v = project("q", HEADS), project("k", KV_HEADS), project("v", KV_HEADS)
    if f"{prefix}.self_attn.q_norm.weight" in t:
        q, k = rms(q, t[f"{prefix}.self_attn.q_norm.weight"]), rms(k, t[f"{prefix}.self_attn.k_norm.weight"])
    q, k = rotate(q), rotate(k).repeat_interleave(HEADS // KV_HEADS, 1)
    v = v.repeat_interleave(HEADS // KV_HEADS, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
    x = residual + out @ t[f"{prefix}.self_attn.o_proj.weight"].T
    y = rms(x, t[f"{prefix}.post_attention_layernorm.weight"])
    gate, up = y @ t[f"{prefix}.mlp.gate_proj.weight"].T, y @ t[f"{prefix}.mlp.up_proj.weight"].T
    return x + (F.silu(gate) * up) @ t[f"{prefix}.mlp.down_proj.weight"].T


def eagle_drafts(
    draft: Draft, target: Tensors, tokens: list[int], hidden: list[torch.Tensor], k: int
) -> list[torch.Tensor]:
    """Logits of k drafts after `tokens`, greedily; `hidden`: the target's states of all tokens but the last."""
    t = draft.tensors
    embedding = t.get("embed_tokens.weight", target["model.embed_tokens.weight"])
    states, following, logits = hidden[0], tokens[1:], []
    for _ in range(k):
        x = F.linear(torch.cat((embedding[following], states), 1), t["fc.weight"], t.get("fc.bias"))
        out = decoder(t, "layers.0", x, x)[-1:]
        logits.append(out[0] @ target["lm_head.weight"].T)
        states, following = torch.cat((states, out)), [*following, int(logits[-1].argmax())]
    return logits


def eagle3_forward(draft: Draft, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    t, first = draft.tensors, draft.extra["first"]
    normed = rms(states, t[f"{first}.hidden_norm.weight"])
    pairs = torch.cat((rms(embedded, t[f"{first}.input_layernorm.weight"]), normed), 1)
    default = "speculators_model_type" in draft.config
    x = decoder(t, first, pairs, normed if draft.config.get("norm_before_residual", default) else states)
    index = 1
    while f"layers.{index}.mlp.down_proj.weight" in t:
        x = decoder(t, f"layers.{index}", rms(x, t[f"layers.{index}.input_layernorm.weight"]), x)
        index += 1
    return x


def eagle3_states(draft: Draft, hidden: list[torch.Tensor]) -> torch.Tensor:
    t = draft.tensors
    if "fc_norm.0.weight" in t:
        hidden = [rms(h, t[f"fc_norm.{i}.weight"]) for i, h in enumerate(hidden)]
    joined = torch.cat(hidden, 1)
    if "input_norm.weight" in t:
        joined = rms(joined, t["input_norm.weight"])
    return joined @ t["fc.weight"].T


def target_id(draft: Draft, token: int) -> int:
    return token + int(draft.tensors["d2t"][token]) if "d2t" in draft.tensors else token


def eagle3_drafts(
    draft: Draft, target: Tensors, tokens: list[int], hidden: list[torch.Tensor], k: int
) -> list[torch.Tensor]:
    t = draft.tensors
    embedding = t.get("embed_tokens.weight", target["model.embed_tokens.weight"])
    states, following, logits = eagle3_states(draft, hidden), tokens[1:], []
    for _ in range(k):
        out = eagle3_forward(draft, embedding[following], states)[-1:]
        normed = rms(out, t["norm.weight"])
        logits.append(normed[0] @ t["lm_head.weight"].T)
        states = torch.cat((states, normed if draft.config.get("norm_output") else out))
        following = [*following, target_id(draft, int(logits[-1].argmax()))]
    return logits


def peagle_drafts(
    draft: Draft, target: Tensors, tokens: list[int], hidden: list[torch.Tensor], k: int
) -> list[torch.Tensor]:
    t = draft.tensors
    embedding = t.get("embed_tokens.weight", target["model.embed_tokens.weight"])
    masks = t["mask_hidden"].flatten().view(len(hidden), 1, -1).expand(-1, k - 1, -1)
    states = eagle3_states(draft, [torch.cat((h, m)) for h, m in zip(hidden, masks, strict=True)])
    following = [*tokens[1:], *[draft.config["ptd_token_id"]] * (k - 1)]
    out = eagle3_forward(draft, embedding[following], states)[-k:]
    return list(rms(out, t["norm.weight"]) @ t["lm_head.weight"].T)


def medusa_drafts(
    draft: Draft, target: Tensors, tokens: list[int], hidden: list[torch.Tensor], k: int
) -> list[torch.Tensor]:
    t = {name.removeprefix("medusa_heads."): tensor for name, tensor in draft.tensors.items()}
    logits = []
    for i in range(k):
        x, j = hidden[0][-1], 0
        while (name := f"{i}.{j}.linear") + ".weight" in t or (name := f"blocks.{i}.layers.{j}") + ".weight" in t:
            x = x + F.silu(F.linear(x, t[f"{name}.weight"], t.get(f"{name}.bias")))
            j += 1
        logits.append(t.get(f"lm_heads.{i}.weight", t.get(f"{i}.{j}.weight")) @ x)
    return logits


def drafted(draft: Draft, logits: torch.Tensor) -> int:
    """The likeliest token, in the target's vocabulary."""
    token = int(logits.argmax())
    return int(draft.tensors["token_map"][token]) if "token_map" in draft.tensors else target_id(draft, token)
