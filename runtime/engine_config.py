"""The settings of an engine, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..graphs.buckets import batch_buckets, validated_buckets
from ..kernels.device import DEVICES, checked_device, has_fast_bfloat16
from .errors import ConfigError, NotAvailableError
from .speculative_config import SpeculativeConfig

METRICS = ("none", "summary", "detailed")
ATTENTION_BACKENDS = ("auto", "sdpa")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine runs. `Engine.from_pretrained` takes the same names."""

    speculative: SpeculativeConfig
    dtype: str | torch.dtype = "auto"
    """Of weights and KV: float32, bfloat16, float16, or auto: bfloat16 where the device computes in it."""
    device: str | torch.device = "auto"
    """cpu, cuda, or auto, which is cpu."""
    max_model_len: int | None = None
    """Most tokens of a sequence, prompt and answer; None: what the model was made for, at most 8192."""
    max_batch_size: int = 4
    """Sequences that decode together; further ones wait their turn."""
    batch_buckets: tuple[int, ...] | None = None
    """Padded batch sizes; None: powers of two up to `max_batch_size`."""
    compile: bool = True
    """Compile the decoder layer and the head; False runs the same code eagerly."""
    exact: bool = False
    """Run plain and speculative rounds at one width, so that even near-ties cannot flip."""
    executor: str = "auto"
    """loop, round, host, or auto: the best that works here."""
    attention_backend: str = "auto"
    """sdpa, or auto."""
    metrics: str = "summary"
    """What results report: none, summary, or detailed (every round's pair of proposed and accepted)."""
    prefix_caching: bool = True
    """Reuse the KV that a free slot holds for the beginning of a new prompt."""

    def __post_init__(self) -> None:
        if self.max_model_len is not None:
            _positive("max_model_len", self.max_model_len, least=2)
        _positive("max_batch_size", self.max_batch_size)
        for name in ("compile", "exact", "prefix_caching"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.metrics not in METRICS:
            raise ConfigError(f"metrics must be one of {', '.join(METRICS)}; got {self.metrics!r}")
        if self.attention_backend not in ATTENTION_BACKENDS:
            raise ConfigError(
                f"attention_backend must be one of {', '.join(ATTENTION_BACKENDS)}; got {self.attention_backend!r}"
            )
        try:
            if self.batch_buckets is not None:
                validated_buckets(self.batch_buckets, self.max_batch_size)
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error)) from None
        _ = self.torch_device, self.torch_dtype

    @property
    def torch_device(self) -> torch.device:
        """The device to run on; raises `ConfigError` or `NotAvailableError` when it cannot be used."""
        if self.device == "auto":
            # Not cuda, even where there is one: what runs on it has not yet been run on hardware.
            return torch.device("cpu")
        try:
            device = torch.device(self.device)
        except (RuntimeError, TypeError):
            raise ConfigError(f"device must be cpu, cuda or auto, got {self.device!r}") from None
        if device.type not in DEVICES:
            raise NotAvailableError(f"device {str(self.device)!r} is not supported; accepted: cpu, cuda, auto")
        try:
            return checked_device(device)
        except ValueError as error:
            raise NotAvailableError(
                f"device {str(self.device)!r} cannot be used: {error}; accepted: cpu, auto"
            ) from None

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of weights and KV."""
        if self.dtype == "auto":
            return torch.bfloat16 if has_fast_bfloat16(self.torch_device) else torch.float32
        dtype = _DTYPES.get(self.dtype) if isinstance(self.dtype, str) else self.dtype
        if dtype is None or dtype not in _DTYPES.values():
            raise ConfigError(f"dtype must be one of auto, {', '.join(_DTYPES)}; got {self.dtype!r}")
        return dtype

    @property
    def buckets(self) -> tuple[int, ...]:
        """The batch buckets, ascending; under `exact=True` only the largest, so that every round has one shape."""
        buckets = self.batch_buckets or batch_buckets(self.max_batch_size)
        buckets = validated_buckets(buckets, self.max_batch_size)
        return buckets[-1:] if self.exact else buckets


def _positive(name: str, value: object, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}")
