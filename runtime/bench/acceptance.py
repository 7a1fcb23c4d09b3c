"""How many drafts every method has accepted, and nothing else: many prompts at once, one method after another."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..engine import Engine
from ..models import model_source
from ..progress import ProgressCallback
from .engine_contender import EngineContender, LoadEngine
from .options import BenchOptions
from .records import Pass
from .report import Figures, MethodReport, method_reports
from .runner import Measurements, make_groups
from .session import Bench
from .tables import number, percent, positions

SCHEMA = "draftgraph-acceptance"
SCHEMA_VERSION = 1
ROWS = 8
"""Prompts that are answered at once unless the options say otherwise."""
UNBOUNDED = 7 * 24 * 3600.0
"""Seconds of an answer, a week: what is not timed is not cut off, so that a slow machine counts the same."""


@dataclass(frozen=True, kw_only=True)
class AcceptanceReport:
    """What was seen, method by method. Its times mean nothing, and are left out."""

    created: str
    """When, as ISO 8601."""
    settings: Mapping[str, Any]
    methods: tuple[MethodReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """The JSON document."""
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "created": self.created,
            "settings": dict(self.settings),
            "methods": [
                {
                    "name": one.method.name,
                    "config": dict(one.method.config),
                    "by_set": {name: _without_times(figures) for name, figures in one.by_set.items()},
                }
                for one in self.methods
            ],
        }

    def show(self, console: Console) -> None:
        """Prints a table per prompt set."""
        for name in dict.fromkeys(name for one in self.methods for name in one.by_set):
            table = Table(title=name)
            for heading in ("", "prompts", "failed", "tokens", "tokens per round", "drafts accepted"):
                table.add_column(heading, justify="left" if not heading else "right")
            table.add_column("... at position 1, 2, ...")
            for one in self.methods:
                figures = one.by_set[name]
                table.add_row(
                    escape(one.method.name),
                    str(figures.answers),
                    str(figures.failed + figures.timeouts),
                    str(figures.output_tokens),
                    number(figures.tokens_per_round, ".3f"),
                    percent(figures.acceptance_rate),
                    positions(figures.acceptance_by_position),
                )
            console.print(table)
        failed = [answer for one in self.methods for answer in one.answers if answer.status != "ok"]
        for answer in failed:
            console.print(f"{answer.prompt_set}/{answer.prompt}: {answer.error}", markup=False, soft_wrap=True)


def measure_acceptance(
    ready: Bench, progress: ProgressCallback, load_engine: LoadEngine = Engine.from_pretrained
) -> AcceptanceReport:
    """Has every method answer every prompt once, as many at a time as there are rows.

    Plain decoding does not take part. Greedy texts do not depend on how many are answered at once, up to rounding.
    """
    options, engine_options = (
        ready.options,
        {**ready.engine_options, "batch_buckets": (ready.options.load.concurrency,)},
    )
    reports: list[MethodReport] = []
    for config in options.speculative:
        contender = EngineContender.load(load_engine, ready.path, config, options, engine_options, progress)
        try:
            passes = _answer_all(contender, ready, progress)
        finally:
            contender.close()
        measured = Measurements(passes=tuple(passes), steps={}, planned=len(passes))
        reports += method_reports([contender.method], measured, {})
    return AcceptanceReport(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        settings={"model": ready.model, "source": model_source(ready.path), **options.to_dict(), **engine_options},
        methods=tuple(reports),
    )


def _answer_all(contender: EngineContender, ready: Bench, progress: ProgressCallback) -> list[Pass]:
    """One pass per prompt set: whoever is answered together is of one set."""
    passes = []
    sets = dict.fromkeys(case.prompt_set for case in ready.cases)
    for name in sets:
        cases = [case for case in ready.cases if case.prompt_set == name]
        jobs = [job for group in make_groups(cases, contender.encode, ready.options) for job in group]
        answers = []
        for answer in contender.answer(jobs, ready.options.load):
            answers.append(answer)
            progress(len(answers), len(jobs), f"{contender.method.name}: {name}")
        passes.append(Pass(method=contender.method.name, answers=tuple(answers), seconds=0.0))
    return passes


def acceptance_options(**options: Any) -> BenchOptions:
    """Options of a bench that only counts: one repeat, and unless they are given several rows and no timeout."""
    return BenchOptions(
        **{"timeout": UNBOUNDED, **options, "concurrency": options.get("concurrency") or ROWS, "repeats": 1}
    )


def _without_times(figures: Figures) -> dict[str, Any]:
    kept: Sequence[str] = (
        "answers",
        "failed",
        "timeouts",
        "output_tokens",
        "tokens_per_round",
        "acceptance_rate",
        "acceptance_by_position",
    )
    document = figures.to_dict()
    return {name: document[name] for name in kept}
