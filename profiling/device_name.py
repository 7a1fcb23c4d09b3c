"""What a device is called, so that figures are compared with those of the same device only."""

from __future__ import annotations

import os

import torch

from .clocks import clock_for


def device_name(device: torch.device | str) -> str:
    """A GPU's name, or a processor's with its number of cores and its widest vector instructions.

    Two machines of one name are taken to be equally fast when nothing disturbs them.
    """
    name = clock_for(device).device_name() or "unknown processor"
    if torch.device(device).type == "cuda":
        return name
    cores = os.cpu_count() or 1
    return f"{name}, {cores} core{'s' * (cores > 1)}, {torch.backends.cpu.get_cpu_capability()}"
