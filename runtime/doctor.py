"""What this machine offers: versions, processors, compiler, cache, and which executors work."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sysconfig
from pathlib import Path
from typing import Any

from .cache import cache_directory, check_room, check_writable
from .errors import FetchError
from .models import ALIASES, cached_model

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "huggingface_hub", "cuda-bindings")


def package_version(name: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def report() -> dict[str, Any]:
    """Everything that `draftgraph doctor` shows, in types that JSON has."""
    import torch

    from ..graphs.executors import available_executors
    from ..kernels.device import has_fast_bfloat16

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        "draftgraph": package_version("draftgraph"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "cpu": {
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "fast_bfloat16": has_fast_bfloat16(torch.device("cpu")),
        },
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())],
        "cuda_driver": _cuda_driver(),
        "compiler": _compiler(),
        "cache": _cache(),
        "executors": [
            {"name": status.name, "available": status.available, "reason": status.reason}
            for status in available_executors(kind, cache_directory(), fresh=True)
        ],
    }


def _gpu(index: int) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
    }


def _cuda_driver() -> dict[str, Any]:
    """The driver's CUDA version, or why there is none."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return {"version": None, "reason": "the package cuda-bindings is not installed"}
    try:
        code, version = driver.cuDriverGetVersion()
    except Exception:  # each release of the bindings has its own error for a missing library
        return {"version": None, "reason": "this machine has no NVIDIA driver library"}
    if int(code) != 0:
        return {"version": None, "reason": f"cuDriverGetVersion returned {code}"}
    return {"version": f"{version // 1000}.{version % 1000 // 10}", "reason": ""}


def _compiler() -> dict[str, Any]:
    """The C++ compiler that torch.compile would use on the CPU, or why it has none."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        name = get_cpp_compiler()
    except Exception as error:
        return {"command": None, "reason": " ".join(str(error).split())}
    include = Path(sysconfig.get_paths()["include"]) / "Python.h"
    reason = "" if include.is_file() else f"Python's headers are missing: there is no {include}"
    return {"command": name, "reason": reason}


def _cache() -> dict[str, Any]:
    root = cache_directory()
    try:
        check_writable(root)
        check_room(root, 1)
        reason = ""
    except FetchError as error:
        reason = str(error)
    return {
        "path": str(root),
        "writable": not reason,
        "reason": reason,
        "models": [alias for alias in ALIASES if cached_model(alias) is not None],
    }


def problems(facts: dict[str, Any]) -> list[str]:
    """What keeps draftgraph from running well here, one sentence each; empty on a good machine."""
    found = []
    compiler = facts["compiler"]
    if compiler["command"] is None:
        found.append(f"no C++ compiler for torch.compile ({compiler['reason']}): install g++, or use compile=False")
    elif compiler["reason"]:
        found.append(f"torch.compile will fail: {compiler['reason']}")
    if not facts["cache"]["writable"]:
        found.append(facts["cache"]["reason"])
    if not any(executor["available"] for executor in facts["executors"]):
        found.append("no executor works here")
    return found
