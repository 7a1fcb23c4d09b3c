"""Rotary embedding tables. The scaling rules are those of transformers' `modeling_rope_utils`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .errors import UnsupportedModelError

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """One rotary embedding: its base, how many dimensions it turns, and how it is stretched."""

    dim: int
    """Dimensions of a head that turn; even."""
    theta: float
    """The base of the wavelengths."""
    rope_type: str = "default"
    """One of `ROPE_TYPES`."""
    factor: float = 1.0
    """How much longer than in pre-training the context is."""
    original_max_position_embeddings: int = 0
    """The context of pre-training (llama3, yarn)."""
    low_freq_factor: float = 1.0
    """llama3."""
    high_freq_factor: float = 4.0
    """llama3."""
    beta_fast: float = 32.0
    """yarn."""
    beta_slow: float = 1.0
    """yarn."""
    truncate: bool = True
    """yarn: round the corrected range to whole dimensions."""
    turned: int = 0
    """proportional: how many of the `dim` dimensions really turn, the pairs of the shortest wavelengths; even."""
    attention_factor: float = 1.0
    """What cos and sin are multiplied with."""

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise UnsupportedModelError(
                f"rotary embedding of type {self.rope_type!r}; supported: {', '.join(ROPE_TYPES)}"
            )
        if self.dim < 2 or self.dim % 2:
            raise ValueError(f"a rotary embedding turns an even number of dimensions, got {self.dim}")
        if self.rope_type == "proportional" and (not 2 <= self.turned <= self.dim or self.turned % 2):
            raise ValueError(f"proportional turns an even number of its {self.dim} dimensions, got {self.turned}")
        if self.theta <= 0.0 or self.factor <= 0.0:
            raise ValueError(f"rope theta ({self.theta}) and factor ({self.factor}) must be positive")
        if self.rope_type in ("llama3", "yarn") and self.original_max_position_embeddings < 1:
            raise ValueError(f"{self.rope_type} needs original_max_position_embeddings")
        if self.rope_type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError("llama3 needs high_freq_factor above low_freq_factor")

    @classmethod
    def from_parameters(
        cls, parameters: Mapping[str, Any], *, head_dim: int, theta: float, max_position_embeddings: int
    ) -> RopeConfig:
        """Reads a `rope_parameters` or, as it was called before, `rope_scaling` dict.

        Args:
            parameters: the dict; empty for the plain embedding.
            head_dim: of the model.
            theta: what to use where the dict gives no `rope_theta`.
            max_position_embeddings: of the model; stands in for a missing `original_max_position_embeddings`.

        Raises:
            UnsupportedModelError: the type is none of `ROPE_TYPES`.
            ValueError: a value that the type needs is missing or out of range.
        """
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        part = parameters.get("partial_rotary_factor", 1.0)
        values: dict[str, Any] = {
            "dim": int(head_dim * part),
            "theta": float(parameters.get("rope_theta", theta)),
            "rope_type": kind,
        }
        needed = {"linear": ["factor"], "llama3": ["factor", "low_freq_factor", "high_freq_factor"]}.get(kind, [])
        missing = [name for name in needed if parameters.get(name) is None]
        if missing:
            raise ValueError(f"rotary embedding of type {kind!r} lacks {', '.join(missing)}")
        values |= {name: float(parameters[name]) for name in needed}
        if kind in ("llama3", "yarn"):
            original = parameters.get("original_max_position_embeddings") or max_position_embeddings
            values["original_max_position_embeddings"] = int(original)
        if kind == "proportional":
            turned = 2 * int(part * head_dim // 2)
            values |= {"dim": head_dim, "turned": turned, "factor": float(parameters.get("factor", 1.0))}
        if kind == "yarn":
            values |= _yarn_values(parameters, max_position_embeddings / values["original_max_position_embeddings"])
        return cls(**values)


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """What yarn multiplies attention's operands with: `0.1 weight ln(factor) + 1` (Peng et al. 2023, equation 22)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _yarn_values(parameters: Mapping[str, Any], implied_factor: float) -> dict[str, Any]:
    factor = parameters.get("factor")
    factor = implied_factor if factor is None else float(factor)

    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        above, below = parameters.get("mscale"), parameters.get("mscale_all_dim")
        attention_factor = yarn_mscale(factor)
        if above and below:
            attention_factor = yarn_mscale(factor, above) / yarn_mscale(factor, below)
    return {
        "factor": factor,
        "attention_factor": float(attention_factor),
        "beta_fast": float(parameters.get("beta_fast") or 32.0),
        "beta_slow": float(parameters.get("beta_slow") or 1.0),
        "truncate": bool(parameters.get("truncate", True)),
    }


def inverse_frequencies(rope: RopeConfig) -> torch.Tensor:
    """The angle per position of each pair of dimensions, float32 [dim / 2].

    Plain: theta^(-2i/dim) (Su et al. 2021). linear divides it by the factor; llama3 divides the long
    wavelengths and blends towards them (Llama 3.1); yarn blends by dimension (Peng et al. 2023, section 3.2);
    proportional turns the first pairs only (Gemma 4).
    """
    powers = rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)
    plain = 1.0 / powers
    if rope.rope_type == "linear":
        return plain / rope.factor
    if rope.rope_type == "proportional":
        return torch.where(torch.arange(rope.dim // 2) < rope.turned // 2, plain / rope.factor, 0.0)
    if rope.rope_type == "llama3":
        return _llama3(rope, plain)
    if rope.rope_type == "yarn":
        return _yarn(rope, powers)
    return plain


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    original = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / plain
    is_long = wavelength > original / rope.low_freq_factor
    is_short = wavelength < original / rope.high_freq_factor
    blend = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - blend) * plain / rope.factor + blend * plain
    return torch.where(is_long, plain / rope.factor, torch.where(is_short, plain, between))


def _yarn(rope: RopeConfig, powers: torch.Tensor) -> torch.Tensor:
    def dimension_of(rotations: float) -> float:
        ratio = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return rope.dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - keep) + 1.0 / powers * keep


def rope_tables(rope: RopeConfig, positions: int, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """Cos and sin by position, float32 [positions, dim / 2], the attention factor folded in."""
    with torch.device("cpu"):  # the same bits for every device
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * inverse_frequencies(rope)
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    return cos.to(device), sin.to(device)
