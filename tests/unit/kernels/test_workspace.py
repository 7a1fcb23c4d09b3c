"""Whose memory an op's launches leave each other things in."""

from __future__ import annotations

import threading

import pytest
import torch

from draftgraph.kernels.workspace import WorkspacePool, workspace

CPU = torch.device("cpu")


def address(name="op", numel=100, dtype=torch.float32):
    return workspace(name, numel, dtype, CPU).data_ptr()


def test_a_pool_gives_the_same_buffer_again():
    pool = WorkspacePool()
    with pool:
        first = address()
        assert address() == first
        assert address(numel=128) == first  # of the same size class
        others = [address(numel=129), address("other"), address(dtype=torch.int32)]
    assert len({first, *others}) == 4
    with pool:
        assert address() == first
    assert pool.num_bytes == 4 * (128 + 256 + 128 + 128)


def test_two_pools_share_nothing():
    one, other = WorkspacePool(), WorkspacePool()
    with one:
        first = workspace("op", 64, torch.float32, CPU)
        with other:
            second = workspace("op", 64, torch.float32, CPU)
        assert workspace("op", 64, torch.float32, CPU).data_ptr() == first.data_ptr()
    begin, end = first.data_ptr(), first.data_ptr() + first.numel() * 4
    assert not begin <= second.data_ptr() < end


def test_without_a_pool_the_op_is_named():
    with pytest.raises(RuntimeError, match="sample_target needs a workspace and no pool is current"):
        workspace("sample_target.best", 1, torch.int64, CPU)


def test_a_pool_is_left_when_its_body_raises():
    with pytest.raises(KeyError), WorkspacePool():
        raise KeyError
    with pytest.raises(RuntimeError, match="no pool is current"):
        address()


def test_each_thread_has_its_own_current_pool():
    found = []

    def other_thread():
        try:
            address()
        except RuntimeError:
            with WorkspacePool():
                found.append(address())

    with WorkspacePool():
        own = address()
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
        assert address() == own
    assert len(found) == 1
    assert found[0] != own


def test_a_buffer_made_during_a_capture_is_refused(monkeypatch):
    """A recorded capture: only the question whether one is under way needs a device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with (
        WorkspacePool(),
        pytest.raises(RuntimeError, match=r"window_attention of 10 elements .* run the step once before"),
    ):
        workspace("window_attention", 10, torch.float32, torch.device("cuda"))
