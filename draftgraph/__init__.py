"""The front door: the public names, imported when they are first used, so that `--help` need not load torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .runtime.engine import Engine
    from .runtime.outputs import GenerationResult, RequestMetrics, StreamChunk, TokenLogprobs
    from .runtime.sampling_params import SamplingParams
    from .runtime.speculative_config import SpeculativeConfig
    from .runtime.speculators import BaseSpeculator, DecodeState, Window

__all__ = [
    "BaseSpeculator",
    "DecodeState",
    "Engine",
    "GenerationResult",
    "RequestMetrics",
    "SamplingParams",
    "SpeculativeConfig",
    "StreamChunk",
    "TokenLogprobs",
    "Window",
]

_MODULES = {
    "BaseSpeculator": "speculators",
    "DecodeState": "speculators",
    "Engine": "engine",
    "GenerationResult": "outputs",
    "RequestMetrics": "outputs",
    "SamplingParams": "sampling_params",
    "SpeculativeConfig": "speculative_config",
    "StreamChunk": "outputs",
    "TokenLogprobs": "outputs",
    "Window": "speculators",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".runtime.{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
