"""Rates are measured once, kept, and measured again only where something is missing."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from draftgraph.profiling import device_rates
from draftgraph.profiling.device_rates import DeviceRates, best_seconds, load_rates, measure_rates


@pytest.fixture
def measured(monkeypatch):
    """Replaces the measurement; the list has the dtypes of every one."""
    calls: list[tuple[torch.dtype, ...]] = []

    def measure(device, dtypes):
        calls.append(dtypes)
        return DeviceRates(
            device="cpu",
            threads=1,
            torch_version="0",
            copy_bandwidth=2e9,
            read_bandwidth=float(len(calls)),
            matmul={str(dtype).removeprefix("torch."): 1e9 for dtype in dtypes},
        )

    monkeypatch.setattr(device_rates, "measure_rates", measure)
    return calls


def test_rates_are_measured_once_and_kept(tmp_path, measured):
    first = load_rates(tmp_path / "rates", "cpu", (torch.bfloat16,))
    assert load_rates(tmp_path / "rates", "cpu", (torch.bfloat16,)) == first
    assert measured == [(torch.bfloat16,)]
    assert load_rates(tmp_path / "rates", "cpu", (torch.bfloat16,), again=True).read_bandwidth == 2.0
    (file,) = (tmp_path / "rates").iterdir()
    assert json.loads(file.read_text())["read_bandwidth"] == 2.0


def test_a_missing_dtype_is_added_and_nothing_else_changes(tmp_path, measured):
    first = load_rates(tmp_path, "cpu", (torch.bfloat16,))
    both = load_rates(tmp_path, "cpu", (torch.bfloat16, torch.float32))
    assert measured == [(torch.bfloat16,), (torch.float32,)]
    assert both.read_bandwidth == first.read_bandwidth
    assert set(both.matmul) == {"bfloat16", "float32"}


def test_threads_have_files_of_their_own(tmp_path, measured, monkeypatch):
    load_rates(tmp_path, "cpu", (torch.float32,))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    load_rates(tmp_path, "cpu", (torch.float32,))
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"device": 1}'])
def test_a_damaged_file_is_measured_anew(tmp_path, measured, caplog, text):
    load_rates(tmp_path, "cpu", (torch.float32,))
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    with caplog.at_level(logging.WARNING):
        load_rates(tmp_path, "cpu", (torch.float32,))
    assert len(measured) == 2
    assert "cannot be read" in caplog.text
    assert json.loads(file.read_text())["device"] == "cpu"


def test_a_directory_that_cannot_be_made_is_a_warning(tmp_path, measured, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert load_rates(tmp_path / "file" / "rates", "cpu", (torch.float32,)).bandwidth == 2e9
    assert "cannot be kept in" in caplog.text


def test_this_machine_is_measured(monkeypatch):
    monkeypatch.setattr(device_rates, "_BUFFER_BYTES", 2**20)
    monkeypatch.setattr(device_rates, "_LONG_ENOUGH", 1e-4)
    monkeypatch.setattr(device_rates, "_SMALLEST_SIDE", 32)
    rates = measure_rates("cpu", (torch.float32,))
    assert 1e7 < rates.copy_bandwidth < 1e13
    assert 1e7 < rates.read_bandwidth < 1e13
    assert 1e6 < rates.operations_per_second(torch.float32) < 1e15
    assert rates.bandwidth == max(rates.copy_bandwidth, rates.read_bandwidth)
    assert rates.threads == torch.get_num_threads()


def test_short_calls_are_measured_many_at_a_time():
    class Clock:
        now = 0.0

        def mark(self):
            return self.now

        def seconds(self, start, end):
            return end - start

        def device_name(self):
            return "ticks"

    clock, calls = Clock(), []

    def tick():
        calls.append(1)
        clock.now += 1e-3

    assert best_seconds(tick, clock) == pytest.approx(1e-3)
    assert len(calls) == 1 + (1 + 2 + 4 + 8 + 16 + 32) + 4 * 32


def test_a_rate_of_zero_is_refused():
    with pytest.raises(ValueError, match=r"matmul\[float32\] must be positive, got 0.0"):
        DeviceRates(
            device="x",
            threads=1,
            torch_version="0",
            copy_bandwidth=1.0,
            read_bandwidth=1.0,
            matmul={"float32": 0.0},
        )
