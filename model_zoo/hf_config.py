"""Reads what the families' config.json files have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import DecoderConfig, LayerType, MlaConfig
from .errors import CheckpointError, UnsupportedModelError
from .rope import RopeConfig, yarn_mscale

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """An `eos_token_id` as config.json and generation_config.json give it."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def object_in(hf: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of a config.json that is an object; an empty one where it is absent or null.

    Raises:
        CheckpointError: it is something else.
    """
    value = hf.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{name} in config.json must be an object, got {value!r}")
    return value


def positive_integer(hf: Mapping[str, Any], name: str, *, default: int) -> int:
    """A size or count of a config.json; the default where it is absent or null.

    Raises:
        CheckpointError: it is something else.
    """
    value = hf.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{name} in config.json must be a positive integer, got {value!r}")
    return value


def first_given(hf: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    """The value of the first of several names for a field that is there and not null.

    Raises:
        CheckpointError: there is none, and no default.
    """
    for name in names:
        if hf.get(name) is not None:
            return hf[name]
    if default is None:
        raise CheckpointError(f"config.json lacks {names[0]}")
    return default


def require_choice(hf: Mapping[str, Any], name: str, supported: str) -> None:
    """Refuses a config.json in which a field says anything but `supported`.

    Raises:
        UnsupportedModelError: it does.
    """
    if hf.get(name) not in (None, supported):
        raise UnsupportedModelError(f"{name} {hf[name]!r}; supported: {supported}")


def flat_rope(hf: Mapping[str, Any], head_dim: int) -> RopeConfig:
    """The rotary embedding of a model that has one for all layers.

    Reads `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before).
    """
    parameters = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    for name in ("partial_rotary_factor", "original_max_position_embeddings"):
        if hf.get(name) is not None:
            parameters.setdefault(name, hf[name])
    return RopeConfig.from_parameters(
        parameters,
        head_dim=head_dim,
        theta=hf.get("rope_theta") or 10_000.0,
        max_position_embeddings=hf["max_position_embeddings"],
    )


def qwen_layer_types(hf: Mapping[str, Any]) -> tuple[list[LayerType], int]:
    """Layer types and sliding window by Qwen's rule: the layers from `max_window_layers` on slide."""
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    types = hf.get("layer_types")
    if types is None:
        first = hf.get("max_window_layers", 28)
        types = [
            "sliding_attention" if window is not None and layer >= first else "full_attention"
            for layer in range(hf["num_hidden_layers"])
        ]
    return types, window or 0


def latent_choices(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `DecoderConfig` that multi-head latent attention decides (DeepSeek-V2, DeepSeek-V3).

    Raises:
        UnsupportedModelError: there are biases on a part of the fused projection only.
    """
    mla = MlaConfig(
        query_rank=hf.get("q_lora_rank") or 0,
        kv_rank=first_given(hf, "kv_lora_rank", default=512),
        nope_dim=first_given(hf, "qk_nope_head_dim", default=128),
        rope_dim=first_given(hf, "qk_rope_head_dim", default=64),
        value_dim=first_given(hf, "v_head_dim", default=128),
    )
    bias = bool(hf.get("attention_bias"))
    if bias and not mla.query_rank:
        raise UnsupportedModelError("attention_bias True without q_lora_rank; supported: False")
    kinds = {"full_attention": flat_rope(hf, mla.rope_dim)}
    scale = mla.head_dim**-0.5
    scaling = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    weight = scaling.get("mscale_all_dim")
    if weight and scaling.get("rope_type", scaling.get("type", "default")) != "default":
        # Longer contexts flatten the softmax, which this undoes (Peng et al. 2023, section 3.4).
        scale *= yarn_mscale(float(scaling["factor"]), float(weight)) ** 2
    return {
        "mla": mla,
        "num_kv_heads": 1,
        "head_dim": mla.cached_dim,
        "qkv_bias": bias,
        "output_bias": bias,
        "rope": tuple(kinds.items()),
        "attention_scale": scale,
    }


def decoder_config(hf: Mapping[str, Any], **choices: Any) -> DecoderConfig:
    """Makes a `DecoderConfig` from the fields that all families name alike.

    Args:
        hf: a config.json, the family's defaults filled in.
        choices: fields of `DecoderConfig` that the family decides; they win over what is read here.

    Raises:
        CheckpointError: a field that has no default is missing.
        UnsupportedModelError: the model needs something that is not implemented.
    """
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    missing = [name for name in (*sizes, "max_position_embeddings") if hf.get(name) is None]
    if missing:
        raise CheckpointError(f"config.json lacks {', '.join(missing)}")
    # Before they are divided by each other.
    for name in (*sizes, "max_position_embeddings", "head_dim", "num_key_value_heads"):
        positive_integer(hf, name, default=1)
    if hf.get("quantization_config"):
        method = object_in(hf, "quantization_config").get("quant_method", "unknown")
        raise UnsupportedModelError(f"quantized checkpoints are not supported (quant_method {method!r})")
    activation = hf.get("hidden_act") or hf.get("hidden_activation") or "silu"
    num_heads, layers = hf["num_attention_heads"], hf["num_hidden_layers"]
    head_dim = hf.get("head_dim") or hf["hidden_size"] // num_heads
    if head_dim < 1:
        raise CheckpointError(f"hidden_size {hf['hidden_size']} is not enough for {num_heads} attention heads")
    values: dict[str, Any] = {
        "model_type": hf["model_type"],
        "vocab_size": hf["vocab_size"],
        "hidden_size": hf["hidden_size"],
        "intermediate_size": hf["intermediate_size"],
        "num_layers": layers,
        "num_heads": num_heads,
        "num_kv_heads": hf.get("num_key_value_heads") or num_heads,
        "head_dim": head_dim,
        "norm_eps": hf.get("rms_norm_eps", 1e-6),
        "max_position_embeddings": hf["max_position_embeddings"],
        "eos_token_ids": token_ids(hf.get("eos_token_id")),
        "tie_word_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "num_next_token_layers": hf.get("num_nextn_predict_layers") or 0,
        "activation": _ACTIVATIONS.get(activation, activation),
        "attention_scale": head_dim**-0.5,
        "layer_types": ["full_attention"] * layers,
    }
    values |= choices
    values["layer_types"] = tuple(values["layer_types"])
    if "rope" not in values:
        rope = flat_rope(hf, head_dim)
        values["rope"] = tuple((kind, rope) for kind in sorted(set(values["layer_types"])))
    return DecoderConfig(**values)
