"""Tiny random models of every family, made by transformers, and windows over their caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers

from draftgraph.kernels.window import Window

VOCAB = 320
SLOTS = 5
"""The reserved one included."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}
_GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}

_EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 40, "routed_scaling_factor": 1.7}
_GROUPS = {**_EXPERTS, "n_routed_experts": 12, "first_k_dense_replace": 1}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 48,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
}
_MSCALE = {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.9}

_GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 10,
    "final_logit_softcapping": 5.0,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "rope_parameters": _LLAMA3}),
    "llama-mha": ("LlamaConfig", {"num_key_value_heads": 4, "head_dim": 32, "hidden_act": "gelu"}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral-sliding": ("MistralConfig", {"sliding_window": 12}),
    "qwen2": ("Qwen2Config", {"rope_parameters": _YARN}),
    "qwen2-sliding": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-biases": ("Qwen3Config", {"head_dim": 16, "attention_bias": True}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
        },
    ),
    "qwen3_moe-sliding": (
        "Qwen3MoeConfig",
        {
            "head_dim": 32,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "use_sliding_window": True,
            "sliding_window": 13,
            "attention_bias": True,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            "head_dim": 32,
            "layer_types": ["full_attention"] * 3,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
            "tie_word_embeddings": False,
        },
    ),
    "glm4_moe": ("Glm4MoeConfig", {**_GROUPS, "use_qk_norm": True, "head_dim": 32, "attention_bias": True}),
    "glm4_moe-groups": ("Glm4MoeConfig", {**_GROUPS, "n_group": 4, "topk_group": 2, "head_dim": 16}),
    "deepseek_v3": ("DeepseekV3Config", {**_GROUPS, **_LATENT, "n_group": 4, "topk_group": 2}),
    "deepseek_v3-yarn": (
        "DeepseekV3Config",
        {
            **_GROUPS,
            **_LATENT,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": None,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "rope_parameters": _MSCALE,
        },
    ),
    "deepseek_v3-biases": (
        "DeepseekV3Config",
        {**_GROUPS, **_LATENT, "n_group": 2, "topk_group": 1, "attention_bias": True, "n_shared_experts": 2},
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        {**_GROUPS, **_LATENT, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek_v2-yarn": (
        "DeepseekV2Config",
        {**_GROUPS, **_LATENT, "q_lora_rank": None, "rope_parameters": _MSCALE, "first_k_dense_replace": 0},
    ),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 32}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24},
    ),
    "ernie4_5_moe-alone": (
        "Ernie4_5_MoeConfig",
        {
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": 24,
            "moe_num_shared_experts": 0,
            "moe_layer_interval": 2,
            "tie_word_embeddings": False,
        },
    ),
    "gemma4-small": (
        "Gemma4TextConfig",
        {
            **_GEMMA4,
            "num_hidden_layers": 5,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": VOCAB,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        },
    ),
    "gemma4-large": ("Gemma4TextConfig", {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4-moe": (
        "Gemma4TextConfig",
        {
            **_GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 10,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": _GEMMA_ROPE,
            "final_logit_softcapping": 5.0,
            "attn_logit_softcapping": 4.0,  # which the reference does not apply
        },
    ),
}


def tiny_model(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A transformers model with random weights, norms and biases included."""
    kind, choices = MODELS[name]
    config = getattr(transformers, kind)(**{**_COMMON, **choices, **changes})
    generator = torch.Generator().manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        offset = 0.5 if parameter.ndim == 1 else 0.0
        scale = 0.3 if parameter.ndim == 1 else 1.0 / parameter.shape[-1] ** 0.5
        parameter.data = torch.randn(parameter.shape, generator=generator) * scale + offset
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)
        if name.endswith("layer_scalar"):
            buffer.fill_(0.8)
    model.tie_weights()
    return model.to(dtype).eval()


def pack(rows: Sequence[tuple[Sequence[int], int, int]], width: int | None = None) -> Window:
    """Packs rows of (tokens, base, slot) into a window, filled up to `width`."""
    counts = [len(tokens) for tokens, _, _ in rows]
    total = sum(counts)
    padding = (width or total) - total

    def column(values: list[int], filler: int) -> torch.Tensor:
        return torch.tensor(values + [filler] * padding, dtype=torch.int32)

    return Window(
        tokens=column([token for tokens, _, _ in rows for token in tokens], 0),
        positions=column([base + j for tokens, base, _ in rows for j in range(len(tokens))], 0),
        slots=column([slot for tokens, _, slot in rows for _ in tokens], SLOTS - 1),
        rows=column([row for row, count in enumerate(counts) for _ in range(count)], -1),
        cu_tokens=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
        base=torch.tensor([base for _, base, _ in rows], dtype=torch.int32),
        slot_of_row=torch.tensor([slot for _, _, slot in rows], dtype=torch.int32),
    )


def random_tokens(count: int, seed: int) -> list[int]:
    """Token ids without the special ones."""
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
