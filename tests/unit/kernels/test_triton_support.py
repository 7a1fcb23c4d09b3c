"""What the Triton kernels share, as far as it needs no kernel."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from draftgraph.kernels.triton_support import check_tensor, draft_range, next_power_of_2, row_range


def test_next_power_of_2():
    assert [next_power_of_2(size) for size in (0, 1, 2, 3, 4, 5, 576)] == [1, 1, 2, 4, 4, 8, 1024]


def test_ranges_of_rows_and_drafts_have_few_sizes():
    assert [row_range(rows) for rows in (1, 2, 12, 16, 17)] == [1, 16, 16, 16, 32]
    assert [draft_range(drafts) for drafts in (0, 7, 8, 63)] == [8, 8, 16, 64]


def test_a_launch_on_cpu_tensors_is_refused_outside_the_interpreter():
    with pytest.raises(ValueError, match="query is on cpu: the Triton kernels take cuda tensors"):
        check_tensor("query", torch.zeros(2), dtypes=(torch.float32,), shape=(2,))


def test_the_ops_work_without_triton():
    """As on machines that Triton has no build for."""
    script = """
import sys
sys.modules["triton"] = None
import torch
from draftgraph.kernels import compact_path, compile_report, rope_and_cache, triton_support, window_attention
assert triton_support.triton is None
cache = torch.arange(12.0).reshape(1, 1, 1, 4, 3)
index = [torch.tensor(i, dtype=torch.int32) for i in ([[1, 2]], [2], [0], [0])]
compact_path.compact_path(cache, cache.clone(), *index)
assert cache[0, 0, 0, 0].tolist() == [3.0, 4.0, 5.0]
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
