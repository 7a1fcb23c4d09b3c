"""A whole generation as one recorded graph: one launch, nothing that a conditional body forbids, the same tokens."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from draftgraph import Engine, SamplingParams
from draftgraph.graphs import HostExecutor, Program
from draftgraph.graphs.driver.protocol import ALLOWED_IN_BODY, NodeKind
from draftgraph.graphs.driver.recording import RecordingDriver
from draftgraph.graphs.loop_graph import LoopGraph, build_loop_graph

PROMPTS = ["one two three, one two three, one", "The steam engine", "你好，世界。" * 3]
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
GREEDY = SamplingParams(max_tokens=40)
SAMPLED = SamplingParams(max_tokens=40, temperature=0.9, top_p=0.9, seed=5, ignore_eos=True)


class RecordedExecutor:
    """Runs every program as one launch of its recorded graph."""

    name = "recorded"

    def __init__(self, has_switch: bool) -> None:
        self.driver = RecordingDriver(has_switch=has_switch)
        self.loops: list[LoopGraph] = []

    def run(self, program: Program) -> None:
        self._launch(program)

    def rounds(self, program: Program) -> Generator[None, None, None]:
        self.loops.append(self._launch(program))
        yield

    def _launch(self, program: Program) -> LoopGraph:
        state, driver = program.state, self.driver
        captured = {s: driver.record_call(s.name, lambda s=s: s.fn(state)) for s in program.steps()}
        built = build_loop_graph(driver, program, captured)
        driver.launch(driver.instantiate(built.graph), None)
        return built


def generate(path, spec, params, batch, executor=None):
    with Engine.from_pretrained(
        path, spec, dtype="float32", max_batch_size=batch, compile=False, max_model_len=512
    ) as engine:
        assert isinstance(engine._core._executor, HostExecutor)
        if executor is not None:
            engine._core._executor = executor
        results = engine.generate(PROMPTS[:batch], params)
    return [(r.token_ids, r.finish_reason, r.metrics.accepted_tokens) for r in results]


@pytest.mark.parametrize("has_switch", [True, False], ids=["switch", "if chain"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("rule", "params"),
    [("standard", GREEDY), ("coupled", SAMPLED), ("standard", SAMPLED)],
    ids=["greedy", "coupled", "standard"],
)
def test_tokens_equal_the_host_executors(tiny_model_path, rule, params, batch, has_switch):
    spec = {**NGRAM, "rejection_sample_method": rule}
    executor = RecordedExecutor(has_switch)
    results = generate(tiny_model_path, spec, params, batch, executor)
    assert results == generate(tiny_model_path, spec, params, batch)
    assert any(accepted for _, _, accepted in results)
    if batch == 1:
        assert len(executor.loops) == 1, "the answer takes one launch"


@pytest.mark.parametrize("has_switch", [True, False], ids=["switch", "if chain"])
def test_structure_of_an_ngram_generation(tiny_model_path, has_switch):
    executor = RecordedExecutor(has_switch)
    generate(tiny_model_path, NGRAM, GREEDY, 1, executor)
    report = executor.loops[0].report
    assert set(report.nodes) <= ALLOWED_IN_BODY
    # propose, budget, verify[4], verify[8], accept, commit
    assert report.steps == report.nodes[NodeKind.CHILD_GRAPH] == 6
    assert report.depth == 2
    assert report.nodes[NodeKind.CONDITIONAL] == (2 if has_switch else 3)
    assert report.nodes[NodeKind.KERNEL] == 6 + 2 + (1 if has_switch else 2)
    assert [line.strip() for line in report.structure[:4]] == [
        "set while",
        "WHILE:",
        "propose: 1 kernel",
        "budget: 1 kernel",
    ]
