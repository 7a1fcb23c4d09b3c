"""The join of times and floors, and its table."""

from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console

from draftgraph.profiling import DeviceRates, StepCost, StepTime
from draftgraph.profiling.names import StepName
from draftgraph.profiling.report import decode_efficiency, report_rows, step_table

RATES = DeviceRates(
    device="made up", threads=1, torch_version="0", copy_bandwidth=1e9, read_bandwidth=1e9, matmul={"bfloat16": 1e9}
)
TIMES = [
    StepTime(name=StepName.parse(name), calls=calls, seconds=seconds)
    for name, calls, seconds in (
        ("prefill[64]", 1, 3.0),
        ("prefill[64] prefill[64]", 1, 3.0),
        ("round[1]", 4, 10.0),
        ("round[1] verify[4]", 3, 6.0),
        ("round[1] verify[8]", 1, 3.0),
        ("round[1] accept", 4, 0.8),
        ("round[1] round_pairs", 4, 0.0),
    )
]
COSTS = {
    ("verify", 4): StepCost(bytes_read=1e9, operations=5e8, dtype=torch.bfloat16),
    ("verify", 8): StepCost(bytes_read=1e9, operations=2e9, dtype=torch.bfloat16),
    ("accept", None): StepCost(bytes_read=1e8),
}


def rows():
    found = report_rows(TIMES, lambda time: COSTS.get((time.phase, time.width)), RATES)
    return {str(row.time.name): row for row in found}


def test_steps_have_their_share_bandwidth_and_part_of_the_limit():
    narrow, wide = rows()["round[1] verify[4]"], rows()["round[1] verify[8]"]
    assert (narrow.share, narrow.bytes_per_second, narrow.share_of_limit) == (0.6, 5e8, 0.5)
    assert wide.share_of_limit == pytest.approx(2 / 3)  # bound by its operations
    assert rows()["prefill[64]"].share == 1.0


def test_a_pass_has_the_sum_of_its_steps():
    whole = rows()["round[1]"]
    assert whole.cost.bytes == pytest.approx((3 * 1e9 + 1e9 + 4 * 1e8) / 4)
    assert whole.least_seconds == pytest.approx((3 * 1.0 + 2.0 + 4 * 0.1) / 4)
    assert whole.share_of_limit == pytest.approx(5.4 / 10)


def test_what_is_not_known_is_none():
    assert rows()["round[1] round_pairs"].to_dict()["share_of_limit"] is None
    assert rows()["prefill[64]"].cost is None
    assert report_rows(TIMES)[3].share == 0.6
    assert report_rows([StepTime(name=StepName.parse("round[1] commit"), calls=0, seconds=0.0)])[0].share == 0.0


def test_decoding_as_a_whole():
    found = decode_efficiency(rows().values(), 20, RATES)
    assert found.tokens_per_second == 2.0
    assert found.bytes_per_second == pytest.approx(4.4e8)
    assert found.share_of_limit == pytest.approx(0.54)
    assert decode_efficiency([], 0, RATES) is None


def test_rows_are_json():
    document = json.loads(json.dumps([row.to_dict() for row in rows().values()]))
    assert document[3]["phase"] == "verify"
    assert document[3]["width"] == 4
    assert document[3]["bytes_per_call"] == 1e9


def shown(found) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    console.print(step_table(found))
    return console.file.getvalue().splitlines()


def test_the_table_fits_80_columns_and_hides_what_says_nothing():
    lines = shown(list(rows().values()))
    assert max(len(line) for line in lines) <= 80
    assert lines[1].split() == ["step", "calls", "ms/call", "ms", "share", "moves", "GB/s", "limit"]
    assert "moves: the least bytes of a call; limit: its least time" in lines[-1]
    cells = [line.split() for line in lines[3:-1]]
    assert [row[0] for row in cells] == ["prefill[64]", "round[1]", "verify[4]", "verify[8]", "accept", "round_pairs"]
    assert cells[2] == ["verify[4]", "3", "2000.000", "6000.0", "60.0%", "1.0", "GB", "0.50", "50.0%"]
    assert shown(report_rows(TIMES))[1].split() == ["step", "calls", "ms/call", "ms", "share"]
