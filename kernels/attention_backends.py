"""Which implementation of `window_attention` a model's layers take, by the names that configurations carry."""

from __future__ import annotations

import torch

from .window_attention import window_attention, window_attention_reference

BACKENDS: dict[str, tuple[str, ...]] = {"triton": ("cuda",), "sdpa": ("cpu",), "reference": ("cpu", "cuda")}
"""Names, and the devices that each is for. `triton` and `sdpa` are what `window_attention` is on a GPU and on the CPU;
`reference` is its specification in plain torch, slow and meant for comparison: it reads the whole cache of each token's
slot."""
_ALIASES = {"TRITON_ATTN": "triton", "TORCH_SDPA": "sdpa", "auto": None}
"""vLLM's names of the same, and the device's own."""


def canonical_backend(name: str | None) -> str | None:
    """The name in `BACKENDS` of one that may be vLLM's; None for the device's own. Unknown names stay as they are."""
    return _ALIASES.get(name, name) if name is not None else None


def check_backend(name: str | None, device_type: str) -> None:
    """Checks a name of `canonical_backend`; None, the device's own, is always right.

    Raises:
        ValueError: there is no such backend, or it is not for this kind of device.
    """
    fitting = [known for known, devices in BACKENDS.items() if device_type in devices]
    if name is not None and name not in fitting:
        what = "is not for" if name in BACKENDS else "is none for"
        accepted = ", ".join(["auto", *fitting])
        raise ValueError(f"attention_backend {name!r} {what} the device {device_type!r}; accepted: {accepted}")


def attend(
    backend: str | None,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    positions: torch.Tensor,
    cu_tokens: torch.Tensor,
    base: torch.Tensor,
    slot_of_row: torch.Tensor,
    ancestors: torch.Tensor | None,
    scale: float,
    sliding_window: int,
    soft_cap: float,
) -> torch.Tensor:
    """`window_attention` through a backend that `check_backend` accepts: [W, Hq, Dk] to [W, Hq, Dv]."""
    function = window_attention_reference if backend == "reference" else window_attention
    return function(
        query,
        key_cache,
        value_cache,
        positions,
        cu_tokens,
        base,
        slot_of_row,
        ancestors,
        scale,
        sliding_window,
        soft_cap,
    )
