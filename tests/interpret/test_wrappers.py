"""Every op's launch wrapper: it allocates its output and nothing else, and refuses what its kernels could not take.

The kernels themselves do not run here.
"""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch
from device_cases import cases
from moving_cases import CASES as MOVING
from moving_cases import op_of
from op_arguments import OPS, VOCAB
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

from draftgraph import kernels
from draftgraph.kernels.registration import CUDA_IMPLEMENTATIONS
from draftgraph.kernels.workspace import WorkspacePool

OUTPUTS = {"embed_tokens": 1, "moe_experts": 1, "rope_and_cache": 1, "window_attention": 1}
"""Tensors that an op returns; the others write what they are given."""


class Allocations(TorchDispatchMode):
    """Counts the tensors made that are views of none."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not any(given.alias_info for given in func._schema.returns):
            self.made.append(str(func))
        return result


@pytest.fixture(autouse=True)
def _no_kernel(monkeypatch):
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", lambda *args, **kwargs: None)


def test_every_op_is_here():
    for module in pkgutil.iter_modules(kernels.__path__):
        importlib.import_module(f"{kernels.__name__}.{module.name}")
    assert set(OPS) == set(CUDA_IMPLEMENTATIONS)


def test_every_op_runs_on_a_device_too():
    """From one of the two lists that this folder and `tests/gpu` share, or from the tests of a forward's ops there."""
    listed = {case.op for case in cases(vocab=VOCAB).values()} | {op_of(case) for case in MOVING}
    forward = {"window_attention", "rope_and_cache", "compact_path", "moe_experts", "embed_tokens", "project_logits"}
    assert listed | forward == set(OPS)
    assert not listed & forward


@pytest.mark.parametrize("name", OPS)
def test_an_op_allocates_its_output_only(name):
    """Workspaces are there from the first call on."""
    args = OPS[name]()
    with WorkspacePool():
        CUDA_IMPLEMENTATIONS[name](*args)
        with Allocations() as allocations:
            CUDA_IMPLEMENTATIONS[name](*args)
    assert len(allocations.made) == OUTPUTS.get(name, 0), allocations.made


def changes(tensor):
    """What no argument of a kernel may become, whatever its sizes: another type, device, rank or layout."""
    yield tensor.to(torch.float64 if tensor.is_floating_point() else torch.int16)
    yield tensor.to("meta")
    yield tensor.unsqueeze(0)
    spread = tensor.repeat_interleave(2, -1)[..., ::2] if tensor.dim() and tensor.numel() > 1 else tensor
    if not spread.is_contiguous():
        yield spread


@pytest.mark.parametrize("name", OPS)
def test_a_wrong_argument_is_a_value_error(name):
    """And nothing else: no other exception, and no launch."""
    args = OPS[name]()
    for index, argument in enumerate(args):
        if isinstance(argument, torch.Tensor):
            for change in changes(argument):
                with pytest.raises(ValueError, match=r"accepted|is on"), WorkspacePool():
                    CUDA_IMPLEMENTATIONS[name](*args[:index], change, *args[index + 1 :])
