"""What every test gets: fixed seeds, few threads, no network, and the skips of what this machine lacks."""

import ipaddress
import os
import random
import socket
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import pytest
import torch

from draftgraph.runtime.models import cached_model

TIERS = ("null", "interpret", "compile", "gpu", "bench")
MOST_WORKERS = 8
"""Each imports torch and may hold a model of a gigabyte."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """What `-n auto` means."""
    return min(MOST_WORKERS, os.cpu_count() or 1)


def pytest_configure(config):
    workers = getattr(config.option, "numprocesses", None) or 1
    if workers > 1:  # inherited by the workers, and by what their tests start: all share the cores
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or min(4, os.cpu_count() or 1)))


def pytest_collection_modifyitems(config, items):
    tests = Path(__file__).parent
    timed = config.getoption("benchmark_enable") or config.getoption("benchmark_only")
    for item in items:
        tier = item.path.relative_to(tests).parts[0] if item.path.is_relative_to(tests) else ""
        if tier in TIERS:
            item.add_marker(getattr(pytest.mark, tier))
        if item.get_closest_marker("models") and cached_model("smollm2-135m") is None:
            reason = "SmolLM2-135M is not in the cache: run `draftgraph fetch smollm2-135m`"
            item.add_marker(pytest.mark.skip(reason=reason))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if item.get_closest_marker("bench") and not timed:
            reason = "timed: run `pytest tests/bench --benchmark-enable` on a quiet machine"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _seeds():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _no_network():
    """Connections to anything but this machine raise, so that no test depends on the network unnoticed."""
    connect, connect_ex = socket.socket.connect, socket.socket.connect_ex

    def guarded(original):
        def call(self, address):
            if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_loopback(address[0]):
                raise AssertionError(f"a test tried to connect to {address[0]}: tests never use the network")
            return original(self, address)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded(connect))
        patch.setattr(socket.socket, "connect_ex", guarded(connect_ex))
        yield


def _is_loopback(host):
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@pytest.fixture(scope="session")
def smollm2_path():
    """The local directory of SmolLM2-135M-Instruct; for tests marked `models`."""
    path = cached_model("smollm2-135m")
    if path is None:
        pytest.skip("SmolLM2-135M is not in the cache: run `draftgraph fetch smollm2-135m`")
    return path
