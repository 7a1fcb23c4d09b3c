"""Target models: one folder per family over a shared decoder, and the loading of their checkpoints."""

from .checkpoint import load_model, read_config
from .config import DecoderConfig
from .decoder import DecoderModel, DecoderWeights, KvCache, LayerWeights
from .errors import CheckpointError, UnsupportedModelError
from .registry import FAMILIES, Family

__all__ = [
    "FAMILIES",
    "CheckpointError",
    "DecoderConfig",
    "DecoderModel",
    "DecoderWeights",
    "Family",
    "KvCache",
    "LayerWeights",
    "UnsupportedModelError",
    "load_model",
    "read_config",
]
