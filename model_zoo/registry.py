"""Which model families there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .config import DecoderConfig
from .deepseek_v2 import checkpoint as deepseek_v2_checkpoint
from .deepseek_v2 import config as deepseek_v2_config
from .deepseek_v3 import checkpoint as deepseek_v3_checkpoint
from .deepseek_v3 import config as deepseek_v3_config
from .ernie4_5 import checkpoint as ernie_checkpoint
from .ernie4_5 import config as ernie_config
from .errors import CheckpointError, UnsupportedModelError
from .gemma3 import checkpoint as gemma3_checkpoint
from .gemma3 import config as gemma3_config
from .gemma4 import checkpoint as gemma4_checkpoint
from .gemma4 import config as gemma4_config
from .glm4_moe import checkpoint as glm4_moe_checkpoint
from .glm4_moe import config as glm4_moe_config
from .llama import checkpoint as llama_checkpoint
from .llama import config as llama_config
from .mimo import checkpoint as mimo_checkpoint
from .mimo import config as mimo_config
from .mistral import checkpoint as mistral_checkpoint
from .mistral import config as mistral_config
from .qwen2 import checkpoint as qwen2_checkpoint
from .qwen2 import config as qwen2_config
from .qwen3 import checkpoint as qwen3_checkpoint
from .qwen3 import config as qwen3_config
from .qwen3_moe import checkpoint as qwen3_moe_checkpoint
from .qwen3_moe import config as qwen3_moe_config
from .qwen3_next import checkpoint as qwen3_next_checkpoint
from .qwen3_next import config as qwen3_next_config


class Family(NamedTuple):
    """How the checkpoints of a family are read."""

    read_config: Callable[[Mapping[str, Any]], DecoderConfig]
    """From the contents of config.json."""
    layer_norms: Mapping[str, str]
    """Names of the norms inside a layer, and their fields of `LayerWeights`."""
    rename: Callable[[str], str | None]
    """To the name that the shared loader knows a tensor by; None for one that is not needed."""


_GEMMA3 = Family(gemma3_config.read_config, gemma3_checkpoint.LAYER_NORMS, gemma3_checkpoint.rename)
_GEMMA4 = Family(gemma4_config.read_config, gemma4_checkpoint.LAYER_NORMS, gemma4_checkpoint.rename)

FAMILIES: dict[str, Family] = {
    "llama": Family(llama_config.read_config, llama_checkpoint.LAYER_NORMS, llama_checkpoint.rename),
    "mistral": Family(mistral_config.read_config, mistral_checkpoint.LAYER_NORMS, mistral_checkpoint.rename),
    "qwen2": Family(qwen2_config.read_config, qwen2_checkpoint.LAYER_NORMS, qwen2_checkpoint.rename),
    "qwen3": Family(qwen3_config.read_config, qwen3_checkpoint.LAYER_NORMS, qwen3_checkpoint.rename),
    "qwen3_moe": Family(qwen3_moe_config.read_config, qwen3_moe_checkpoint.LAYER_NORMS, qwen3_moe_checkpoint.rename),
    "qwen3_next": Family(
        qwen3_next_config.read_config, qwen3_next_checkpoint.LAYER_NORMS, qwen3_next_checkpoint.rename
    ),
    "mimo": Family(mimo_config.read_config, mimo_checkpoint.LAYER_NORMS, mimo_checkpoint.rename),
    "glm4_moe": Family(glm4_moe_config.read_config, glm4_moe_checkpoint.LAYER_NORMS, glm4_moe_checkpoint.rename),
    "deepseek_v3": Family(
        deepseek_v3_config.read_config, deepseek_v3_checkpoint.LAYER_NORMS, deepseek_v3_checkpoint.rename
    ),
    "deepseek_v2": Family(
        deepseek_v2_config.read_config, deepseek_v2_checkpoint.LAYER_NORMS, deepseek_v2_checkpoint.rename
    ),
    "ernie4_5": Family(ernie_config.read_config, ernie_checkpoint.LAYER_NORMS, ernie_checkpoint.rename),
    "ernie4_5_moe": Family(ernie_config.read_moe_config, ernie_checkpoint.LAYER_NORMS, ernie_checkpoint.rename),
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3,
    "gemma4_text": _GEMMA4,
    "gemma4": _GEMMA4,
}
"""By the `model_type` of config.json."""


def family_of(hf: Mapping[str, Any]) -> Family:
    """The family of a config.json's contents.

    Raises:
        CheckpointError: there is no `model_type`.
        UnsupportedModelError: its family is not implemented.
    """
    model_type = hf.get("model_type")
    if not model_type:
        raise CheckpointError("config.json lacks model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UnsupportedModelError(f"model type {model_type!r}; supported: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type]
