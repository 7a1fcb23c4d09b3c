"""A tiny Gemma 4 with assistants as transformers stores them, and an assistant's mathematics written down plainly.

The transcription takes keys, values and the hidden state from transformers' target over the whole text, and shares no
code with the package.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

HIDDEN, BACKBONE, LAYERS, WINDOW, INTERMEDIATE = 24, 32, 5, 10, 40
HEADS, KV_HEADS, HEAD_DIM, FULL_DIM, EPS = 4, 2, 8, 16, 1e-6
TARGET_TYPES = ["sliding_attention", "full_attention"] * 2 + ["full_attention"]
TYPES = ["sliding_attention", "sliding_attention", "full_attention"]
THETA = {"sliding_attention": 10_000.0, "full_attention": 1_000_000.0}
PART = 0.25
"""Of the dimensions of a full layer's heads that are turned."""

LAYER_NAMES = [
    *(f"{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")),
    *(f"{name}.weight" for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm")),
    *(f"self_attn.{name}.weight" for name in ("q_proj", "q_norm", "o_proj")),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "layer_scalar",
]
NAMES = {
    "pre_projection.weight",
    "post_projection.weight",
    "model.norm.weight",
    "model.embed_tokens.weight",
    *(f"model.layers.{layer}.{name}" for layer in range(len(TYPES)) for name in LAYER_NAMES),
}
"""The published names; with an ordered vocabulary there are two more."""
ORDERED_NAMES = {"masked_embedding.centroids.weight", "masked_embedding.token_ordering"}


def _common(vocab: int) -> dict[str, Any]:
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": THETA["sliding_attention"]},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": PART,
            "rope_theta": THETA["full_attention"],
        },
    }
    return {
        "vocab_size": vocab,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "global_head_dim": FULL_DIM,
        "sliding_window": WINDOW,
        "max_position_embeddings": 1024,
        "rope_parameters": rope,
        "eos_token_id": 0,
        "bos_token_id": None,
        "pad_token_id": 0,
        "hidden_size_per_layer_input": 0,
        "rms_norm_eps": EPS,
    }


def _fill(model: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        offset, scale = (1.0, 0.3) if parameter.ndim == 1 else (0.0, 1.0 / parameter.shape[-1] ** 0.5)
        if "embed_tokens" in name:
            scale = 1.0
        parameter.data = torch.randn(parameter.shape, generator=generator) * scale + offset
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.8)
        if name.endswith("token_ordering"):
            buffer.copy_(torch.randperm(buffer.numel(), generator=generator))
    model.tie_weights()
    return model.eval()


def build_target(path: Path, tokenizer: Any) -> Any:
    """A random Gemma 4 on disk whose last two layers read others' keys and values; in memory as transformers has it."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    config = Gemma4TextConfig(
        **_common(len(tokenizer)),
        hidden_size=BACKBONE,
        num_hidden_layers=LAYERS,
        layer_types=TARGET_TYPES,
        num_kv_shared_layers=2,
        final_logit_softcapping=30.0,
        attn_implementation="eager",
    )
    model = _fill(Gemma4ForCausalLM(config), 3)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return model


def build_assistant(
    path: Path,
    vocab: int,
    *,
    ordered: bool = False,
    tied: bool = True,
    backbone: int = BACKBONE,
    seed: int = 5,
    **changes: Any,
) -> Any:
    """A random assistant on disk; in memory as transformers has it."""
    from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

    text = Gemma4TextConfig(
        **{**_common(vocab), "layer_types": TYPES, **changes},
        hidden_size=HIDDEN,
        num_hidden_layers=len(TYPES),
        num_kv_shared_layers=len(TYPES),
        vocab_size_per_layer_input=0,
        use_double_wide_mlp=False,
        enable_moe_block=False,
        tie_word_embeddings=tied,
    )
    config = Gemma4AssistantConfig(
        text_config=text,
        backbone_hidden_size=backbone,
        use_ordered_embeddings=ordered,
        num_centroids=vocab // 10,
        centroid_intermediate_top_k=4,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    model = _fill(Gemma4AssistantForCausalLM(config), seed)
    model.save_pretrained(path)
    return model


def build_toy(path: Path, tokenizer: Any) -> None:
    """A Gemma 4 that speaks the toy language, and an assistant that is wrong about one token of each short cycle.

    Layers add next to nothing in the target and nothing in the assistant, which takes the embedding of the token.
    """
    import toy_language as toy
    from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4ForCausalLM, Gemma4TextConfig

    vocab, size = len(tokenizer), toy.HIDDEN
    sizes = {**_common(vocab), "hidden_size": size, "num_hidden_layers": 2}
    sizes["layer_types"] = ["sliding_attention", "full_attention"]
    target = _fill(Gemma4ForCausalLM(Gemma4TextConfig(**sizes, tie_word_embeddings=False)), 3)
    shared = {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": 0, "enable_moe_block": False}
    text = Gemma4TextConfig(**sizes, **shared, use_double_wide_mlp=False)
    assistant = _fill(Gemma4AssistantForCausalLM(Gemma4AssistantConfig(text_config=text, backbone_hidden_size=size)), 4)
    for model, share in ((target, 0.02), (assistant, 0.0)):
        for layer in model.model.layers:
            layer.post_attention_layernorm.weight.data.fill_(share)
            layer.post_feedforward_layernorm.weight.data.fill_(share)
            layer.layer_scalar.fill_(1.0)
        model.model.norm.weight.data.fill_(1.0)
    target.model.embed_tokens.weight.data = toy.codes(vocab)
    target.lm_head.weight.data = toy.successor_head(vocab)
    assistant.pre_projection.weight.data = torch.cat((torch.eye(size), torch.zeros(size, size)), 1)
    assistant.model.embed_tokens.weight.data = toy.successor_head(vocab, 1, frozenset(toy.misjudged()))
    assistant.tie_weights()
    target.save_pretrained(path / "target")
    tokenizer.save_pretrained(path / "target")
    assistant.save_pretrained(path / "assistant")


def _rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def _turn(x: torch.Tensor, position: int, kind: str) -> torch.Tensor:
    """The rotary embedding of [heads, D] at one position."""
    size = x.shape[-1]
    angles = position * THETA[kind] ** (-torch.arange(0, size, 2) / size)
    if kind == "full_attention":
        angles[int(PART * size) // 2 :] = 0.0
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def assistant_drafts(
    assistant: Any, target: Any, tokens: list[int], k: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Logits of k drafts after `tokens`, greedily, and which tokens had some."""
    t = {name: tensor.data for name, tensor in [*assistant.named_parameters(), *assistant.named_buffers()]}
    with torch.no_grad():
        out = target(torch.tensor([tokens[:-1]]), output_hidden_states=True, return_shared_kv_states=True)
    hidden, embedding = out.hidden_states[-1][0, -1], target.model.embed_tokens.weight.data
    token, logits, known = tokens[-1], [], []
    for _ in range(k):
        pair = torch.cat((embedding[token] * math.sqrt(BACKBONE), hidden))
        x = t["pre_projection.weight"] @ pair
        for layer, kind in enumerate(TYPES):
            w = {name: t[f"model.layers.{layer}.{name}"] for name in LAYER_NAMES}
            keys, values = (part[0].transpose(0, 1) for part in out.shared_kv_states[kind])
            if kind == "sliding_attention":
                keys, values = keys[-WINDOW - 1 :], values[-WINDOW - 1 :]
            query = (w["self_attn.q_proj.weight"] @ _rms(x, w["input_layernorm.weight"])).view(HEADS, -1)
            query = _turn(_rms(query, w["self_attn.q_norm.weight"]), len(tokens) - 1, kind)
            keys, values = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (keys, values))
            shares = torch.einsum("hd,khd->hk", query, keys).softmax(-1)
            attended = torch.einsum("hk,khd->hd", shares, values).flatten()
            x = x + _rms(w["self_attn.o_proj.weight"] @ attended, w["post_attention_layernorm.weight"])
            y = _rms(x, w["pre_feedforward_layernorm.weight"])
            gate = F.gelu(w["mlp.gate_proj.weight"] @ y, approximate="tanh")
            y = w["mlp.down_proj.weight"] @ (gate * (w["mlp.up_proj.weight"] @ y))
            x = (x + _rms(y, w["post_feedforward_layernorm.weight"])) * w["layer_scalar"]
        x = _rms(x, t["model.norm.weight"])
        hidden = t["post_projection.weight"] @ x
        head = t.get("lm_head.weight", t["model.embed_tokens.weight"])
        all_logits, some = head @ x, torch.ones(len(head), dtype=torch.bool)
        if "masked_embedding.centroids.weight" in t:
            best = (t["masked_embedding.centroids.weight"] @ x).topk(4).indices
            some = torch.zeros_like(some)
            some[t["masked_embedding.token_ordering"].view(-1, 10)[best].flatten()] = True
        all_logits = all_logits.masked_fill(~some, -torch.inf)
        token = int(all_logits.argmax())
        logits.append(all_logits)
        known.append(some)
    return logits, known


def transformers_drafts(assistant: Any, target: Any, tokens: list[int], k: int) -> tuple[list[int], torch.Tensor]:
    """The drafts and logits, [k, V], of transformers' candidate generator, for a text of which nothing was rejected."""
    from transformers import GenerationConfig
    from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

    assistant.generation_config.num_assistant_tokens = k
    generator = SinglePositionMultiTokenCandidateGenerator(
        assistant, target.get_input_embeddings(), GenerationConfig(max_length=10_000)
    )
    with torch.no_grad():
        out = target(torch.tensor([tokens[:-1]]), output_hidden_states=True, return_shared_kv_states=True)
        ids, logits = generator.get_candidates(torch.tensor([tokens]), {}, out, False, 0)
    return ids[0, len(tokens) :].tolist(), logits[0]
