"""The engines whose launches are compiled: well-known checkpoints, types, and what a user may choose."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from engine_heads import METHODS as HEAD_METHODS

from draftgraph.runtime.loading import DEFAULT_MAX_MODEL_LEN


def _config(
    family: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    layer_types: tuple[str, ...] = ("",),
    **more: object,
) -> dict[str, object]:
    # Widths and depth of the network do not matter to the kernels.
    hf = {
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": heads * head_dim,
        "intermediate_size": 64,
        "num_hidden_layers": len(layer_types),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 32768,
        "eos_token_id": 2,
    }
    if len(layer_types) > 1:
        hf["layer_types"] = list(layer_types)
    return hf | more


GEMMA_LAYERS = ("sliding_attention", "full_attention")
CHECKPOINTS: dict[str, dict[str, object]] = {
    "SmolLM2-135M": _config("llama", 9, 3, 64, 49152, max_position_embeddings=8192),
    "SmolLM2-1.7B": _config("llama", 32, 32, 64, 49152, max_position_embeddings=8192),
    "TinyLlama-1.1B": _config("llama", 32, 4, 64, 32000, max_position_embeddings=2048),
    "Llama-3.2-1B": _config("llama", 32, 8, 64, 128256, eos_token_id=[128001, 128008, 128009]),
    "Llama-3.2-3B": _config("llama", 24, 8, 128, 128256, eos_token_id=[128001, 128008, 128009]),
    "Llama-3.1-8B": _config("llama", 32, 8, 128, 128256, eos_token_id=[128001, 128008, 128009]),
    "Llama-2-7B": _config("llama", 32, 32, 128, 32000, max_position_embeddings=4096),
    "Mistral-7B-v0.1": _config("mistral", 32, 8, 128, 32000, sliding_window=4096),
    "Mistral-7B-v0.3": _config("mistral", 32, 8, 128, 32768, sliding_window=None),
    "Qwen2.5-0.5B": _config("qwen2", 14, 2, 64, 151936),
    "Qwen2.5-1.5B": _config("qwen2", 12, 2, 128, 151936),
    "Qwen2.5-7B": _config("qwen2", 28, 4, 128, 152064),
    "Qwen3-0.6B": _config("qwen3", 16, 8, 128, 151936),
    "Qwen3-8B": _config("qwen3", 32, 8, 128, 151936),
    "Gemma-3-270m": _config("gemma3_text", 4, 1, 256, 262144, layer_types=GEMMA_LAYERS, sliding_window=512),
    "Gemma-3-1B": _config("gemma3_text", 4, 1, 256, 262144, layer_types=GEMMA_LAYERS, sliding_window=512),
    "Gemma-3-4B": _config("gemma3_text", 8, 4, 256, 262208, layer_types=GEMMA_LAYERS, sliding_window=1024),
    "Gemma-3-27B": _config("gemma3_text", 32, 16, 128, 262208, layer_types=GEMMA_LAYERS, sliding_window=1024),
    "MiMo-7B": _config("mimo", 32, 8, 128, 151680),
    "ERNIE-4.5-0.3B": _config("ernie4_5", 16, 2, 128, 103424),
}
"""What their config.json says, as far as kernels depend on it."""

_EXPERTS = {"num_experts_per_tok": 8, "first_k_dense_replace": 0, "num_hidden_layers": 1}
MIXTURES: dict[str, dict[str, object]] = {
    "Qwen3-30B-A3B": _config(
        "qwen3_moe", 32, 4, 128, 151936, hidden_size=2048, num_experts=128, moe_intermediate_size=768, **_EXPERTS
    ),
    # The kind of its layers that prediction modules have too.
    "Qwen3-Next-80B-A3B": _config(
        "qwen3_next", 16, 2, 256, 151936, hidden_size=2048, num_experts=512, full_attention_interval=1
    ),
    "GLM-4.5-Air": _config("glm4_moe", 96, 8, 128, 151552, hidden_size=4096, **_EXPERTS),
    "ERNIE-4.5-21B-A3B": _config("ernie4_5_moe", 20, 4, 128, 103424, hidden_size=2560, moe_layer_start_index=0),
    "DeepSeek-V2-Lite": _config(
        "deepseek_v2",
        16,
        16,
        128,
        102400,
        **_EXPERTS
        | {"hidden_size": 2048, "q_lora_rank": None, "num_experts_per_tok": 6, "moe_intermediate_size": 1408},
    ),
    "DeepSeek-V3": _config("deepseek_v3", 128, 128, 128, 129280, hidden_size=7168, **_EXPERTS),
    "Gemma-4-26B-A4B": _config(
        "gemma4_text",
        16,
        8,
        256,
        262144,
        layer_types=GEMMA_LAYERS,
        hidden_size=2816,
        hidden_size_per_layer_input=0,
        attention_k_eq_v=True,
        num_global_key_value_heads=2,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
    ),
}
"""Those with mixtures of experts, of whose kernels the widths do matter: in bfloat16 alone, to keep the time short."""
CHECKPOINTS |= MIXTURES

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CUSTOM = ("speculator", "engine_custom:NoDrafts")
DRAFTER = "some/drafter"
"""Stands for whatever a method's `model` would be."""


ADAPTIVE = ("enable_adaptive_verification", True)


@dataclass(frozen=True)
class Setting:
    """One engine."""

    checkpoint: str
    dtype: torch.dtype
    drafts: int
    """0 for plain decoding."""
    rule: str
    buckets: tuple[int, ...] = (1, 2, 4, 8, 16)
    exact: bool = False
    max_model_len: int = DEFAULT_MAX_MODEL_LEN
    method: str | tuple[str, ...] = "ngram"
    options: tuple[tuple[str, object], ...] = ()
    """Of the speculative config."""
    drafter: str = ""
    """For draft_model the checkpoint that drafts; through a mapping if its vocabulary is another."""
    head: str = ""
    """A draft head, one of `engine_heads.FAMILIES`."""
    modules: int = 0
    """So many prediction modules of the target's."""


def settings() -> Iterator[Setting]:
    """Every checkpoint in every type, and beside the defaults what a user may choose."""
    for name, dtype in itertools.product(CHECKPOINTS, DTYPES):
        # Kernels tell one row from several, and windows of few queries from those of many.
        if name not in MIXTURES or dtype == torch.bfloat16:
            yield Setting(name, dtype, 5, "standard", buckets=(1, 16))
    yield from _verification()
    yield from _sizes()
    yield from _budgets()
    yield from _drafters()
    yield from _target_drafts()


def _verification() -> Iterator[Setting]:
    """Every rule, by type and number of drafts."""
    small, bf16 = "SmolLM2-135M", torch.bfloat16
    for dtype, rule in itertools.product(DTYPES, ("standard", "coupled")):
        yield Setting(small, dtype, 0, rule)
    for drafts, rule in itertools.product((1, 3, 7, 8, 15), ("coupled", "block", "synthetic")):
        yield Setting(small, bf16, drafts, rule, buckets=(1, 2, 16) if rule == "coupled" else (1, 2))
    for name, dtype in itertools.product(("Llama-2-7B", "SmolLM2-135M", "Llama-3.1-8B", "Gemma-3-4B"), DTYPES):
        yield Setting(name, dtype, 5, "block", buckets=(1,))
    for dtype in DTYPES:
        yield Setting("Llama-3.1-8B", dtype, 15, "standard", exact=True, buckets=(16,))
        yield Setting("Llama-3.1-8B", dtype, 0, "coupled", exact=True, buckets=(1,))


def _sizes() -> Iterator[Setting]:
    """Buckets, drafts, contexts and n-grams."""
    small, bf16 = "SmolLM2-135M", torch.bfloat16
    for name in (small, "Llama-3.1-8B", "Gemma-3-4B"):
        yield Setting(name, bf16, 5, "standard")
    for drafts in (31, 63, 128):
        yield Setting(small, bf16, drafts, "standard", buckets=(1, 2))
    for length in (100, 1000, 2048):
        yield Setting(small, bf16, 5, "standard", max_model_len=length, buckets=(1, 4))
    yield Setting("Llama-3.1-8B", bf16, 5, "standard", max_model_len=32768)
    for shortest, longest in ((1, 1), (1, 3), (3, 3), (2, 5), (1, 8), (1, 16)):
        lookup = (("prompt_lookup_min", shortest), ("prompt_lookup_max", longest))
        yield Setting(small, bf16, 5, "coupled", options=lookup, buckets=(1,))
    yield Setting(small, bf16, 5, "coupled", buckets=(3, 5, 12))


def _budgets() -> Iterator[Setting]:
    """Budgets that vary, over one row and many, with few drafts and many."""
    small, bf16 = "SmolLM2-135M", torch.bfloat16
    for drafts in (7, 1, 3, 15, 63):
        buckets = (1, 4, 16) if drafts == 7 else (1, 16)
        yield Setting(small, bf16, drafts, "standard", options=(ADAPTIVE,), buckets=buckets)
    sampled = (ADAPTIVE, ("draft_sample_method", "probabilistic"))
    for drafts in (2, 20):
        yield _with_head(small, bf16, drafts, "standard", "dspark", options=(ADAPTIVE,), buckets=(1, 16))
    by_rows = (("num_speculative_tokens_per_batch_size", ((1, 2, 5), (3, 16, 0))),)
    for options in (sampled, by_rows):
        yield Setting(small, bf16, 5, "standard", method="draft_model", drafter=small, options=options, buckets=(1, 16))


def _drafters() -> Iterator[Setting]:
    """Methods that draft beside the target."""
    small, bf16 = "SmolLM2-135M", torch.bfloat16
    samples = (("draft_sample_method", "probabilistic"),)
    for drafts in (5, 24):
        yield Setting(small, bf16, drafts, "coupled", buckets=(1, 4), method="suffix")
        yield Setting(small, bf16, drafts, "coupled", buckets=(1, 4), method="custom", options=(CUSTOM,))
    yield Setting(small, bf16, 2, "coupled", method=("ngram", "custom"), options=(CUSTOM,), buckets=(1, 16))
    pairs = [(small, small), ("Llama-3.1-8B", "Llama-3.2-1B"), ("Gemma-3-4B", small)]
    for (target, drafter), dtype in itertools.product(pairs, DTYPES):
        yield Setting(target, dtype, 4, "coupled", method="draft_model", drafter=drafter, buckets=(1, 16))
    for (target, drafter), rule in itertools.product(pairs[:2], ("standard", "block", "coupled")):
        yield Setting(target, bf16, 4, rule, method="draft_model", drafter=drafter, options=samples, buckets=(1, 4))
    for dtype in DTYPES:
        yield Setting(small, dtype, 1, "standard", method="draft_model", drafter=small, options=samples, buckets=(1,))
    for members, drafts in itertools.product(
        (("suffix", "ngram"), ("ngram", "draft_model"), ("ngram", "suffix", "draft_model")), (4, 8)
    ):
        yield Setting(small, bf16, drafts, "coupled", method=members, drafter=small, buckets=(1, 16))
    yield Setting("Gemma-3-4B", bf16, 4, "coupled", method=("ngram", "draft_model"), drafter="Gemma-3-270m")


def _target_drafts() -> Iterator[Setting]:
    """Methods that read the target's hidden states, or run its layers."""
    small, bf16 = "SmolLM2-135M", torch.bfloat16
    samples = (("draft_sample_method", "probabilistic"),)
    kinds = ("eagle", "eagle3", "p-eagle", "medusa", "dflash", "dspark")
    for kind, options in itertools.product(kinds, ((), samples)):
        yield _with_head("Llama-3.1-8B", bf16, 5, "standard", kind, options=options, buckets=(1, 4))
    for options in ((), samples):
        yield _with_head("Gemma-4-26B-A4B", bf16, 5, "standard", "assistant", options=options, buckets=(1, 4))
    for kind, dtype in itertools.product(kinds, DTYPES):
        yield _with_head(small, dtype, 3, "coupled", kind, buckets=(1, 16))
    for kind in kinds:
        yield _with_head(small, bf16, 4, "block", kind, options=samples, buckets=(1,))
    yield _with_head("Llama-3.1-8B", bf16, 15, "coupled", "eagle3", buckets=(1, 2))
    for name, kind, drafts in (("Qwen3-8B", "dflash", 15), ("Qwen3-8B", "dspark", 7), ("Qwen3-0.6B", "dspark", 1)):
        yield _with_head(name, bf16, drafts, "coupled", kind, buckets=(1, 16))
    yield _with_head("Llama-3.1-8B", bf16, 8, "coupled", "eagle3", method=("ngram", "eagle3"), buckets=(1, 16))
    for drafts in (2, 20):
        yield _with_head(small, bf16, drafts, "coupled", "dspark", method=("ngram", "dspark"), buckets=(1, 16))
    for dtype in DTYPES:
        yield Setting("MiMo-7B", dtype, 4, "standard", method="mtp", modules=2, buckets=(1, 16))
    for name, modules in (("DeepSeek-V3", 1), ("GLM-4.5-Air", 3), ("ERNIE-4.5-21B-A3B", 1)):
        yield Setting(name, bf16, 3, "coupled", method="mtp", modules=modules, options=samples, buckets=(1, 16))
    early = (("exit_layer", 1),)
    for name, dtype in itertools.product((small, "Llama-3.1-8B"), DTYPES):
        yield Setting(name, dtype, 4, "coupled", method="layerskip", options=early, buckets=(1, 16))
    yield Setting("Gemma-3-4B", bf16, 4, "coupled", method="layerskip", options=early, buckets=(1, 16))
    for rule in ("standard", "block"):
        yield Setting(small, bf16, 4, rule, method="layerskip", options=early + samples, buckets=(1, 2))
    yield Setting("Llama-3.1-8B", bf16, 4, "coupled", method="layerskip", options=early, exact=True, buckets=(2,))
    yield Setting(small, bf16, 6, "coupled", method=("suffix", "layerskip"), options=early, buckets=(1, 4))


def _with_head(
    checkpoint: str,
    dtype: torch.dtype,
    drafts: int,
    rule: str,
    kind: str,
    *,
    method: str | tuple[str, ...] = "",
    **more: Any,
) -> Setting:
    return Setting(checkpoint, dtype, drafts, rule, method=method or HEAD_METHODS[kind], head=kind, **more)


def sampled_settings(amd: bool) -> Iterator[Setting]:
    """A part that ordinary tests can afford, in bfloat16.

    On NVIDIA every family and size of heads once, and every method and rule; on AMD every method with one small model.
    """
    seen: set[object] = set()
    for setting in settings():
        if setting.dtype != torch.bfloat16 or (amd and setting.checkpoint != "SmolLM2-135M"):
            continue
        method = setting.method if setting.drafts else "none"
        shows: set[object] = {method, setting.head}
        shows |= {(name, method) for name, _ in setting.options if name == ADAPTIVE[0]}
        if not amd:
            model = CHECKPOINTS[setting.checkpoint]
            shows |= {(model["model_type"], model["head_dim"]), (method, setting.rule), ("modules", setting.modules)}
        if not shows <= seen:
            seen |= shows
            yield setting
