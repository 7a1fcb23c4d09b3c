"""The report as tables on the terminal; `rows` also serves the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .records import Method
from .report import BenchReport, Figures, MethodReport, Spread

NOTHING = "-"
_LABEL_WIDTH, _CELL_WIDTH = 26, 18
"""Characters of the terminal that a row's label and one method take."""


def rows(reports: Sequence[MethodReport], *, rounding_may_differ: bool) -> list[tuple[str, list[str]]]:
    """The main table: a label, and one cell per method."""

    def each(cell: Callable[[Figures], str]) -> list[str]:
        return [cell(report.overall) for report in reports]

    phases = phases_of(reports)
    return [
        ("output tokens/s", each(lambda f: number(f.tokens_per_second, ".1f"))),
        ("speed-up against plain", each(lambda f: number(f.speed_up, ".2f", " x"))),
        *_against_peer([report.overall for report in reports], ""),
        ("tokens per round", each(lambda f: number(f.tokens_per_round, ".2f"))),
        ("drafts accepted", each(lambda f: percent(f.acceptance_rate))),
        ("... at position 1, 2, ...", each(lambda f: positions(f.acceptance_by_position))),
        ("first token", each(lambda f: spread(f.time_to_first_token))),
        ("between tokens", each(lambda f: spread(f.token_latency))),
        ("between bursts", each(lambda f: spread(f.burst_latency))),
        ("whole answer", each(lambda f: spread(f.latency))),
        *((f"step {phase}", [_phase(report, phase) for report in reports]) for phase in phases),
        ("round, in steps", [_round(report) for report in reports]),
        ("bytes moved at least", each(lambda f: number(f.gigabytes_per_second, ".1f", " GB/s"))),
        ("of the device's limit", each(lambda f: percent(f.share_of_limit))),
        ("memory held / peak", [f"{size(r.held_memory)} / {size(r.peak_memory)}" for r in reports]),
        ("answers", each(lambda f: str(f.answers))),
        ("failed", each(lambda f: str(f.failed))),
        ("timed out", each(lambda f: str(f.timeouts))),
        ("same text as plain", [identity(r, rounding_may_differ=rounding_may_differ) for r in reports]),
    ]


def phases_of(reports: Sequence[MethodReport]) -> list[str]:
    """Every step that any method has, in the order of a round: the method with most steps sets it."""
    timed = sorted((one.steps for one in reports if one.steps is not None), key=lambda one: -len(one.phase_seconds))
    return list(dict.fromkeys(name for steps in timed for name in steps.phase_seconds))


def set_rows(reports: Sequence[MethodReport]) -> list[tuple[str, list[str]]]:
    """The table by prompt set: speed and acceptance."""
    found = []
    for name in dict.fromkeys(name for report in reports for name in report.by_set):
        figures = [report.by_set[name] for report in reports]
        found += [
            (f"{name}: output tokens/s", [number(f.tokens_per_second, ".1f") for f in figures]),
            (f"{name}: speed-up", [number(f.speed_up, ".2f", " x") for f in figures]),
            *_against_peer(figures, f"{name}: "),
            (f"{name}: tokens per round", [number(f.tokens_per_round, ".2f") for f in figures]),
            (f"{name}: accepted at 1, 2, ...", [positions(f.acceptance_by_position) for f in figures]),
        ]
    return found


def _against_peer(figures: Sequence[Figures], label: str) -> list[tuple[str, list[str]]]:
    """The row of speed-ups against a peer, if there is one."""
    cells = [number(one.speed_up_against_peer, ".2f", " x") for one in figures]
    return [] if all(cell == NOTHING for cell in cells) else [(f"{label}speed-up against the plain peer", cells)]


def failures(reports: Sequence[MethodReport]) -> list[str]:
    """One line for every answer that failed or timed out."""
    return [
        f"{report.method.name}, {answer.prompt_set}/{answer.prompt}, repeat {answer.repeat + 1}: "
        f"{answer.status}: {answer.error}"
        for report in reports
        for answer in report.answers
        if answer.status != "ok"
    ]


def notes(report: BenchReport) -> list[str]:
    """What a reader must know beside the figures."""
    settings = report.settings
    found = []
    if report.partial:
        found.append("PARTIAL: it was interrupted; the figures are of what was measured until then.")
    for name in report.broken_promises():
        found.append(f"WRONG TEXT: {name} had to give the text of plain decoding, and did not.")
    for one in report.methods:
        if one.method.config.get("rejection_sample_method") == "synthetic":
            found.append(f"SYNTHETIC: {one.method.name} accepts drafts at given rates; its text is not the model's.")
    length = (
        "every answer goes on to its last token" if settings["ignore_eos"] else "answers end where the model ends them"
    )
    found.append(
        f"At most {settings['max_tokens']} tokens; {length}. Methods took turns on every prompt; "
        f"repeats: {settings['repeats']}."
    )
    found.append(
        "Waits are medians / 95th percentiles. Tokens of one burst come 0 ms apart. The times of the steps, per round, "
        "are from a replay through the host executor; all else is from runs without a timer."
    )
    if report.settings["peers"]:
        found.append("A peer's rounds are passes of its target, the one over the prompt included.")
    return found


def show(report: BenchReport, console: Console) -> None:
    """Prints the tables."""
    names = [one.method.name for one in report.methods]
    main = rows(report.methods, rounding_may_differ=report.rounding_may_differ)
    title = "partial result" if report.partial else "all prompts"
    # Side by side as many methods as stay readable; the others in further tables.
    most = max(2, (console.width - _LABEL_WIDTH) // _CELL_WIDTH)
    for heading, body in ((title, main), ("by prompt set", set_rows(report.methods))):
        for first in range(0, len(names), most):
            table = Table(title=heading)
            table.add_column("", overflow="fold")
            for name in names[first : first + most]:
                table.add_column(escape(name), justify="right", overflow="fold")
            for label, cells in body:
                table.add_row(*map(escape, (label, *cells[first : first + most])))
            console.print(table)
    for line in (*failures(report.methods), *notes(report)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def number(value: float | None, form: str, unit: str = "") -> str:
    """A number, or a dash."""
    return NOTHING if value is None else f"{value:{form}}{unit}"


def percent(value: float | None) -> str:
    """A share as a percentage, or a dash."""
    return NOTHING if value is None else f"{value:.0%}"


def positions(values: Sequence[float]) -> str:
    """Shares in percent, one after another."""
    return " ".join(f"{value * 100:.0f}" for value in values) + " %" if values else NOTHING


def milliseconds(seconds: float | None) -> str:
    """Milliseconds with three significant digits at least, or a dash."""
    if seconds is None:
        return NOTHING
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 or value == 0 else f"{value:.3f}"


def spread(value: Spread) -> str:
    """Median and 95th percentile in milliseconds."""
    if value.median is None:
        return NOTHING
    return f"{milliseconds(value.median)} / {milliseconds(value.p95)} ms"


def size(value: int | None) -> str:
    """Bytes as MB, 10^6 bytes."""
    return NOTHING if value is None else f"{value / 1e6:.0f} MB"


def identity(report: MethodReport, *, rounding_may_differ: bool) -> str:
    """Whether a method's texts were those of plain decoding, and what that means."""
    return verdict(report.method, report.overall, rounding_may_differ=rounding_may_differ)


def verdict(method: Method, figures: Figures, *, rounding_may_differ: bool) -> str:
    """The same of some of the prompts."""
    if not figures.compared_prompts:
        return NOTHING
    if not figures.different_prompts:
        return f"yes, all {figures.compared_prompts}"
    counts = f"{figures.different_prompts} of {figures.compared_prompts} differ"
    if method.engine != "draftgraph":
        return counts
    if not method.repeats_plain_text:
        return f"{counts}, by design"
    return f"{counts}: rounding" if rounding_may_differ else f"NO: {counts}"


def _phase(report: MethodReport, phase: str) -> str:
    steps = report.steps
    if steps is None or phase not in steps.phase_seconds:
        return NOTHING
    return f"{milliseconds(steps.phase_seconds[phase] / steps.rounds)} ms"


def _round(report: MethodReport) -> str:
    steps = report.steps
    if steps is None:
        return NOTHING
    return f"{milliseconds(steps.round_seconds / steps.rounds)} ms, {steps.accounted:.0%}"
