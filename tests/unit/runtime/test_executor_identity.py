"""The executors give the same tokens: the host's, and those of captured graphs, whose graphs a recording driver runs.

On the `worker` variants launches run on a thread of their own, so that the host really reads, pauses and cancels while
a loop runs.
"""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from draft_models import save_noisy_copy
from worker_device import WorkerExecutor

from draftgraph import Engine, SamplingParams
from draftgraph.graphs import HostExecutor, Program, verify_widths
from draftgraph.graphs.driver.protocol import ALLOWED_IN_BODY
from draftgraph.graphs.recording_capture import recorded_executor
from draftgraph.graphs.round_executor import take_apart
from draftgraph.runtime.adaptive import AdaptiveBudget, BucketCosts, CostTable
from draftgraph.runtime.engine_config import EngineConfig
from draftgraph.runtime.loading import build_core, load_target
from draftgraph.runtime.speculative_config import SpeculativeConfig
from draftgraph.runtime.speculators.draft_model import DraftModelSpeculator

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
DRAFT_MODEL = {"method": "draft_model", "num_speculative_tokens": 3, "model": "a noisy copy"}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 4}
BY_ROWS = [[1, 1, 3], [2, 2, 0], [3, 4, 1]]
ADAPTIVE = {"enable_adaptive_verification": True}
COUPLED = {"rejection_sample_method": "coupled"}
SPECS = {
    "plain": {"method": "none"},
    "ngram": NGRAM,
    # Without the global tree: when other requests enter it depends on the executor, and under "standard" the drafts do
    # on it, and a sampled text on the drafts.
    "suffix": {**SUFFIX, "suffix_decoding_max_cached_requests": 0},
    "layerskip": {"method": "layerskip", "num_speculative_tokens": 4, "exit_layer": 1},
    "custom": {"method": "custom", "num_speculative_tokens": 4, "speculator": "small_speculators:Successor"},
    "ensemble": {**NGRAM, "method": ["ngram", "layerskip"], "exit_layer": 1},
    "plain coupled": {"method": "none", "rejection_sample_method": "coupled"},
    "ngram coupled": {**NGRAM, "rejection_sample_method": "coupled"},
    "suffix coupled": {**SUFFIX, "rejection_sample_method": "coupled"},
    "ngram block": {**NGRAM, "rejection_sample_method": "block"},
    "ngram synthetic": {
        **NGRAM,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [0.9, 0.7, 0.5, 0.3],
    },
    "draft_model": DRAFT_MODEL,
    "draft_model probabilistic": {**DRAFT_MODEL, "draft_sample_method": "probabilistic"},
    # Under "standard" a sampled text depends on the drafts, and here those on the neighbours.
    "draft_model by rows": {
        **DRAFT_MODEL,
        **COUPLED,
        "num_speculative_tokens_per_batch_size": BY_ROWS,
    },
    "ngram adaptive": {**NGRAM, **ADAPTIVE, **COUPLED},
    "draft_model adaptive": {**DRAFT_MODEL, **ADAPTIVE, **COUPLED},
    "layerskip adaptive": {"method": "layerskip", "num_speculative_tokens": 4, "exit_layer": 1, **ADAPTIVE, **COUPLED},
    "draft_model adaptive probabilistic": {**DRAFT_MODEL, **ADAPTIVE, "draft_sample_method": "probabilistic"},
}


def costs_of(config: EngineConfig) -> CostTable:
    """Made up, so that nothing depends on the clock: verifying a wide window costs much, and drafting something."""
    depth = config.speculative.num_speculative_tokens
    found = {}
    for bucket in config.buckets:
        widths = verify_widths(bucket, depth)
        draft = [0.2 + 0.1 * step * bucket for step in range(depth + 1)]
        found[bucket] = BucketCosts.of([1 + 0.02 * width for width in widths], draft)
    return CostTable.of(found)


GREEDY = SamplingParams(max_tokens=24, seed=3)  # a seed decides which drafts "synthetic" accepts
SAMPLED = SamplingParams(max_tokens=20, temperature=0.9, top_p=0.95, seed=5)
PROMPTS = [
    "one two three, one two three, one",
    "The steam engine",
    "def add(a, b):\n    return",
    "The steam engine changed how people worked. " * 8,
    "a",
]
ALONE = {"draft_model adaptive probabilistic": {"max_batch_size": 1, "prompts": PROMPTS[:2]}}
"""Where drafts depend on the neighbours, and the text on the drafts, rows have none in the test of sampled text."""
CAPTURED = ["round", "loop"]


@contextlib.contextmanager
def engine_with(path, executor, spec, *, ring=None, rounds_per_launch=None, **options):
    """An engine on `executor`, which is made by the test."""
    options = {"max_batch_size": 4, "max_model_len": 256, "compile": False, "dtype": "float32", **options}
    if spec.get("model") == DRAFT_MODEL["model"]:
        draft_path = path.parent / "noisy copy for the executors"
        spec = {**spec, "model": str(draft_path)}
        if not draft_path.exists():
            save_noisy_copy(path, draft_path, 0.25)
    config = EngineConfig(speculative=SpeculativeConfig.parse(spec), **options)
    target = load_target(path, config, None)
    costs = costs_of(config) if config.speculative.enable_adaptive_verification else None
    core = build_core(target, config, executor=executor, ring=ring, rounds_per_launch=rounds_per_launch, costs=costs)
    with Engine(target, core, config) as engine:
        yield engine
    if isinstance(executor, WorkerExecutor):
        executor.close()


def make(name: str):
    kind, _, worker = name.partition(" ")
    if kind == "host":
        return HostExecutor()
    return WorkerExecutor(kind) if worker else recorded_executor(kind)


ALL = [*CAPTURED, *(f"{name} worker" for name in CAPTURED)]


def outcomes(path, name, spec, params, prompts=PROMPTS, **options):
    with engine_with(path, make(name), spec, **options) as engine:
        results = engine.generate(prompts, params)
        alone = engine.generate(prompts[0], params)
        if name.startswith("loop"):
            check_loops(engine)
    return [(r.token_ids, r.finish_reason, r.text) for r in [*results, alone]]


def check_loops(engine) -> None:
    """What the recorded loops are made of."""
    executor = engine._core._executor
    executor = getattr(executor, "inner", executor)
    loops = [program for program, _ in executor._built.values() if program.name.startswith("round")]
    assert loops
    for program in loops:
        assert set(executor.structure(program).nodes) <= ALLOWED_IN_BODY


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_same_tokens_in_every_bucket(tiny_model_path, spec, params):
    """Five requests over four slots: rows join and leave, and the last runs alone in the smallest bucket."""
    alone = ALONE.get(spec, {})
    wanted = outcomes(tiny_model_path, "host", SPECS[spec], params, **alone)
    assert {reason for _, reason, _ in wanted} <= {"stop", "length"}
    for name in ALL:
        assert outcomes(tiny_model_path, name, SPECS[spec], params, **alone) == wanted, name


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("limits", [{"ring": 5}, {"rounds_per_launch": 1}, {"ring": 7, "rounds_per_launch": 3}])
def test_small_rings_and_short_launches_lose_nothing(tiny_model_path, name, limits):
    """With plain decoding a round follows the last one without waiting, and must not overwrite a full ring."""
    for spec in ("plain", "ngram"):
        wanted = outcomes(tiny_model_path, "host", SPECS[spec], GREEDY, PROMPTS[:3], max_batch_size=2)
        found = outcomes(tiny_model_path, name, SPECS[spec], GREEDY, PROMPTS[:3], max_batch_size=2, **limits)
        assert found == wanted


@pytest.mark.parametrize("name", ALL)
def test_stop_tokens_and_limits_inside_a_window(tiny_model_path, name):
    with engine_with(tiny_model_path, make("host"), NGRAM) as engine:
        free = engine.generate(PROMPTS[3], SamplingParams(max_tokens=40, ignore_eos=True))
        assert free.metrics.accepted_tokens >= 10, "the windows would be too short"
        cases = [SamplingParams(max_tokens=n, ignore_eos=True) for n in range(1, 12)]
        cases += [
            SamplingParams(max_tokens=40, ignore_eos=True, stop_token_ids=[t]) for t in sorted(set(free.token_ids))[:6]
        ]
        cases.append(SamplingParams(max_tokens=40, ignore_eos=True, stop=[free.text[len(free.text) // 2 :][:3]]))
        wanted = [engine.generate(PROMPTS[3], case) for case in cases]
    with engine_with(tiny_model_path, make(name), NGRAM) as engine:
        found = [engine.generate(PROMPTS[3], case) for case in cases]
    for one, other in zip(found, wanted, strict=True):
        assert (one.token_ids, one.finish_reason, one.stop_reason) == (
            other.token_ids,
            other.finish_reason,
            other.stop_reason,
        )
        assert len(one.token_ids) < 40


@pytest.mark.parametrize("name", ALL)
def test_streams_that_are_left_early_and_their_neighbours(tiny_model_path, name):
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    with engine_with(tiny_model_path, make("host"), NGRAM, max_batch_size=2) as engine:
        wanted = [engine.generate(prompt, params).token_ids for prompt in PROMPTS[:3]]
    with engine_with(tiny_model_path, make(name), NGRAM, max_batch_size=2) as engine:
        left = engine.stream(PROMPTS[0], params)
        stays = engine.stream(PROMPTS[1], params)
        some = [token for chunk in itertools.islice(left, 3) for token in chunk.token_ids]
        begun = [token for chunk in itertools.islice(stays, 1) for token in chunk.token_ids]
        left.close()
        rest = [token for chunk in stays for token in chunk.token_ids]
        after = engine.generate(PROMPTS[2], params).token_ids
    assert tuple(some) == wanted[0][: len(some)]
    assert (*begun, *rest) == wanted[1]
    assert after == wanted[2]


@pytest.mark.parametrize("name", ALL)
def test_logprobs_and_metrics_do_not_depend_on_the_executor(tiny_model_path, name):
    params = SamplingParams(max_tokens=16, logprobs=2, ignore_eos=True)
    results = []
    for executor in ("host", name):
        with engine_with(tiny_model_path, make(executor), NGRAM, metrics="detailed", max_batch_size=2) as engine:
            results.append(engine.generate(PROMPTS[:2], params))
    for one, other in zip(*results, strict=True):
        assert one.logprobs == other.logprobs
        assert one.metrics.acceptance_histogram == other.metrics.acceptance_histogram
        assert one.metrics.round_pairs == other.metrics.round_pairs


def test_exact_runs_at_one_width_without_a_switch(tiny_model_path):
    wanted = outcomes(tiny_model_path, "host", NGRAM, GREEDY, PROMPTS[:3], exact=True)
    for name in ALL:
        assert outcomes(tiny_model_path, name, NGRAM, GREEDY, PROMPTS[:3], exact=True) == wanted
    with engine_with(tiny_model_path, make("round"), NGRAM, exact=True) as engine:
        loops = [program for program in engine._core.programs() if program.name.startswith("round")]
        assert [take_apart(program).stages for program in loops] == [()]


def test_a_whole_greedy_ngram_answer_is_one_launch(tiny_model_path):
    executor = recorded_executor("loop")
    with engine_with(tiny_model_path, executor, NGRAM, max_batch_size=1) as engine:
        report = engine.warmup()
        assert executor.driver.launches == 0
        result = engine.generate([5], SamplingParams(max_tokens=50, ignore_eos=True))  # no token to prefill
        assert len(result.token_ids) == 50
        assert result.metrics.rounds > 10
        assert executor.driver.launches == 1
        check_loops(engine)
        assert engine.warmup() == report, "nothing was left to capture"
        assert "round[1] verify[8]" in report.table()


# What executors ask of programs


def touched(engine) -> dict[str, torch.Tensor]:
    """Every tensor of an engine that outlives a step."""
    core = engine._core
    tensors = dict(core.state.tensors())
    tensors |= {f"cache {name}": tensor for name, tensor in core._builder._cache._asdict().items()}
    if isinstance(core._speculator, DraftModelSpeculator):  # the rest of what it has is made anew by every propose
        tensors |= {f"cache of the drafter {name}": part for name, part in core._speculator._cache._asdict().items()}
    else:
        for name, value in vars(core._speculator or object).items():
            if isinstance(value, torch.Tensor) and name not in ("_last", "_carried"):  # made anew by every propose
                tensors[f"speculator {name}"] = value
    if isinstance(core.budget, AdaptiveBudget):
        kept = ("forecast", "rounds", "_weights", "_sums")
        tensors |= {f"budget {name}": getattr(core.budget, name) for name in kept}
    if core._logprobs is not None:
        tensors |= {"logprobs": core._logprobs.values, "logprob tokens": core._logprobs.tokens}
    return tensors


def snapshot(engine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in touched(engine).items()}


def differing(engine, before: dict[str, torch.Tensor], scratch: frozenset[str] = frozenset()) -> list[str]:
    """What changed, but for the reserved slot of what is kept by slot, which nobody reads."""
    slots, changed = engine._core.state.shape.slots, []
    for name, tensor in touched(engine).items():
        old, axis = before[name], 1 if name.startswith("cache") else 0
        if tensor.shape[axis] == slots + 1:
            tensor, old = tensor.narrow(axis, 0, slots), old.narrow(axis, 0, slots)
        if name not in scratch and not torch.equal(tensor, old):
            changed.append(name)
    return changed


@contextlib.contextmanager
def engine_under_way(path, spec, executor=None, **options):
    """An engine in the middle of two answers, out of the loop, with log-probabilities."""
    options = {"metrics": "detailed", "max_batch_size": 2, "rounds_per_launch": 1, **options}
    with engine_with(path, executor or HostExecutor(), spec, **options) as engine:
        params = SamplingParams(max_tokens=60, ignore_eos=True, logprobs=1, temperature=0.5, seed=1)
        streams = [engine.stream(prompt, params) for prompt in PROMPTS[:2]]
        for stream in streams:
            next(stream)
        for _ in range(4):
            engine._core.step()
        assert len(engine._core._scheduler.decoding) == 2
        engine._core._leave_loop()
        yield engine


def all_programs(engine) -> list[Program]:
    core = engine._core
    return [*core.programs(), *(core._program("round", bucket, True) for bucket in core.plan.buckets)]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("executor", ["host", *CAPTURED])
def test_preparing_any_program_in_the_middle_of_an_answer_changes_nothing(tiny_model_path, spec, executor):
    with engine_under_way(tiny_model_path, SPECS[spec], make(executor)) as engine:
        before = snapshot(engine)
        fresh = make(executor)  # which has prepared nothing
        for program in all_programs(engine):
            fresh.prepare(program)
        assert differing(engine, before) == []
        assert any(torch.any(tensor != 0) for name, tensor in before.items() if name.startswith("cache"))


SCRATCH = frozenset(
    {
        "draft_tokens",
        "draft_count",
        "confidence",
        "accepted",
        "emitted",
        "failed",
        "cu_tokens",
        "base",
        "window_tokens",
        "window_positions",
        "window_slots",
        "window_rows",
        "width_index",
        "logits",
        "sampled",
        "log_normalizer",
        "threshold",
        "token_failed",
    }
)
"""What a round makes anew before it reads it."""


def run_steps(steps, state) -> None:
    with torch.inference_mode():
        for step in steps:
            step.fn(state)


@pytest.mark.parametrize("spec", SPECS)
def test_a_body_run_while_its_flag_is_false_changes_nothing_that_matters(tiny_model_path, spec):
    """With unfinished rows: the host had asked for a pause, say. What it writes past a row's end is written anew."""
    with engine_under_way(tiny_model_path, SPECS[spec]) as engine:
        state = engine._core.state
        for program in all_programs(engine):
            if program.name != "round[2]":
                continue
            parts = take_apart(program)
            drafts = [step for stage in parts.stages[:-1] for step in (*stage.branches[0], *stage.after)]
            state.running.fill_(True)
            run_steps((*parts.before, *drafts), state)  # a speculator may take note of what was committed; once
            state.running.fill_(False)
            before = snapshot(engine)
            for verifying in parts.stages[-1:]:
                for branch in verifying.branches[int(state.width_index) :] or ((),):  # those that hold the window
                    run_steps((*parts.before, *drafts, *branch, *verifying.after), state)
            if not parts.stages:  # plain decoding: the whole body lies before
                run_steps(parts.before, state)
            changed = set(differing(engine, before, SCRATCH))
            caches = {name for name in before if name.startswith("cache")}
            assert changed <= {*caches, "logprobs", "logprob tokens"}
            length = state.length.tolist()
            for slot in range(state.shape.slots):
                kept = length[slot] - 1  # the anchor's KV is not written yet
                for name, tensor in engine._core._builder._cache._asdict().items():
                    old = before[f"cache {name}"]
                    assert torch.equal(tensor[:, slot, :, :kept], old[:, slot, :, :kept])
                for name, tensor in (("logprobs", engine._core._logprobs.values),):
                    assert torch.equal(tensor[slot, : length[slot]], before[name][slot, : length[slot]])


@pytest.mark.parametrize("spec", SPECS)
def test_what_comes_before_the_switch_may_run_again(tiny_model_path, spec):
    with engine_under_way(tiny_model_path, SPECS[spec]) as engine:
        state = engine._core.state
        for program in all_programs(engine):
            if not program.name.startswith("round"):
                continue
            parts = take_apart(program)
            run_steps(parts.before, state)
            before = snapshot(engine)
            run_steps(parts.before, state)
            assert differing(engine, before) == []
