"""`draftgraph inspect`: what a draft checkpoint is, and what two vocabularies share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .checks import check_choice
from .cli_support import DebugOption, readable_errors, standard_output
from .errors import ConfigError


@readable_errors
def inspect(
    checkpoint: Annotated[
        str | None,
        typer.Argument(
            metavar="DRAFT",
            help="A draft head: a directory, a hub id, or METHOD@TARGET, such as eagle3@smollm2-135m, for one that "
            "comes with draftgraph.",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Check the draft head against this model's config; no weights are loaded.")
    ] = None,
    aux_layer_numbering: Annotated[
        str | None,
        typer.Option(help="How the draft head numbers the target's layers: hidden_states or layer_outputs."),
    ] = None,
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
    """Show what a draft head is and whether it fits a target; or how much of two vocabularies is the same."""
    if (checkpoint is None) == (vocab is None):
        raise ConfigError(
            "name one thing to inspect: a draft head, as in `draftgraph inspect DRAFT --target TARGET`, or two models, "
            "as in `draftgraph inspect --vocab TARGET DRAFT`"
        )
    if vocab is not None:
        from .vocab_report import compare, sample_text

        report = compare(*vocab, sample_text(text))
    else:
        from ..model_zoo.draft_config import NUMBERINGS
        from .draft_report import describe

        if aux_layer_numbering is not None:
            check_choice(ConfigError, "aux-layer-numbering", aux_layer_numbering, NUMBERINGS)
        assert checkpoint is not None
        report = describe(checkpoint, target, aux_layer_numbering)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        (_show_draft if vocab is None else _show)(standard_output(), report)
    if vocab is None and (report["problem"] or report["mismatch"]):
        raise typer.Exit(1)


def _show_draft(console: Console, report: dict[str, Any]) -> None:
    depth = report["num_speculative_tokens"]
    table = Table(show_header=False, box=None, pad_edge=False)
    for label, value in (
        ("checkpoint", report["checkpoint"]),
        ("method", report["method"]),
        ("format", report["format"]),
        ("place", "inside a target's checkpoint" if report["inside_target"] else None),
        ("drafts per round", "not given" if depth is None else str(depth)),
        ("drafting", "all tokens in one pass" if report["parallel"] else None),
        ("block", report["block"]),
        ("target's hidden size", str(report["target_hidden_size"])),
        ("reads", report["hidden_states"]),
        ("vocabulary", report["vocabulary"]),
        ("missing tensors", ", ".join(report["missing"]) or "none"),
        ("unexpected tensors", ", ".join(report["unexpected"]) or "none"),
        ("problem", report["problem"]),
        ("target", report["target"] and f"{report['target']}: {report['mismatch'] or 'fits'}"),
        *_how_made(report["note"] or {}),
    ):
        if value is not None:
            table.add_row(label, Text(value))
    console.print(table, highlight=False)


def _how_made(note: dict[str, Any]) -> list[tuple[str, str | None]]:
    """What the note of a head that comes with draftgraph says."""
    held_out = note.get("held_out") or {}
    length = held_out.get("mean_acceptance_length")
    by_position = " ".join(f"{rate:.0%}" for rate in held_out.get("acceptance_by_position") or ())
    drafts = held_out.get("num_speculative_tokens")
    how = f"{f'K = {drafts}: ' if drafts else ''}{by_position} by position"
    measured = f"tokens per round ({how}) on {held_out.get('what')}"
    seed = note.get("seed")
    return [
        ("held-out acceptance", f"{length:.2f} {measured}" if length else None),
        ("trained by", note.get("command")),
        ("trained on", note.get("data")),
        ("seed", None if seed is None else str(seed)),
    ]


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
