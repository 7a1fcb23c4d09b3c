"""Measures what rounds cost, with the executor that will run them."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from ...graphs import DecodeState, Executor, Program, Step
from ...graphs.parking import parked
from .costs import BucketCosts, CostTable

REPLAYS = 7
"""Of each step; their median counts."""
_WARM_UPS = 2
_LEAST = 2e-3
"""Seconds between two looks at the device, so that the look is a small part of what is timed."""
_MOST_RUNS = 4
"""Of a step between two looks."""


def measure_costs(
    programs: Mapping[int, Program],
    widths: Mapping[int, Sequence[int]],
    state: DecodeState,
    executor: Executor,
    *,
    context: int,
    admit: Callable[[int], None],
) -> CostTable:
    """Times drafting by rows and verifying by width, in milliseconds.

    Every step of a bucket's program is run by itself again and again on rows of `context` tokens, which are all 0: that
    costs what any tokens cost. No request may be under way, since slots are written; the decode state is put back.

    Args:
        programs: the round of each bucket.
        widths: the verify widths of each bucket, ascending.
        state: of the engine.
        executor: runs the steps.
        context: committed tokens of a row, as far as the state has room for them and a round's.
        admit: tells the drafter that a slot has another request.
    """
    room = state.shape.context - state.shape.num_drafts - 1
    length = max(1, min(context, room))
    found = {}
    with parked(state):
        for bucket in sorted(programs):
            _fill_rows(state, bucket, length)
            for slot in range(bucket):
                admit(slot)
            found[bucket] = _measure_bucket(programs[bucket], widths[bucket], state, executor, bucket)
            state.finished.fill_(True)
    return CostTable.of(found)


def _fill_rows(state: DecodeState, bucket: int, length: int) -> None:
    state.slot_of_row[:bucket] = torch.arange(bucket, dtype=torch.int32, device=state.device)
    state.finished[:bucket] = False
    state.length[:bucket] = length
    state.limit[:bucket] = state.shape.context
    state.tokens[:bucket] = 0
    # So nothing that a round ends with has an effect; what drafters keep of a round is theirs to make anew.
    state.running.fill_(False)


def _measure_bucket(
    program: Program, widths: Sequence[int], state: DecodeState, executor: Executor, bucket: int
) -> BucketCosts:
    steps = {step.name: step for step in program.steps()}
    drafts = state.shape.num_drafts

    def cost(name: str) -> float:
        return _milliseconds(program, steps[name], state, executor)

    begun = cost("propose")
    by_depth = [begun] * (drafts + 1)
    for step in range(drafts):
        if f"draft[{step}]" in steps:
            by_depth[step + 1] = by_depth[step] + cost(f"draft[{step}]")
    around = cost("budget") + cost("commit")
    by_width = []
    for width in widths:
        _fill_windows(state, bucket, min(width, bucket * (drafts + 1)))
        by_width.append(around + cost(f"verify[{width}]") + cost("accept"))
    return BucketCosts.of(by_width, by_depth)


def _fill_windows(state: DecodeState, bucket: int, tokens: int) -> None:
    """So many window tokens, as equally shared among the rows as can be; rows that get none rest.

    The narrowest width of a large bucket has fewer tokens than the bucket has rows, when some of them are padding.
    """
    ends = torch.tensor([tokens * (row + 1) // bucket for row in range(bucket)], dtype=torch.int32)
    state.cu_tokens[0] = 0
    state.cu_tokens[1 : bucket + 1] = ends
    state.finished[:bucket] = ends.diff(prepend=ends.new_zeros(1)).to(state.device) == 0


def _milliseconds(program: Program, step: Step, state: DecodeState, executor: Executor) -> float:
    alone = Program(f"{program.name} {step.name}", step, state)

    def seconds(runs: int) -> float:
        bool(state.running)  # waits until the device is idle
        start = time.perf_counter()
        for _ in range(runs):
            executor.run(alone)
        bool(state.running)
        return (time.perf_counter() - start) / runs

    warm = [seconds(1) for _ in range(_WARM_UPS)][-1]
    runs = 1 if warm > _LEAST else _MOST_RUNS
    return 1e3 * statistics.median(seconds(runs) for _ in range(REPLAYS))


def costs_key(parts: Mapping[str, object]) -> str:
    """Names what a table was measured for: equal for equal parts."""
    text = "\n".join(f"{name}: {value}" for name, value in sorted(parts.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
