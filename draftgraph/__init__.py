"""The front door: the public names."""

from .runtime.engine import Engine
from .runtime.outputs import GenerationResult, RequestMetrics, StreamChunk, TokenLogprobs
from .runtime.sampling_params import SamplingParams
from .runtime.speculative_config import SpeculativeConfig

__all__ = [
    "Engine",
    "GenerationResult",
    "RequestMetrics",
    "SamplingParams",
    "SpeculativeConfig",
    "StreamChunk",
    "TokenLogprobs",
]
