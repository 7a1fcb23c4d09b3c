"""Every op of kernels/ is timed in the bench tier."""

from __future__ import annotations

import importlib
import pkgutil
import runpy
from pathlib import Path

import torch

from draftgraph import kernels

TIMINGS = Path(__file__).parents[2] / "bench" / "test_ops.py"


def test_every_op_is_timed():
    for module in pkgutil.iter_modules(kernels.__path__):
        importlib.import_module(f"{kernels.__name__}.{module.name}")
    names = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("draftgraph::")}
    assert {name.split(".")[0] for name in names} == set(runpy.run_path(str(TIMINGS))["GROUPS"])
