"""Tokens per second of random models at the shapes of real ones, and their share of what the memory allows."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ...model_zoo.decoder import DecoderModel
from ...runtime.sampling_params import SamplingParams
from ...runtime.speculative_config import SpeculativeConfig
from .random_models import CYCLE, SHAPES, random_engine, random_model

CONTEXT = 2048
REPEATS = 3


@dataclass(frozen=True)
class DecodingSpeed:
    """One model, one way of drafting, one executor, one sequence, greedy."""

    shape: str
    method: str
    drafts: int
    executor: str
    tokens: int
    rounds: int
    tokens_per_second: float
    """Without prefill, the median of `REPEATS` answers."""
    seconds_per_round: float
    bytes_per_round: int
    """The weights, each read once."""
    share_of_bandwidth: float
    """Bytes per round over the time of a round, over the measured bandwidth of the device."""
    host_microseconds_per_round: float
    """Processor time of the thread that asks, prefill and waiting included, the median of `REPEATS` answers."""
    host_microseconds_per_token: float
    warmup_seconds: float
    """Compilation and capture."""
    graphs: int
    """Captured, one for each step of each program."""
    graph_nodes: int
    graph_megabytes: float
    """By how much captures made their pool of memory grow."""
    capture_seconds: float
    """Of warming up and capturing, all graphs together."""

    def to_dict(self) -> dict[str, Any]:
        """In types that JSON has."""
        return asdict(self)


def measure_bandwidth(device: torch.device, megabytes: int = 512) -> float:
    """Bytes per second that a copy reads and writes, the best of five."""
    source = torch.ones(megabytes * 2**18, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for attempt in range(6):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
        if attempt:
            best = max(best, 2 * source.numel() * 4 / seconds)
    return best


def weight_bytes(model: DecoderModel) -> int:
    """What one pass of a dense model reads: every matrix, and of the embedding table a few rows only."""
    weights = model.weights
    tensors = [t for layer in weights.layers for t in layer if isinstance(t, torch.Tensor)] + [weights.head]
    element = torch.empty(0, dtype=model.dtype).element_size()
    return sum(tensor.numel() for tensor in tensors) * element


def shared_model(shape: str, device: torch.device, dtype: torch.dtype, compile: bool) -> DecoderModel:
    """One model for all measurements of a shape."""
    return random_model(
        SHAPES[shape], dtype=dtype, device=device, compile=compile, max_positions=CONTEXT, same_everywhere=False
    )


def decoding_speed(
    shape: str, model: DecoderModel, method: str, drafts: int, executor: str, bandwidth: float, tokens: int
) -> DecodingSpeed:
    """Answers one prompt a few times.

    Args:
        shape: of `random_models.SHAPES`.
        model: of that shape; its engine is made here.
        method: how to draft, by its name.
        drafts: how many; 0 for "none".
        executor: its name, as `random_engine` takes it.
        bandwidth: bytes per second of the device.
        tokens: how many to generate.
    """
    spec = SpeculativeConfig(method=method, num_speculative_tokens=drafts or None)
    engine = random_engine(
        shape,
        model,
        speculative=spec,
        dtype=model.dtype,
        device=str(model.device),
        executor=executor,
        max_model_len=CONTEXT,
        max_batch_size=1,
    )
    with engine:
        start = time.perf_counter()
        captured = engine.warmup()
        warmup = time.perf_counter() - start
        prompt = [index % CYCLE + 70 for index in range(64)]
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        engine.generate(prompt, params)
        metrics, host = [], []
        for _ in range(REPEATS):
            start = time.thread_time()
            metrics.append(engine.generate(prompt, params).metrics)
            host.append(1e6 * (time.thread_time() - start))
    rates, rounds = [], []
    for figures in metrics:
        # The first burst ends prefill; what follows is decoding.
        seconds = figures.total_time - figures.time_to_first_token
        rates.append((figures.output_tokens - 1) / seconds)
        rounds.append(seconds / max(1, figures.rounds - 1))
    per_round = statistics.median(rounds)
    size = weight_bytes(model)
    return DecodingSpeed(
        shape=shape,
        method=method,
        drafts=drafts,
        executor=executor,
        tokens=metrics[0].output_tokens,
        rounds=metrics[0].rounds,
        tokens_per_second=statistics.median(rates),
        seconds_per_round=per_round,
        bytes_per_round=size,
        share_of_bandwidth=size / per_round / bandwidth,
        host_microseconds_per_round=statistics.median(host) / max(1, metrics[0].rounds),
        host_microseconds_per_token=statistics.median(host) / metrics[0].output_tokens,
        warmup_seconds=warmup,
        graphs=len(captured.steps),
        graph_nodes=sum(step.nodes for step in captured.steps),
        graph_megabytes=sum(step.bytes for step in captured.steps) / 1e6,
        capture_seconds=captured.seconds,
    )
