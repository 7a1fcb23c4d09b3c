"""What a device is called, so that figures are compared with those of the same device only."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def device_name(device: torch.device | str) -> str:
    """A GPU's name, or a processor's with its number of cores and its widest vector instructions.

    Two machines of one name are taken to be equally fast when nothing disturbs them.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).name
    cores = os.cpu_count() or 1
    return f"{_processor()}, {cores} core{'s' * (cores > 1)}, {torch.backends.cpu.get_cpu_capability()}"


def _processor() -> str:
    """The processor's own name on Linux; elsewhere what Python knows, at least the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name") and ":" in line]
    return names[0] if names and names[0] else platform.processor() or platform.machine() or "unknown processor"
