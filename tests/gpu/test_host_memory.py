"""Memory shared with a real device, and reads beside a stream that is busy."""

from __future__ import annotations

import time

import pytest
import torch

from draftgraph.graphs import DecodeState, HostReader, StateShape, shared

pytestmark = pytest.mark.gpu

KINDS = [torch.bool, torch.int32, torch.int64, torch.float32]


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_each_side_sees_what_the_other_writes(dtype):
    pair = shared((3, 5), dtype, "cuda")
    assert pair.host.is_pinned()
    assert pair.device.is_cuda
    assert pair.device.dtype == dtype
    pair.device[1, 2:].fill_(1)
    torch.cuda.synchronize()
    expected = torch.zeros((3, 5), dtype=dtype)
    expected[1, 2:] = 1
    assert torch.equal(pair.host, expected)
    pair.host[2] = 1
    expected[2] = 1
    assert torch.equal(pair.device.cpu(), expected)


def test_the_device_side_keeps_the_memory():
    alias = shared((1000,), torch.int64, "cuda").device
    others = [torch.ones(1000, dtype=torch.int64, pin_memory=True) for _ in range(20)]
    assert not alias.any()
    assert others[0].all()


def test_reading_does_not_wait_for_the_main_stream():
    state = DecodeState.allocate(
        StateShape(slots=2, context=8, num_drafts=3, vocab_size=11, max_bucket=2, max_width=8),
        dtype=torch.float32,
        device="cuda",
    )
    state.histogram[1].fill_(3)
    large = torch.arange(3_000_001, dtype=torch.int32, device="cuda")
    reader = HostReader("cuda")
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # about a second
    done.record()
    start = time.perf_counter()
    assert (reader.read(state.histogram[1]) == 3).all()
    assert torch.equal(reader.read(large), torch.arange(3_000_001, dtype=torch.int32))
    assert not done.query()
    assert time.perf_counter() - start < 0.5
    with pytest.raises(ValueError, match="accepted: contiguous"):
        reader.read(state.histogram[:, 0])
