"""`draftgraph doctor`: what this machine offers."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .cli_support import EXIT_FAILED, DebugOption, readable_errors, standard_output
from .doctor import problems, report


@readable_errors
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, nothing else.")] = False,
    debug: DebugOption = False,
) -> None:
    """Show versions, devices, the compiler, the cache, and which executors work here."""
    facts = report()
    found = problems(facts)
    if as_json:
        typer.echo(json.dumps({**facts, "problems": found}, indent=2))
    else:
        _show(standard_output(), facts, found)
    if found:
        raise typer.Exit(EXIT_FAILED)


def _show(console: Console, facts: dict[str, Any], found: list[str]) -> None:
    cpu, cache, compiler, driver = (facts[key] for key in ("cpu", "cache", "compiler", "cuda_driver"))
    table = Table(show_header=False, title="machine")
    rows = [
        ("draftgraph", facts["draftgraph"] or "not installed"),
        ("Python", f"{facts['python']} on {facts['platform']}"),
        *((name, version or "not installed") for name, version in facts["packages"].items()),
        ("CPU", f"{cpu['cores']} cores, {cpu['threads']} threads in use, {cpu['instructions']}"),
        ("bfloat16 on the CPU", "fast" if cpu["fast_bfloat16"] else "slow: float32 is used"),
        *((f"GPU {i}", f"{gpu['name']}, {gpu['compute_capability']}") for i, gpu in enumerate(facts["gpus"])),
        ("CUDA driver", driver["version"] or f"none: {driver['reason']}"),
        ("C++ compiler", compiler["command"] or f"none: {compiler['reason']}"),
        ("cache", f"{cache['path']}: {', '.join(cache['models']) or 'no model'}"),
    ]
    for label, value in rows:
        table.add_row(label, str(value))
    console.print(table)
    executors = Table("executor", "works here", "why", title="executors, best first")
    for executor in facts["executors"]:
        executors.add_row(executor["name"], "yes" if executor["available"] else "no", executor["reason"])
    console.print(executors)
    for problem in found:
        console.print(f"problem: {problem}", style="bold", markup=False, highlight=False)
