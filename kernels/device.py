"""What a device can do: the one place that asks."""

from __future__ import annotations

import torch

DEVICES = ("cpu", "cuda")
"""Kinds of devices that the ops have implementations for."""

LEAST_CAPABILITY = (8, 0)
"""Of CUDA devices: what the kernels are compiled for at the lowest."""


def checked_device(device: torch.device) -> torch.device:
    """A device of `DEVICES`, with the index of the CUDA device in use.

    Raises `ValueError`, saying why, for one that is not there or that the kernels were not made for.
    """
    if device.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        build = "this build of PyTorch has no CUDA" if torch.version.cuda is None else "PyTorch finds no CUDA device"
        raise ValueError(build)
    current = torch.cuda.current_device()
    if device.index not in (None, current):
        raise ValueError(f"the CUDA device in use is {current}; choose another one by CUDA_VISIBLE_DEVICES")
    capability = torch.cuda.get_device_capability(current)
    if capability < LEAST_CAPABILITY:
        found, least = (f"{major}.{minor}" for major, minor in (capability, LEAST_CAPABILITY))
        raise ValueError(f"its compute capability is {found}, and the kernels need {least}")
    return torch.device("cuda", current)


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether products in bfloat16 run at full speed: every CUDA device from sm_80 on, CPUs whose oneDNN says so."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
