"""The model that the gate measures: small, random, the same on every machine, and drafts often fit it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ...graphs import eager_region
from ...model_zoo.config import DecoderConfig
from ...model_zoo.decoder import DecoderModel, DecoderWeights, LayerWeights
from ...model_zoo.rope import RopeConfig
from ..engine import Engine
from ..engine_config import EngineConfig
from ..loading import LoadedModel, build_core
from ..speculative_config import SpeculativeConfig

CONTEXT = 512
"""The longest sequence of the fixed model."""
CYCLE = 12
"""The model likes to go round in cycles of so many tokens, which is what prompt lookup lives on."""
_FIRST = 100 * CYCLE
PROMPT: tuple[int, ...] = tuple(
    token for i in range(6) for token in (*(_FIRST + (5 * i + j) % CYCLE for j in range(3 + i % 3)), 4000 + i)
)[:-1]
"""The fixed prompt: pieces of one cycle, each broken off, so that what looking up finds is sometimes wrong."""

CONFIG = DecoderConfig(
    model_type="llama",
    vocab_size=4096,
    hidden_size=64,
    intermediate_size=160,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    norm_eps=1e-5,
    max_position_embeddings=CONTEXT,
    rope=(("full_attention", RopeConfig(dim=16, theta=10000.0)),),
    layer_types=("full_attention",) * 2,
    attention_scale=0.25,
)
"""Large enough a vocabulary for the sampling ops to have something to read, small enough otherwise to be quick."""


class Alphabet:
    """As much of a tokenizer as the engine needs for a model without text: a letter per token."""

    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012 - the name and type are transformers'

    def __len__(self) -> int:
        return CONFIG.vocab_size

    def decode(self, token_ids: list[int], **options: Any) -> str:
        """A letter of the alphabet for each token."""
        return "".join(chr(ord("a") + token % 26) for token in token_ids)


def uniform(shape: tuple[int, ...], stream: int, scale: float) -> torch.Tensor:
    """Numbers in [-scale, scale) that no platform's random generator has a say in; float32 of `shape`.

    The bits are those of SplitMix64 (Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators").
    """
    count = torch.Size(shape).numel()
    value = torch.arange(1, count + 1, dtype=torch.int64) + stream * 2**32
    value = value * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        value = (value ^ ((value >> shift) & (2 ** (64 - shift) - 1))) * factor
    value = value ^ ((value >> 31) & (2**33 - 1))
    top = (value >> 40) & (2**24 - 1)
    return (top.to(torch.float32) / 2**23 - 1.0).mul_(scale).reshape(shape)


def fixed_weights() -> DecoderWeights:
    """The weights, float32 on the CPU.

    The head likes the next token of a cycle, by a margin that what the layers add cannot close: rounding does not
    change the text.
    """
    vocab, hidden, mlp = CONFIG.vocab_size, CONFIG.hidden_size, CONFIG.intermediate_size
    embedding = uniform((vocab, hidden), 0, 1.0)
    layers = tuple(
        LayerWeights(
            attention_norm=torch.ones(hidden),
            qkv=uniform((CONFIG.qkv_size, hidden), stream, 0.3),
            output=uniform((hidden, CONFIG.num_heads * CONFIG.head_dim), stream + 1, 0.03),
            mlp_norm=torch.ones(hidden),
            gate_up=uniform((2 * mlp, hidden), stream + 2, 0.3),
            down=uniform((hidden, mlp), stream + 3, 0.018),
        )
        for stream in range(10, 10 + 4 * CONFIG.num_layers, 4)
    )
    token = torch.arange(vocab)
    following = (token // CYCLE * CYCLE + (token + 1 - token // CYCLE * CYCLE) % CYCLE).clamp(max=vocab - 1)
    head = uniform((vocab, hidden), 1, 0.25)
    head[following] += 0.5 * embedding
    return DecoderWeights(embedding, layers, torch.ones(hidden), head)


@contextmanager
def fixed_engine(
    speculation: SpeculativeConfig | None = None,
    *,
    compile_region: Callable[..., Any] = eager_region,
    max_batch_size: int = 1,
) -> Iterator[Engine]:
    """An engine on the fixed model in float32, closed when the block ends.

    Args:
        speculation: how to draft; None decodes plainly.
        compile_region: what compiles the model's regions.
        max_batch_size: rows that decode together.
    """
    config = EngineConfig(
        speculative=speculation or SpeculativeConfig(),
        dtype="float32",
        device="cpu",
        max_batch_size=max_batch_size,
        metrics="summary",
        prefix_caching=False,
    )
    model = DecoderModel(CONFIG, fixed_weights(), compile_region=compile_region)
    target = LoadedModel(Path("fixed-model"), CONFIG, model, Alphabet(), CONTEXT)
    with Engine(target, build_core(target, config), config) as engine:
        yield engine
