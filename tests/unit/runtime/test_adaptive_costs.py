"""The table of costs: made monotone, measured with an executor, kept, and read again."""

from __future__ import annotations

import json
import logging
import math

import pytest
import torch

from draftgraph.graphs import DecodeState, HostExecutor, Program, Sequence, StateShape, Step, Switch
from draftgraph.runtime.adaptive import BucketCosts, CostTable
from draftgraph.runtime.adaptive import measure as measuring
from draftgraph.runtime.adaptive.costs import load_costs, monotone, save_costs
from draftgraph.runtime.adaptive.measure import costs_key, measure_costs

TABLE = CostTable({1: BucketCosts((1.0, 2.0), (0.5, 0.6, 0.7)), 2: BucketCosts((1.0, 2.0, 4.0), (0.5, 0.8, 0.9))})


def test_costs_are_made_monotone():
    assert monotone([2.0, 1.0, 3.0, 2.5]) == (2.0, 2.0, 3.0, 3.0)
    assert monotone([0.0])[0] > 0
    assert BucketCosts.of([2.0, 1.0], [3.0, 1.0]) == BucketCosts((2.0, 2.0), (3.0, 3.0))
    table = CostTable.of({2: BucketCosts((0.5, 3.0, 4.0), (0.4, 0.9, 1.0)), 1: TABLE.buckets[1]})
    assert table.buckets[2] == BucketCosts((1.0, 3.0, 4.0), (0.5, 0.9, 1.0))


@pytest.mark.parametrize("values", [(), (0.0, 1.0), (-1.0,), (2.0, 1.0), (math.nan,), (math.inf,)])
def test_costs_that_cannot_be(values):
    with pytest.raises(ValueError, match="costs of verify must"):
        BucketCosts(values, (1.0,))


def test_a_table_knows_what_it_fits():
    assert TABLE.fits({1: (4, 8), 2: (4, 8, 16)}, 2)
    assert not TABLE.fits({1: (4, 8), 2: (4, 8)}, 2)
    assert not TABLE.fits({1: (4, 8), 2: (4, 8, 16)}, 3)
    assert not TABLE.fits({1: (4, 8)}, 2)


def test_tables_are_kept_and_damaged_ones_measured_anew(tmp_path, caplog):
    path = tmp_path / "costs" / "one.json"
    assert load_costs(path, "key") is None
    save_costs(path, "key", TABLE)
    assert load_costs(path, "key") == TABLE
    assert load_costs(path, "another") is None
    assert CostTable.parse(json.loads(json.dumps(TABLE.to_dict()))) == TABLE
    for damage in ("{", '{"key": "key"}', '{"key": "key", "costs": {"1": {"verify": [-1], "draft": [1]}}}', "[1]"):
        path.write_text(damage)
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            assert load_costs(path, "key") is None
        assert "cannot be read" in caplog.text
    path.unlink()
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        save_costs(tmp_path / "file" / "costs.json", "key", TABLE)
    assert "cannot be kept" in caplog.text


def test_keys_tell_what_was_measured_apart():
    assert costs_key({"a": 1, "b": 2}) == costs_key({"b": 2, "a": 1})
    assert costs_key({"a": 1, "b": 2}) != costs_key({"a": 1, "b": 3})


class Clock:
    """Time that passes only where a step says so."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_steps_are_measured_on_rows_of_the_asked_length(monkeypatch):
    """Each step takes a time of its own, and a moment now and then takes much longer."""
    clock, seen, calls = Clock(), [], {"n": 0}
    monkeypatch.setattr(measuring, "time", clock)
    shape = StateShape(slots=2, context=64, num_drafts=2, vocab_size=3, max_bucket=2, max_width=8)
    state = DecodeState.allocate(shape, dtype=torch.float32, device="cpu")
    state.length[0], state.finished[0] = 7, False
    before = {name: tensor.clone() for name, tensor in state.tensors().items()}

    def takes(name: str, milliseconds: float) -> Step:
        def run(s: DecodeState) -> None:
            calls["n"] += 1
            clock.now += milliseconds / 1e3 * (20 if calls["n"] % 13 == 0 else 1)
            seen.append((name, s.length[: shape.slots].tolist(), s.finished.tolist(), s.cu_tokens.tolist()))

        return Step(name, run)

    def program(bucket: int) -> Program:
        drafts = [Switch(state.width_index, (takes(f"draft[{n}]", 3.0 - n),)) for n in range(2)]
        verify = Switch(state.width_index, tuple(takes(f"verify[{w}]", 10.0 + w * bucket) for w in (4, 8)))
        ends = (takes("accept", 1.0), takes("commit", 0.5))
        return Program(
            f"round[{bucket}]", Sequence(takes("propose", 2.0), *drafts, takes("budget", 0.5), verify, *ends), state
        )

    admitted: list[int] = []
    widths = {1: (4, 8), 2: (4, 8)}
    programs = {bucket: program(bucket) for bucket in (1, 2)}
    table = measure_costs(programs, widths, state, HostExecutor(), context=9999, admit=admitted.append)
    assert table.buckets[1].draft == pytest.approx((2.0, 5.0, 7.0))
    assert table.buckets[1].verify == pytest.approx((16.0, 20.0))
    assert table.buckets[2].verify == pytest.approx((20.0, 28.0))
    assert admitted == [0, 0, 1]
    for name, lengths, finished, ends in seen:
        live = [not f for f in finished]
        assert all(length == 61 for length, is_live in zip(lengths, live, strict=False) if is_live)
        if name.startswith("verify"):
            assert ends[sum(live)] == min(int(name[7]), 3 * sum(live))
    for name, tensor in state.tensors().items():
        assert torch.equal(tensor, before[name]), name
