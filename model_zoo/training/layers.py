"""Decoder layers that can be differentiated: Llama's, under the names that checkpoints give their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..rope import RopeConfig, rope_tables


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """The sizes of a head's layers, all alike."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of a head's layers must be positive, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads cannot share {self.num_kv_heads} of keys and values evenly")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for the rotary embedding, got {self.head_dim}")


def layer_shape_of(config: Mapping[str, Any], intermediate_size: int | None = None) -> LayerShape:
    """The sizes of a head's layers: the target's own, where they are those of plain attention.

    Args:
        config: the target's config.json, of its text model.
        intermediate_size: None: the target's.
    """
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    latent = config.get("kv_lora_rank") is not None
    rope = config.get("rope_parameters") or {}
    return LayerShape(
        hidden_size=hidden,
        intermediate_size=intermediate_size or int(config["intermediate_size"]),
        num_heads=heads,
        num_kv_heads=heads if latent else int(config.get("num_key_value_heads") or heads),
        head_dim=hidden // heads if latent else int(config.get("head_dim") or hidden // heads),
        norm_eps=float(config.get("rms_norm_eps") or 1e-6),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
    )


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32 (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., size], to the same."""
        return F.rms_norm(hidden.float(), (hidden.shape[-1],), self.weight.float(), self.eps).to(hidden.dtype)


class Rotary:
    """The rotary embedding of a head's layers, its tables grown when a longer text comes."""

    def __init__(self, shape: LayerShape) -> None:
        self._rope = RopeConfig(dim=shape.head_dim, theta=shape.rope_theta)
        self._cos, self._sin = rope_tables(self._rope, 512, "cpu")

    def __call__(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Turns heads.

        Args:
            heads: [B, h, N, D].
            positions: int64 [N] or [B, N].

        Returns:
            [B, h, N, D].
        """
        need = int(positions.max()) + 1
        if need > self._cos.shape[0]:
            self._cos, self._sin = rope_tables(self._rope, 2 * need, "cpu")
        if self._cos.device != heads.device:
            self._cos, self._sin = self._cos.to(heads.device), self._sin.to(heads.device)
        cos, sin = (table[positions].to(heads.dtype) for table in (self._cos, self._sin))
        if positions.dim() == 2:
            cos, sin = cos[:, None], sin[:, None]
        first, second = heads.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Attention(nn.Module):
    """The projections of grouped-query attention; who sees whom is the caller's."""

    def __init__(self, shape: LayerShape, inputs: int | None = None) -> None:
        super().__init__()
        columns = inputs or shape.hidden_size
        self.num_heads, self.num_kv_heads, self.head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.q_proj = nn.Linear(columns, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(columns, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(columns, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)

    def queries(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, N, columns] to [B, h, N, D]."""
        return self.q_proj(hidden).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def keys(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, N, columns] to [B, hkv, N, D]."""
        return self.k_proj(hidden).unflatten(-1, (self.num_kv_heads, self.head_dim)).transpose(1, 2)

    def values(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, N, columns] to [B, hkv, N, D]."""
        return self.v_proj(hidden).unflatten(-1, (self.num_kv_heads, self.head_dim)).transpose(1, 2)

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        """[B, h, N, D] to [B, N, H]."""
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., H], to the same."""
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class DecoderLayer(nn.Module):
    """A pre-norm layer's modules."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = FeedForward(shape)


def repeat_heads(heads: torch.Tensor, count: int) -> torch.Tensor:
    """Keys or values [B, hkv, N, D], each for its group of queries: [B, count, N, D]."""
    return heads.repeat_interleave(count // heads.shape[1], 1)
