import random

import pytest

from draftgraph.profiling import interleaved
from draftgraph.profiling.baseline import Measure
from draftgraph.profiling.gate import Limits, Verdict, compare_measure
from draftgraph.profiling.interleaved import Contender, Times, interleave


class NoisyMachine:
    """A clock that work moves on, in fits and starts: slow spells, small jitter, and long interruptions."""

    def __init__(self, seed):
        self.now = 0.0
        self.random = random.Random(seed)
        self.spell = 1.0

    def perf_counter(self):
        return self.now

    def work(self, seconds):
        def run():
            if self.random.random() < 0.02:
                self.spell = self.random.uniform(1.0, 1.8)
            taken = seconds * self.spell * self.random.uniform(1.0, 1.1)
            if self.random.random() < taken / 0.004:
                taken += self.random.uniform(0.001, 0.01)
            self.now += taken

        return run


def ratio(machine, monkeypatch, subject):
    monkeypatch.setattr(interleaved, "time", machine)
    contest = {"subject": Contender(run=machine.work(subject)), "reference": Contender(run=machine.work(3e-4))}
    return interleave(contest, blocks=15, turns=12).ratio("subject", "reference")


def test_on_a_noisy_machine_the_same_is_the_same_and_a_fifth_more_is_noticed(monkeypatch):
    limits = Limits(least=0.10, most=0.15)
    for seed in range(10):
        machine = NoisyMachine(seed)
        baseline = Measure.of([ratio(machine, monkeypatch, 1.5e-4) for _ in range(5)])
        for _ in range(3):
            same = compare_measure("ratio", "x", baseline, ratio(machine, monkeypatch, 1.5e-4), limits)
            assert same.verdict is Verdict.OK
        # The best of three attempts is what the gate judges by.
        slower = min(ratio(machine, monkeypatch, 1.2 * 1.5e-4) for _ in range(3))
        assert compare_measure("ratio", "x", baseline, slower, limits).verdict is Verdict.WORSE


def test_contenders_take_turns_and_preparing_is_not_timed(monkeypatch):
    machine = NoisyMachine(0)
    monkeypatch.setattr(interleaved, "time", machine)
    order = []

    def step(name, seconds):
        def run():
            order.append(name)
            machine.now += seconds

        return run

    def prepare():
        order.append("prepare")
        machine.now += 5.0

    contest = {"a": Contender(run=step("a", 1.0)), "b": Contender(run=step("b", 2.0), prepare=prepare)}
    times = interleave(contest, blocks=2, turns=2)
    assert order == ["a", "prepare", "b"] * 4
    assert times.blocks == {"a": (1.0, 1.0), "b": (2.0, 2.0)}
    assert times.ratio("b", "a") == 2.0
    assert times.seconds("b") == 2.0


def test_a_block_counts_by_its_fastest_call_and_the_run_by_its_middle_block(monkeypatch):
    machine = NoisyMachine(0)
    monkeypatch.setattr(interleaved, "time", machine)
    seconds = iter([3.0, 2.0, 9.0, 8.0, 4.0, 5.0])

    def run():
        machine.now += next(seconds)

    times = interleave({"a": Contender(run=run)}, blocks=3, turns=2)
    assert times.blocks["a"] == (2.0, 8.0, 4.0)
    assert Times({"a": (2.0, 8.0, 4.0), "b": (1.0, 1.0, 4.0)}).ratio("a", "b") == 2.0


@pytest.mark.parametrize(("blocks", "turns"), [(0, 1), (1, 0)])
def test_nothing_to_time_is_refused(blocks, turns):
    with pytest.raises(ValueError, match="blocks and turns must be at least 1"):
        interleave({}, blocks=blocks, turns=turns)
