"""What profiling costs, and whether its times add up, on SmolLM2-135M in bfloat16.

pytest tests/bench/test_profiling.py --benchmark-enable -s
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
import torch

from draftgraph import Engine, SamplingParams
from draftgraph.graphs import DecodeState, HostExecutor, Program, Sequence, StateShape, Step, Switch, While
from draftgraph.profiling import Observer, StepTimer, phase_seconds, total_calls, total_seconds
from draftgraph.profiling.nvtx_ranges import NvtxRanges
from draftgraph.runtime.cli_demo import PROMPT

pytestmark = [pytest.mark.bench, pytest.mark.models]

ROUNDS, SAMPLES = 2000, 9


@pytest.fixture(scope="module")
def table(smollm2_path):
    """The step table of one answer of 48 tokens."""
    timer = StepTimer("cpu")
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    speculation = {"method": "ngram", "num_speculative_tokens": 8}
    options = {"dtype": "bfloat16", "max_batch_size": 1, "max_model_len": 1024, "prefix_caching": False}
    with Engine.from_pretrained(smollm2_path, speculation, **options) as engine:
        engine.warmup()
        engine.generate(PROMPT, params)
        with engine.observe(timer):
            engine.generate(PROMPT, params)
    return timer.table()


def test_phase_times_sum_to_the_time_of_the_rounds(table):
    phases, whole = phase_seconds(table), total_seconds(table)
    share = sum(phases.values()) / whole
    print(f"\nphases: { {name: round(seconds * 1e3, 2) for name, seconds in phases.items()} } ms")
    print(f"together {share:.2%} of {whole * 1e3:.1f} ms in {total_calls(table)} rounds")
    assert set(phases) == {"propose", "budget", "verify", "accept", "commit"}
    assert 0.95 <= share <= 1.0


def walk(program: Program) -> None:
    """The rounds of an executor that knows of no observers."""

    def run(node) -> None:
        match node:
            case Step():
                node.fn(program.state)
            case Sequence():
                for child in node.nodes:
                    run(child)
            case Switch():
                index = int(node.index)
                if 0 <= index < len(node.branches):
                    run(node.branches[index])

    while bool(program.root.flag):
        with torch.inference_mode():
            run(program.root.body)


def seconds_per_round(run: Callable[[Program], object]) -> float:
    """The host's own time for a round whose steps do nothing."""
    shape = StateShape(slots=1, context=8, num_drafts=1, vocab_size=8, max_bucket=1, max_width=4)
    state = DecodeState.allocate(shape, dtype=torch.float32, device="cpu")
    left = [0]

    def nothing(s: DecodeState) -> None:
        pass

    def count(s: DecodeState) -> None:
        left[0] -= 1
        if left[0] == 0:
            s.running.fill_(False)

    verify = Switch(state.width_index, (Step("verify[4]", nothing), Step("verify[8]", nothing)))
    names = (Step("propose", nothing), Step("budget", nothing), verify, Step("accept", nothing), Step("commit", count))
    program = Program("round[1]", While(state.running, Sequence(*names)), state)
    left[0] = ROUNDS
    state.running.fill_(True)
    start = time.perf_counter()
    run(program)
    return (time.perf_counter() - start) / ROUNDS


def with_observer(observer: Observer | None) -> Callable[[Program], object]:
    return lambda program: list(HostExecutor(observer).rounds(program))


def test_profiling_that_is_off_costs_under_one_percent_of_a_round(benchmark, table):
    """Off, and also as NVTX ranges without a tool that listens."""
    benchmark.pedantic(seconds_per_round, args=(with_observer(None),), rounds=1)
    round_seconds = total_seconds(table) / total_calls(table)
    kinds = {
        "none": walk,
        "off": with_observer(None),
        "nvtx, no tool": with_observer(NvtxRanges()),
        "timer": with_observer(StepTimer("cpu")),
    }
    samples: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(SAMPLES):
        for name, run in kinds.items():
            samples[name].append(seconds_per_round(run))
    least = statistics.median(samples["none"])
    costs = {name: (statistics.median(times) - least) / round_seconds for name, times in samples.items()}
    print(f"\na round takes {round_seconds * 1e3:.2f} ms; of it: { {n: f'{c:.4%}' for n, c in costs.items()} }")
    benchmark.extra_info.update(costs)
    assert costs["off"] < 0.01
    assert costs["nvtx, no tool"] < 0.01
