"""Memory that host and device share: one tensor on the CPU, two without data for fake CUDA tensors."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from draftgraph.graphs import DecodeState, HostReader, StateShape, shared
from draftgraph.graphs.capture_guard import fake_cuda

SHAPE = StateShape(slots=2, context=8, num_drafts=3, vocab_size=11, max_bucket=2, max_width=8)


def test_on_the_cpu_both_sides_are_one_tensor():
    state = DecodeState.allocate(SHAPE, dtype=torch.float32, device="cpu")
    names = [field.name for field in dataclasses.fields(state.host)]
    assert names == ["ring_tokens", "published", "taken", "cancel", "pause", "leave_on_finish"]
    for name in names:
        assert getattr(state.host, name) is getattr(state, name)
        assert not getattr(state, name).any()


def test_without_a_device_each_side_has_its_own_kind():
    with fake_cuda() as device:
        state = DecodeState.allocate(SHAPE, dtype=torch.float32, device=device)
        for field in dataclasses.fields(state.host):
            ours, theirs = getattr(state.host, field.name), getattr(state, field.name)
            assert (ours.device.type, theirs.device.type) == ("cpu", "cuda")
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)


@pytest.mark.parametrize(
    ("size", "dtype", "device", "message"),
    [
        ((2,), torch.bfloat16, "cpu", "dtype of shared memory is bfloat16; accepted: bool, int32, int64, float32"),
        ((2,), torch.int32, "meta", "device of shared memory is meta; accepted: cpu, cuda"),
        ((2, 0), torch.int32, "cpu", r"size of shared memory is \[2, 0\]; accepted: positive sizes"),
    ],
)
def test_what_cannot_be_shared_is_refused(size, dtype, device, message):
    with pytest.raises(ValueError, match=message):
        shared(size, dtype, device)


def test_a_tensor_on_the_cpu_is_read_as_it_is():
    tensor = torch.arange(6)
    assert HostReader("cpu").read(tensor) is tensor


def test_a_reader_of_the_cpu_refuses_others():
    with pytest.raises(ValueError, match="a reader of CPU tensors was given one on meta"):
        HostReader("cpu").read(torch.empty(2, device="meta"))
