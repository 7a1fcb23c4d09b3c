"""The Markdown page of a check: what passed, what failed, and the tables of what was timed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; floats with three significant digits."""
    lines = [f"| {' | '.join(header)} |", f"|{' --- |' * len(header)}"]
    for row in rows:
        lines.append(f"| {' | '.join(_cell(value) for value in row)} |")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def render(report: dict[str, Any]) -> str:
    """The page of a report, whose sections are those of `gpu_check.SECTIONS` that have run."""
    parts = [f"# Device check: {report['device']}", f"draftgraph {report['version']}, {report['date']}."]
    parts.append(_summary(report))
    for name, section in report["sections"].items():
        parts.append(f"## {name}")
        parts.append(
            f"Took {section['seconds']:.1f} s." + (f" **Stopped: {section['error']}**" if section["error"] else "")
        )
        if section["rows"]:
            header = list(dict.fromkeys(column for row in section["rows"] for column in row))
            parts.append(table(header, [[row.get(column, "") for column in header] for row in section["rows"]]))
        if section["text"]:
            parts.append(f"```\n{section['text'].strip()}\n```")
    return "\n\n".join(parts) + "\n"


def state(section: dict[str, Any]) -> str:
    """How a section went, in words: passed, or what is wrong, or why nothing was done."""
    if section["error"]:
        return section["error"]
    failed = sum(row.get("passed") is False for row in section["rows"])
    if failed:
        return f"{failed} of {len(section['rows'])} failed"
    return section["text"] if section["text"].startswith("left out") else "passed"


def _summary(report: dict[str, Any]) -> str:
    rows = []
    for name, section in report["sections"].items():
        rows.append([name, state(section), section["seconds"]])
    for name in report["left_out"]:
        rows.append([name, "left out: no time was left", 0.0])
    return table(["section", "result", "seconds"], rows)
