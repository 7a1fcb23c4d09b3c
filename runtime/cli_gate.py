"""`draftgraph gate`: has anything become slower, or larger, than it was?"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from .cli_support import EXIT_FAILED, DebugOption, readable_errors, standard_output
from .errors import ConfigError
from .output_files import check_output_file
from .progress import terminal_progress

if TYPE_CHECKING:
    from ..profiling.gate import Finding
    from .gate.run import GateReport


@readable_errors
def gate(
    update: Annotated[
        bool, typer.Option("--update", help="Measure a new baseline, show what it changes, and write it.")
    ] = False,
    baseline: Annotated[
        Path | None,
        typer.Option(
            help="The baseline file; by default this device's in profiling/baselines, or else another device's, "
            "of which only the counts are compared."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Compare counts only, and time nothing.")] = False,
    show_all: Annotated[bool, typer.Option("--all", help="Show every count, not only those that changed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, nothing else.")] = False,
    debug: DebugOption = False,
) -> None:
    """Compare this tree with a committed baseline, and fail if something got worse.

    Counts must be equal: nodes and kernels of each program, steps that a CUDA graph could not hold, matrix products of
    compiled regions, least bytes, rounds and accepted drafts of a fixed prompt. Of times, ratios within this run are
    compared: steps against a yardstick, speculation against plain decoding, compiled against eager, plain decoding
    against transformers; a ratio that is too large is measured again before it fails. Times themselves are compared
    only where the baseline is of this device and the machine is as fast as it was then.

    Exit code: 0 nothing got worse, 1 something did, 2 there is no usable baseline.
    """
    from .gate.run import choose_baseline, current_device, run_gate

    if update:
        if quick:
            raise ConfigError("--quick measures no times, and --update needs them: leave one of the two out")
        _update(baseline, as_json=as_json)
        return
    path = choose_baseline(baseline, current_device())
    with terminal_progress() as progress:
        report = run_gate(path, quick=quick, progress=progress)
    if as_json:
        typer.echo(json.dumps(report_document(report), indent=2))
    else:
        _show(standard_output(), report, show_all=show_all)
    if not report.passed:
        raise typer.Exit(EXIT_FAILED)


def _update(named: Path | None, *, as_json: bool) -> None:
    from ..profiling.baseline import Baseline, baseline_path
    from ..profiling.gate import differences
    from .gate.run import current_device, make_baseline

    path = named if named is not None else baseline_path(current_device())
    _check_writable(path)
    old = Baseline.load(path) if path.is_file() else None
    with terminal_progress() as progress:
        new, doubts = make_baseline(progress)
    new.save(path)
    findings = differences(old, new)
    if as_json:
        document = {"baseline": str(path), "device": new.device, "notes": doubts}
        typer.echo(json.dumps({**document, "findings": [_plain(finding) for finding in findings]}, indent=2))
        return
    console = standard_output()
    changed = [finding for finding in findings if finding.before != finding.now]
    for kind, title in (("count", "counts that changed"), ("ratio", "ratios"), ("seconds", "times")):
        rows = [finding for finding in changed if finding.kind == kind]
        if old is not None and rows:
            console.print(_table(title, rows))
    if old is None:
        console.print(_table("ratios", [finding for finding in findings if finding.kind == "ratio"]))
    for doubt in doubts:
        console.print(f"note: {doubt}", markup=False, highlight=False, soft_wrap=True)
    written = "written" if old is None else "replaced"
    console.print(
        f"{path} is {written}: {len(new.counts)} counts, {len(new.ratios)} ratios", highlight=False, soft_wrap=True
    )


def _check_writable(path: Path) -> None:
    """Refuses a baseline that could not be written, before anything is measured; makes its directory."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the baseline {str(path)!r} cannot be written: {error.strerror}") from None
    check_output_file("the baseline", path)


def report_document(report: GateReport) -> dict[str, object]:
    """The report in types that JSON has."""
    return {
        "passed": report.passed,
        "device": report.device,
        "baseline": str(report.baseline),
        "same_device": report.same_device,
        "notes": list(report.notes),
        "findings": [_plain(finding) for finding in report.findings],
    }


def _plain(finding: Finding) -> dict[str, object]:
    return {**dataclasses.asdict(finding), "verdict": finding.verdict.value}


def _show(console: Console, report: GateReport, *, show_all: bool) -> None:
    from ..profiling.gate import Verdict

    counts = [finding for finding in report.findings if finding.kind == "count"]
    shown = counts if show_all else [finding for finding in counts if finding.verdict is not Verdict.OK]
    equal = sum(finding.verdict is Verdict.OK for finding in counts)
    if shown:
        console.print(_table("counts", shown))
    console.print(f"{equal} of {len(counts)} counts are those of the baseline", highlight=False)
    for kind, title in (("ratio", "ratios within this run"), ("seconds", "times")):
        rows = [finding for finding in report.findings if finding.kind == kind]
        if rows:
            console.print(_table(title, rows))
    for note in report.notes:
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"baseline: {report.baseline}", highlight=False, soft_wrap=True)
    failed = [finding.name for finding in report.findings if finding.verdict.fails]
    if failed:
        console.print(f"gate: FAILED: {'; '.join(failed)}", style="bold red", markup=False, highlight=False)
        console.print("If that is intended, `draftgraph gate --update` makes it the new baseline.", highlight=False)
    else:
        console.print("gate: passed", style="bold green", highlight=False)


_COLOURS = {"worse": "red", "changed": "red", "new": "red", "missing": "red", "better": "green"}


def _table(title: str, findings: Sequence[Finding]) -> Table:
    table = Table(title=title)
    judged = any(finding.verdict.value != "shown" for finding in findings)
    table.add_column("figure", overflow="fold")
    for column in ("baseline", "now", "change", *(("at most", "") if judged else ())):
        table.add_column(column, justify="right")
    for finding in findings:
        before, now = finding.before, finding.now
        change = f"{now / before - 1:+.1%}" if before and now is not None else ""
        verdict = finding.verdict.value
        colour = _COLOURS.get(verdict)
        allowed = "" if finding.allowed is None else _number(finding.kind, finding.allowed)
        table.add_row(
            finding.name,
            *(_number(finding.kind, value) for value in (before, now)),
            change,
            *((allowed, f"[{colour}]{verdict}[/]" if colour else verdict) if judged else ()),
        )
    return table


def _number(kind: str, value: float | None) -> str:
    if value is None:
        return "-"
    if kind == "count":
        return f"{value:.0f}"
    return f"{value:.3f}" if kind == "ratio" else f"{1e3 * value:.3f} ms"
