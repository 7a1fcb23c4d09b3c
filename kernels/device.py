"""What a device can do: the one place that asks."""

from __future__ import annotations

import torch


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether products in bfloat16 run at full speed: every CUDA device from sm_80 on, CPUs whose oneDNN says so."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
