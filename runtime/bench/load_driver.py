"""Puts requests to an engine, one after another or several at a time, and takes down how each is answered."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..engine import Engine
from ..errors import RequestError
from ..outputs import GenerationResult, RequestMetrics
from ..stream import TokenStream
from .figures import bursts_of
from .options import BenchOptions, Load
from .records import Answer, Job, Status, one_line, refused


@dataclass(eq=False)
class _Live:
    """A request under way."""

    job: Job
    stream: TokenStream
    due: float
    """When it should have been put, on `time.perf_counter`'s clock; it may have been put later."""
    opened: float
    timed_out: bool = False
    error: str | None = None


def drive(engine: Engine, jobs: Sequence[Job], load: Load, options: BenchOptions) -> Iterator[Answer]:
    """Answers `jobs` in order under `load`, and yields each answer as it ends.

    Times count from when a request was due, so that a request which waits for its turn is not flattered. One thread
    does it all: an engine advances all of its requests when any of their streams is read. A timeout is seen between
    two rounds. Leaving the iterator cancels what is under way.
    """
    started = time.perf_counter()
    due = load.due_times(len(jobs), options.seed)
    waiting = deque((job, None if due is None else started + due[number]) for number, job in enumerate(jobs))
    live: list[_Live] = []
    try:
        while waiting or live:
            while waiting and _may_start(waiting[0][1], len(live), load):
                job, when = waiting.popleft()
                begun = _open(engine, job, time.perf_counter() if when is None else when, options)
                if isinstance(begun, Answer):
                    yield begun
                else:
                    live.append(begun)
            if live:
                _advance(live, options.timeout)
                for one in [one for one in live if _ended(one)]:
                    live.remove(one)
                    one.stream.close()
                    yield _answer(one)
            elif waiting and waiting[0][1] is not None:
                time.sleep(max(0.0, waiting[0][1] - time.perf_counter()))
    finally:
        for one in live:
            one.stream.close()


def _may_start(due: float | None, under_way: int, load: Load) -> bool:
    return under_way < load.concurrency if due is None else due <= time.perf_counter()


def _open(engine: Engine, job: Job, due: float, options: BenchOptions) -> _Live | Answer:
    if job.error is not None:
        return refused(job, job.error)
    opened = time.perf_counter()
    try:
        stream = engine.stream(job.prompt_ids, options.sampling(job.seed))
    except RequestError as error:
        return refused(job, str(error))
    return _Live(job, stream, due, opened)


def _advance(live: Sequence[_Live], timeout: float) -> None:
    """Lets the engine run until the oldest request has something new, and cuts off what took too long."""
    try:
        next(live[0].stream, None)
    except Exception as error:
        # The engine tells every request of the round that failed; it stays usable for the next ones.
        live[0].error = one_line(error)
    now = time.perf_counter()
    for one in live:
        if now - one.due > timeout and not _ended(one):
            one.timed_out = True
            one.stream.cancel()


def _ended(one: _Live) -> bool:
    return one.error is not None or one.stream.results[0] is not None


def _answer(one: _Live) -> Answer:
    result = one.stream.results[0]
    base = refused(one.job, one.error or "the engine gave no result")
    if result is None or result.metrics is None:
        return base
    status: Status = "ok"
    error = None
    if one.timed_out and result.finish_reason == "cancelled":
        status = "timeout"
        error = f"cut off after {time.perf_counter() - one.due:.1f} s with {len(result.token_ids)} tokens"
    elif result.finish_reason in ("error", "cancelled"):
        status, error = "failed", result.error or one.error or "the engine cancelled it"
    metrics, late = result.metrics, one.opened - one.due
    return Answer(
        prompt_set=base.prompt_set,
        prompt=base.prompt,
        repeat=base.repeat,
        status=status,
        error=error,
        finish_reason=result.finish_reason,
        prompt_tokens=len(result.prompt_token_ids),
        token_ids=result.token_ids,
        bursts=_bursts(result, metrics, late),
        latency=late + metrics.total_time,
        rounds=metrics.rounds,
        histogram=metrics.acceptance_histogram,
    )


def _bursts(result: GenerationResult, metrics: RequestMetrics, late: float) -> tuple[tuple[float, int], ...]:
    if not result.token_ids:
        return ()
    return bursts_of(late + metrics.time_to_first_token, metrics.inter_token_latencies)
