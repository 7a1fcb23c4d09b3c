"""Models with random weights at the shapes of real ones: for checks and timings that need no download.

The likeliest next token follows the current one in a cycle of `CYCLE` tokens unless what came before outweighs it, so
that greedy text repeats itself, lookups hit, and now and then a run breaks off.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from ...graphs import compile_region, eager_region
from ...graphs.recording_capture import recorded_executor
from ...model_zoo.config import DecoderConfig
from ...model_zoo.decoder import DecoderModel
from ...model_zoo.placement import WeightBuilder, decoder_placements
from ...model_zoo.registry import family_of
from ...model_zoo.rope import RopeConfig
from ...runtime.head_loading import LoadedHead

CYCLE = 7

RECORDED = {"recorded round": "round", "recorded loop": "loop"}
"""Executors of captured graphs on a recording driver: what of them a CPU can run."""


def _llama(**sizes: Any) -> DecoderConfig:
    return DecoderConfig(
        model_type="llama",
        norm_eps=1e-5,
        attention_scale=sizes["head_dim"] ** -0.5,
        max_position_embeddings=8192,
        rope=(("full_attention", RopeConfig(dim=sizes["head_dim"], theta=500_000.0)),),
        layer_types=("full_attention",) * sizes["num_layers"],
        **sizes,
    )


SHAPES: dict[str, DecoderConfig] = {
    "tiny": _llama(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
    ),
    "1B": _llama(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
    ),
    "8B": _llama(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
    ),
}
"""Llama-like shapes by name: those of Llama 3.2 1B and Llama 3.1 8B, heads untied, and a tiny one."""


def random_model(
    config: DecoderConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    compile: bool,
    max_positions: int,
    same_everywhere: bool = True,
    seed: int = 0,
) -> DecoderModel:
    """A decoder whose weights are drawn from a seed.

    Args:
        config: the shape.
        dtype: of the weights.
        device: where they go.
        compile: compile its regions.
        max_positions: the longest context that will be used.
        same_everywhere: draw on the CPU, so that every device gets the same weights; False draws on `device`, which
            takes a GPU a moment where a CPU needs minutes.
        seed: of the weights.
    """
    source = torch.device("cpu") if same_everywhere else device
    placements = decoder_placements(config, family_of({"model_type": config.model_type}).layer_norms)
    builder = WeightBuilder(config, placements, dtype=dtype, device=str(device))
    generator = torch.Generator(source).manual_seed(seed)

    def normal(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=source)

    embedding = normal((config.vocab_size, config.hidden_size))
    token = torch.arange(config.vocab_size, device=source)
    following = (token // CYCLE * CYCLE + (token + 1) % CYCLE).clamp(max=config.vocab_size - 1)
    for name, placement in placements.items():
        if name == "model.embed_tokens.weight":
            value = embedding
        elif name == "lm_head.weight":
            value = 0.02 * normal(placement.shape)
            value[following] += 0.02 * embedding
        elif len(placement.shape) == 1:
            value = torch.ones(placement.shape, device=source)
        else:
            value = normal(placement.shape) * (0.7 / placement.shape[-1] ** 0.5)
        builder.add(name, value.to(dtype))
    return DecoderModel(
        config,
        builder.build(),
        max_positions=max_positions,
        compile_region=compile_region if compile else eager_region,
    )


def number_tokenizer(vocab_size: int) -> Any:
    """A tokenizer whose tokens are the words t0, t1, ...; token 0 is the unknown word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"t{index}": index for index in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0")


def drafter_config(target: DecoderConfig) -> DecoderConfig:
    """A tiny model over a target's vocabulary."""
    return dataclasses.replace(SHAPES["tiny"], vocab_size=target.vocab_size)


def random_engine(
    shape: str,
    model: DecoderModel | None = None,
    *,
    draft: DecoderModel | None = None,
    head: LoadedHead | None = None,
    **options: Any,
) -> Any:
    """An `Engine` on a random model.

    Args:
        shape: a name of `SHAPES`.
        model: one that `random_model` made, to share its weights between engines; None makes one.
        draft: the drafter of a method that has one.
        head: the draft head of a method that has one.
        options: of `EngineConfig`; `executor` may also be one of `RECORDED`; `speculative` is a `SpeculativeConfig`,
            `max_model_len` must be given.
    """
    from ...runtime.draft_loading import LoadedDraft
    from ...runtime.engine import Engine
    from ...runtime.engine_config import EngineConfig
    from ...runtime.loading import LoadedModel, build_core

    recorded = RECORDED.get(options.get("executor", "auto"))
    settings = EngineConfig(**{**options, "executor": "host"} if recorded else options)
    config = dataclasses.replace(SHAPES[shape], eos_token_ids=())
    assert settings.max_model_len is not None
    if model is None:
        model = random_model(
            config,
            dtype=settings.torch_dtype,
            device=settings.torch_device,
            compile=settings.compile,
            max_positions=settings.max_model_len,
        )
    drafter = None if draft is None else LoadedDraft(draft, None)
    tokenizer = number_tokenizer(config.vocab_size)
    target = LoadedModel(Path(shape), config, model, tokenizer, settings.max_model_len, drafter, head)
    executor = recorded_executor(recorded) if recorded else None
    return Engine(target, build_core(target, settings, executor=executor), settings)
