"""`draftgraph bench`: speculative configs against plain decoding, and against a peer."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .cli_support import EXIT_FAILED, EXIT_INTERRUPTED, DebugOption, engine_class, readable_errors, standard_output
from .errors import ConfigError
from .output_files import check_output_file, write_output_file
from .progress import terminal_progress
from .speculative_config import SpeculativeConfig

if TYPE_CHECKING:
    from .bench.report import BenchReport

PROMPTS, LOAD, ENGINE, OUTPUT = "Prompts", "Load", "Engine", "Output"


@readable_errors
def bench(
    model: Annotated[str, typer.Argument(help="An alias (smollm2-135m), a hub id, a GGUF file or a directory.")],
    speculative: Annotated[
        list[str] | None,
        typer.Option(
            help="A speculative config as JSON; repeatable. Plain decoding is always measured beside them. "
            "Default: ngram with 4 and with 8 drafts."
        ),
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            help="echo, chat, code, humaneval, mtbench, or a .jsonl file; NAME:N for its first N prompts; repeatable. "
            "Default: echo and chat.",
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="The most prompts of a set.", rich_help_panel=PROMPTS)] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy decoding.", rich_help_panel=PROMPTS)] = 0.0,
    seed: Annotated[int, typer.Option(help="Of sampling and of arrivals.", rich_help_panel=PROMPTS)] = 0,
    max_tokens: Annotated[int, typer.Option(help="The most tokens of an answer.", rich_help_panel=PROMPTS)] = 80,
    ignore_eos: Annotated[
        bool | None,
        typer.Option(
            "--ignore-eos/--stop-at-eos",
            help="Whether every answer goes on to --max-tokens. Default: only where the methods' texts differ by "
            "design, sampled and not coupled.",
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Requests under way at once, 1 to 16. Default: 1.", rich_help_panel=LOAD)
    ] = None,
    arrival_rate: Annotated[
        float | None,
        typer.Option(help="Requests per second, at random times, instead of --concurrency.", rich_help_panel=LOAD),
    ] = None,
    repeats: Annotated[int, typer.Option(help="How often every prompt is asked.", rich_help_panel=LOAD)] = 2,
    timeout: Annotated[
        float | None,
        typer.Option(
            help="The most seconds of an answer. Default: 120; no bound with --acceptance-only.", rich_help_panel=LOAD
        ),
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="transformers: the same prompts through its generate, side by side.")
    ] = None,
    assistant: Annotated[str | None, typer.Option(help="A draft model for the peer.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.", rich_help_panel=ENGINE)] = "auto",
    device: Annotated[str, typer.Option(help="Where to run, or auto.", rich_help_panel=ENGINE)] = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(help="The most tokens, prompt and answer.", rich_help_panel=ENGINE)
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Plain and speculative decoding at one width.", rich_help_panel=ENGINE)
    ] = False,
    compile_: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compile the model.", rich_help_panel=ENGINE)
    ] = True,
    executor: Annotated[str, typer.Option(help="loop, round, host or auto.", rich_help_panel=ENGINE)] = "auto",
    json_file: Annotated[
        str | None, typer.Option("--json", help="Write everything to this file, as JSON.", rich_help_panel=OUTPUT)
    ] = None,
    html_file: Annotated[
        str | None, typer.Option("--html", help="Write a page with plots to this file.", rich_help_panel=OUTPUT)
    ] = None,
    markdown_file: Annotated[
        str | None,
        typer.Option("--markdown", help="Write the figures to quote to this file, as tables.", rich_help_panel=OUTPUT),
    ] = None,
    journal_file: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            help="Keep every measurement in this file as it ends, and go on from what it holds.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    acceptance_only: Annotated[
        bool,
        typer.Option(
            "--acceptance-only",
            help="Only count what is accepted: no times, 8 prompts at once, each asked once. Quick.",
            rich_help_panel=LOAD,
        ),
    ] = False,
    debug: DebugOption = False,
) -> None:
    """Measure speculative configs against plain decoding, in turns in one process.

    Ctrl-C ends it early: what was measured is kept, and the report says that it is partial.
    """
    outputs = _checked_outputs({"JSON": json_file, "HTML": html_file, "Markdown": markdown_file})
    if journal_file is not None:
        check_output_file("the file of --resume", journal_file)
    if acceptance_only:
        _refuse_with_acceptance_only(
            {
                "--html": html_file,
                "--markdown": markdown_file,
                "--resume": journal_file,
                "--peer": peer,
                "--arrival-rate": arrival_rate,
            }
        )
    # What follows needs torch, which takes seconds to import.
    from .bench.acceptance import acceptance_options, measure_acceptance
    from .bench.options import DEFAULT_PROMPT_SETS, DEFAULT_SPECULATIVE, BenchOptions
    from .bench.session import Bench
    from .bench.tables import show

    options = (acceptance_options if acceptance_only else BenchOptions)(
        speculative=tuple(map(SpeculativeConfig.parse, speculative)) if speculative else DEFAULT_SPECULATIVE,
        prompt_sets=tuple(prompts or DEFAULT_PROMPT_SETS),
        limit=limit,
        temperature=temperature,
        seed=seed,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        concurrency=concurrency,
        arrival_rate=arrival_rate,
        repeats=repeats,
        peers=tuple(peer or ()),
        assistant=assistant,
        **({} if timeout is None else {"timeout": timeout}),
    )
    engine_options = {
        "dtype": dtype,
        "device": device,
        "max_model_len": max_model_len,
        "exact": exact,
        "compile": compile_,
        "executor": executor,
    }
    console = standard_output()
    # Only the tables may reach standard output, whatever a library prints.
    with contextlib.redirect_stdout(sys.stderr), terminal_progress() as progress:
        ready = Bench.prepare(model, options, engine_options, progress)
        if acceptance_only:
            seen = measure_acceptance(ready, progress, engine_class().from_pretrained)
        else:
            report = ready.run(progress, engine_class().from_pretrained, journal_file)
    if acceptance_only:
        lost = _write({"JSON": lambda: _as_json(seen.to_dict())}, outputs)
        seen.show(console)
        for message in lost:
            typer.echo(f"error: {message}", err=True)
        if lost:
            raise typer.Exit(EXIT_FAILED)
        return
    # The files first: whoever reads the tables, `head` perhaps, may leave before their end.
    lost = _write(_texts(report), outputs)
    show(report, console)
    for message in lost:
        typer.echo(f"error: {message}", err=True)
    if report.partial:
        typer.echo("interrupted: the result is partial", err=True)
        raise typer.Exit(EXIT_INTERRUPTED)
    wrong = report.broken_promises()
    if wrong:
        typer.echo(f"error: other text than plain decoding: {', '.join(wrong)}", err=True)
    if wrong or lost:
        raise typer.Exit(EXIT_FAILED)


def _refuse_with_acceptance_only(options: Mapping[str, object]) -> None:
    for name, value in options.items():
        if value is not None:
            raise ConfigError(f"--acceptance-only measures no times, so that {name} has no meaning beside it")


def _checked_outputs(files: Mapping[str, str | None]) -> dict[str, Path]:
    """The files to write, by kind; a bench that takes minutes must not find at its end that it cannot write them."""
    outputs = {kind: Path(name) for kind, name in files.items() if name is not None}
    for kind, file in outputs.items():
        check_output_file(f"the {kind} file", file)
        twin = next((other for other in outputs if other != kind and outputs[other].resolve() == file.resolve()), None)
        if twin is not None:
            raise ConfigError(f"the {kind} and the {twin} file are the same, {str(file)!r}")
    return outputs


def _texts(report: BenchReport) -> dict[str, Callable[[], str]]:
    """What the files hold, by kind."""
    from .bench.html_page import render
    from .bench.summary import markdown

    return {
        "JSON": lambda: _as_json(report.to_dict()),
        "HTML": lambda: render(report),
        "Markdown": lambda: markdown(report),
    }


def _as_json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n"


def _write(texts: Mapping[str, Callable[[], str]], outputs: Mapping[str, Path]) -> list[str]:
    """Writes what can be written; returns why the rest could not be."""
    lost = []
    for kind, file in outputs.items():
        try:
            write_output_file(file, texts[kind]())
        except OSError as error:
            lost.append(f"the {kind} file {str(file)!r} could not be written: {error.strerror or error}")
        else:
            typer.echo(f"{kind}: {file}", err=True)
    return lost
