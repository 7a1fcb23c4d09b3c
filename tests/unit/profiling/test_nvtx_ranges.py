"""Ranges against a domain that records them, and as no-ops without a tool."""

from __future__ import annotations

import nvtx
import pytest
from observed_rounds import run_rounds

from draftgraph.profiling.nvtx_ranges import NvtxRanges, wanted


class RecordingDomain:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.open: dict[int, str] = {}
        self.attributes = 0

    def get_event_attributes(self, message):
        self.attributes += 1
        return message

    def push_range(self, attributes):
        self.log.append(f"<{attributes}")

    def pop_range(self):
        self.log.append(">")

    def start_range(self, attributes):
        self.open[len(self.log)] = attributes
        self.log.append(f"start {attributes}")
        return len(self.log) - 1

    def end_range(self, handle):
        self.log.append(f"end {self.open.pop(handle)}")


@pytest.fixture
def domain(monkeypatch):
    found = RecordingDomain()
    names = []
    monkeypatch.setattr(nvtx, "get_domain", lambda name: names.append(name) or found)
    yield found
    assert names == ["draftgraph"]


def test_steps_lie_inside_their_rounds_and_carry_bucket_and_width(domain):
    run_rounds(NvtxRanges(), rounds=2)
    assert domain.log == [
        *("<prefill[64]", "<prefill[64] prefill[64]", ">", ">"),
        *("<round[2]", "<round[2] propose", ">", "<round[2] verify[4]", ">", "<round[2] commit", ">", ">"),
        *("<round[2]", "<round[2] propose", ">", "<round[2] verify[8]", ">", "<round[2] commit", ">", ">"),
    ]
    assert domain.attributes == 7  # made once for each name


def test_requests_overlap_and_steady_lasts_while_any_decodes(domain):
    ranges = NvtxRanges()
    ranges.request_started(4, 10)
    ranges.request_decoding(4)
    ranges.request_started(5, 20)
    ranges.request_decoding(5)
    ranges.request_finished(4)
    ranges.request_finished(5)
    ranges.request_finished(6)  # one that was there before
    assert domain.log == [
        "start request 4, 10 prompt tokens",
        "start steady",
        "start request 5, 20 prompt tokens",
        "end request 4, 10 prompt tokens",
        "end request 5, 20 prompt tokens",
        "end steady",
    ]
    assert domain.open == {}


def test_a_request_cancelled_in_its_prefill_does_not_end_the_steady_state(domain):
    ranges = NvtxRanges()
    for number in (1, 2):
        ranges.request_started(number, 3)
    ranges.request_decoding(1)
    ranges.request_finished(2)
    assert list(domain.open.values()) == ["request 1, 3 prompt tokens", "steady"]


def test_without_a_tool_everything_is_a_no_op():
    ranges = NvtxRanges()
    ranges.request_started(1, 3)
    ranges.request_decoding(1)
    run_rounds(ranges)
    ranges.request_finished(1)


@pytest.mark.parametrize(("value", "expected"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_the_environment_asks_for_ranges(monkeypatch, value, expected):
    monkeypatch.delenv("DRAFTGRAPH_NVTX", raising=False)
    if value is not None:
        monkeypatch.setenv("DRAFTGRAPH_NVTX", value)
    assert wanted() is expected


def test_another_value_is_refused(monkeypatch):
    monkeypatch.setenv("DRAFTGRAPH_NVTX", "yes")
    with pytest.raises(ValueError, match="DRAFTGRAPH_NVTX must be 0 or 1, got 'yes'"):
        wanted()
