"""Who answers what, and when: every method in turn on the same prompts, so that drift of the machine hits all alike."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...profiling.memory import MemoryAccount
from ..progress import ProgressCallback
from .journal import Journal
from .options import BenchOptions, Load
from .records import Answer, Case, Job, Method, Pass, StepReport, refused


class Contender(Protocol):
    """A way of answering prompts."""

    @property
    def method(self) -> Method:
        """What it is called."""

    @property
    def memory(self) -> MemoryAccount:
        """What it holds, loading included; the runner charges it with what answering takes."""

    def replay(self, groups: Sequence[Sequence[Job]], load: Load) -> StepReport | None:
        """Answers the groups untimed, to warm up, and tells how long the steps of the rounds took, where it can."""

    def answer(self, jobs: Sequence[Job], load: Load) -> Iterator[Answer]:
        """Answers all jobs, and yields each answer as it ends. A job that fails gives an answer that says so.

        Closing the iterator, or an interrupt in it, drops the answers under way.
        """


class AbsentContender:
    """A contender that could not be loaded: every one of its answers fails, and says why."""

    def __init__(self, method: Method, error: str) -> None:
        self.method, self.memory = method, MemoryAccount("cpu")
        self._error = error

    def replay(self, groups: Sequence[Sequence[Job]], load: Load) -> StepReport | None:
        """Has nothing to warm up."""
        return None

    def answer(self, jobs: Sequence[Job], load: Load) -> Iterator[Answer]:
        """Fails every job."""
        for job in jobs:
            yield refused(job, self._error)


class Encode(Protocol):
    """Tokenises a case."""

    def __call__(self, case: Case) -> tuple[tuple[int, ...], str | None]:
        """The token ids of the prompt, or none and why it cannot be asked."""


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """What was measured, in the order in which it was."""

    passes: tuple[Pass, ...]
    steps: dict[str, StepReport]
    """By method; those that can tell."""
    planned: int
    """Passes that a whole bench has."""

    @property
    def partial(self) -> bool:
        """Whether it was interrupted."""
        return sum(one.complete for one in self.passes) < self.planned


def make_groups(cases: Sequence[Case], encode: Encode, options: BenchOptions) -> list[list[Job]]:
    """The jobs that are answered together, in order: one by one, or under load a whole prompt set at a time."""
    encoded = [(case, *encode(case)) for case in cases]
    groups: list[list[Job]] = []
    for repeat in range(options.repeats):
        jobs = [
            Job(case=case, prompt_ids=ids, error=error, repeat=repeat, seed=repeat * 10_000 + number)
            for number, (case, ids, error) in enumerate(encoded)
        ]
        if options.load.alone:
            groups += [[job] for job in jobs]
        else:
            sets = dict.fromkeys(case.prompt_set for case in cases)
            groups += [[job for job in jobs if job.case.prompt_set == name] for name in sets]
    return groups


def replay_groups(groups: Sequence[Sequence[Job]], load: Load) -> list[list[Job]]:
    """What the steps are timed on: of every prompt set the first prompts that can be asked, as many as run at once."""
    chosen: dict[str, list[Job]] = {}
    for job in (job for group in groups for job in group):
        jobs = chosen.setdefault(job.case.prompt_set, [])
        if job.repeat == 0 and job.error is None and len(jobs) < load.concurrency:
            jobs.append(job)
    return [jobs for jobs in chosen.values() if jobs]


def measure(
    contenders: Sequence[Contender],
    groups: Sequence[Sequence[Job]],
    load: Load,
    progress: ProgressCallback,
    journal: Journal | None = None,
) -> Measurements:
    """Has every contender replay some prompts under its step timer, then answer every group, in turn.

    Who begins changes from group to group. An interrupt (Ctrl-C) ends it; what was measured is kept. What the journal
    holds is not measured again.
    """
    planned = len(contenders) * len(groups)
    passes: list[Pass] = []
    steps: dict[str, StepReport] = {}
    closed = Load(concurrency=load.concurrency)
    try:
        for number, contender in enumerate(contenders):
            progress(number, len(contenders), "warming up and timing the steps")
            with contender.memory.watch():
                report = contender.replay(replay_groups(groups, load), closed)
            if report is not None:
                steps[contender.method.name] = report
        progress(len(contenders), len(contenders), "warming up and timing the steps")
        for number, jobs in enumerate(groups):
            first = number % len(contenders)
            for contender in (*contenders[first:], *contenders[:first]):
                progress(len(passes), planned, "measuring")
                kept = None if journal is None else journal.kept(number, contender.method.name)
                passes.append(kept or _pass(contender, jobs, load))
                if not passes[-1].complete:
                    raise KeyboardInterrupt
                if journal is not None and kept is None:
                    journal.keep(number, passes[-1])
        progress(planned, planned, "measuring")
    except KeyboardInterrupt:
        pass  # `partial` tells
    return Measurements(passes=tuple(passes), steps=steps, planned=planned)


def _pass(contender: Contender, jobs: Sequence[Job], load: Load) -> Pass:
    """Has one contender answer one group; after an interrupt the pass holds what was answered until then."""
    answers: list[Answer] = []
    complete = False
    started = time.perf_counter()
    try:
        with contender.memory.watch():
            started = time.perf_counter()
            for answer in contender.answer(jobs, load):
                answers.append(answer)
            seconds = time.perf_counter() - started
        complete = True
    except KeyboardInterrupt:
        seconds = time.perf_counter() - started
    return Pass(method=contender.method.name, answers=tuple(answers), seconds=seconds, complete=complete)
