"""`draftgraph inspect`: what two vocabularies share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .cli_support import DebugOption, readable_errors, standard_output
from .errors import ConfigError


@readable_errors
def inspect(
    vocab: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="TARGET DRAFT", help="Compare the vocabularies of two models: aliases, hub ids or directories."
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="The text by whose tokens frequency is counted; Python's language reference by default."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, nothing else.")] = False,
    debug: DebugOption = False,
) -> None:
    """Show how much of two vocabularies is the same: what `use_heterogeneous_vocab` can draft."""
    if vocab is None:
        raise ConfigError("nothing to inspect: name two models, as in `draftgraph inspect --vocab TARGET DRAFT`")
    from .vocab_report import compare, sample_text

    report = compare(*vocab, sample_text(text))
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _show(standard_output(), report)


def _show(console: Console, report: dict[str, Any]) -> None:
    sides = report["target"], report["draft"]
    for label, side in zip(("target", "draft"), sides, strict=True):
        console.print(f"{label}: {side['name']}", markup=False, highlight=False, soft_wrap=True)
    table = Table("", "target", "draft", title="vocabularies")
    table.add_row("notation", *(side["notation"] for side in sides))
    for label, key in (("tokens", "tokens"), ("tokens that both have", "shared")):
        table.add_row(label, *(f"{side[key]:,}" for side in sides))
    for label, key in (("share of the tokens", "shared_of_tokens"), ("share of the text", "shared_of_text")):
        table.add_row(label, *(f"{side[key]:.1%}" for side in sides))
    console.print(table)
    console.print(
        f"The text has {report['characters']:,} characters: {sides[0]['text_tokens']:,} tokens of the target and "
        f"{sides[1]['text_tokens']:,} of the draft model.",
        highlight=False,
    )
