"""`draftgraph train`: a draft head for a model, from its own answers."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from .cli_support import EXIT_INTERRUPTED, DebugOption, readable_errors, standard_output
from .errors import ConfigError
from .output_files import check_output_file, write_output_file

DATA, HEAD, LEARNING, STATES, RUN = "Data", "Head", "Learning", "Hidden states", "Run"


@readable_errors
def _help_with_options(ctx: typer.Context, value: list[str] | None) -> list[str] | None:
    """Lists the method's options where they are asked for, whatever else the command would need."""
    if value is not None and "help" in value:
        _list_options(ctx.params["method"])
        raise typer.Exit
    return value


@readable_errors
def train(
    # Eager, so that it is known when `--option help` is read.
    method: Annotated[str, typer.Argument(help="eagle3, p-eagle, dflash, dspark, medusa or mtp.", is_eager=True)],
    target: Annotated[str, typer.Option(help="An alias (smollm2-135m), a hub id, a GGUF file or a directory.")],
    data: Annotated[
        list[str],
        typer.Option(
            help="A .txt file or a directory of them, a .jsonl or .jsonl.gz file of prompts, chats or answers, a "
            "prompt set as NAME or NAME:COUNT, or self:COUNT for prompts that the target makes up; repeatable.",
            rich_help_panel=DATA,
        ),
    ],
    out: Annotated[Path, typer.Option(help="Directory of the head, and of the run, which goes on from there.")],
    regenerate: Annotated[
        bool,
        typer.Option(
            "--regenerate/--no-regenerate",
            help="The target answers the prompts; else the data has the answers.",
            rich_help_panel=DATA,
        ),
    ] = True,
    max_tokens: Annotated[int, typer.Option(help="The most tokens of an answer.", rich_help_panel=DATA)] = 256,
    max_length: Annotated[
        int, typer.Option(help="The most tokens of an example, prompt and answer.", rich_help_panel=DATA)
    ] = 1024,
    temperature: Annotated[float, typer.Option(help="Of the answers; 0 is greedy.", rich_help_panel=DATA)] = 0.0,
    answer_rows: Annotated[int, typer.Option(help="Prompts answered together.", rich_help_panel=DATA)] = 16,
    compile_: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compile the target that answers.", rich_help_panel=DATA)
    ] = True,
    held_out: Annotated[
        float, typer.Option(help="Share of the prompts that only measures.", rich_help_panel=DATA)
    ] = 0.05,
    drop_held_out: Annotated[
        bool,
        typer.Option(
            "--drop-held-out",
            help="Drop what shares text with the prompts that heads are measured on.",
            rich_help_panel=DATA,
        ),
    ] = False,
    learn_prompts: Annotated[
        bool,
        typer.Option(
            "--learn-prompts",
            help="Learn from prompts too, all but what every example begins with: where the target made them up.",
            rich_help_panel=DATA,
        ),
    ] = False,
    num_drafts: Annotated[
        int | None,
        typer.Option(
            help="Tokens that it learns to draft per round; by default the method's, see --option help.",
            rich_help_panel=HEAD,
        ),
    ] = None,
    num_layers: Annotated[
        int | None,
        typer.Option(
            help="Decoder layers of the head, for dflash and dspark; by default the method's, see --option help.",
            rich_help_panel=HEAD,
        ),
    ] = None,
    draft_vocab_size: Annotated[
        int | None,
        typer.Option(
            help="Tokens that it can draft, the target's most frequent. Default: 8192 at most.", rich_help_panel=HEAD
        ),
    ] = None,
    intermediate_size: Annotated[
        int | None,
        typer.Option(help="Inner size of the head's feed-forward. Default: the target's.", rich_help_panel=HEAD),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            help="name=value, an option of the method's own; repeatable. --option help lists them.",
            rich_help_panel=HEAD,
            callback=_help_with_options,
        ),
    ] = None,
    init_from: Annotated[
        str | None,
        typer.Option(
            help="An exported head to begin at, tensor by tensor where they fit: its directory, or METHOD@TARGET of "
            "one that comes with draftgraph.",
            rich_help_panel=HEAD,
        ),
    ] = None,
    epochs: Annotated[int, typer.Option(help="Passes over the examples.", rich_help_panel=LEARNING)] = 3,
    learning_rate: Annotated[
        float | None,
        typer.Option(help="At its peak; by default 4e-3 with muon, 1e-3 with adamw.", rich_help_panel=LEARNING),
    ] = None,
    optimizer: Annotated[
        str, typer.Option(help="muon (matrices by Muon, the rest by AdamW) or adamw.", rich_help_panel=LEARNING)
    ] = "muon",
    warmup_steps: Annotated[int, typer.Option(help="Updates in which it rises.", rich_help_panel=LEARNING)] = 20,
    weight_decay: Annotated[float, typer.Option(help="Of the optimiser.", rich_help_panel=LEARNING)] = 0.01,
    batch_tokens: Annotated[int, typer.Option(help="The most tokens of a batch.", rich_help_panel=LEARNING)] = 2048,
    batches_per_step: Annotated[
        int, typer.Option(help="Batches per update, shared among the processes.", rich_help_panel=LEARNING)
    ] = 1,
    seed: Annotated[int, typer.Option(help="Of everything that is random.", rich_help_panel=LEARNING)] = 0,
    dtype: Annotated[
        str, typer.Option(help="That the head computes in: float32 or bfloat16.", rich_help_panel=LEARNING)
    ] = "float32",
    patience: Annotated[
        int,
        typer.Option(
            help="End after so many evaluations after the warm-up that are no better.", rich_help_panel=LEARNING
        ),
    ] = 3,
    evaluate_every: Annotated[
        int,
        typer.Option(help="Updates between evaluations, besides one per epoch; 0: none.", rich_help_panel=LEARNING),
    ] = 0,
    states: Annotated[
        str,
        typer.Option(
            help="online: computed when needed; offline: all written first; hybrid: kept in the first epoch.",
            rich_help_panel=STATES,
        ),
    ] = "online",
    states_dir: Annotated[
        Path | None,
        typer.Option(
            help="Where they are kept; heads that read the same ones of the same data can share it. Default: in --out.",
            rich_help_panel=STATES,
        ),
    ] = None,
    target_dtype: Annotated[
        str, typer.Option(help="That the target runs in: float32, bfloat16 or auto.", rich_help_panel=RUN)
    ] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.", rich_help_panel=RUN)] = "auto",
    save_every: Annotated[float, typer.Option(help="Seconds between checkpoints.", rich_help_panel=RUN)] = 60.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what it would take: sizes, memory, time.", rich_help_panel=RUN)
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write a report to this file, as JSON.", rich_help_panel=RUN)
    ] = None,
    debug: DebugOption = False,
) -> None:
    """Train a draft head for a model, on what the model itself writes.

    The same command goes on where it was stopped, by Ctrl-C or otherwise. The best head so far always lies in --out.
    Several processes: accelerate launch --num_processes N -m draftgraph train ...
    """
    if json_file is not None:
        check_output_file("the JSON file", json_file)
    # What follows needs torch, which takes seconds to import.
    from ..model_zoo.training.settings import TrainingSettings
    from .shipped_heads import shipped_directory
    from .train.request import TrainRequest, split_options, with_named
    from .train.run import dry_run as estimate
    from .train.run import run
    from .train.show import show_result

    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"dtype must be float32 or bfloat16, got {dtype!r}")
    try:
        settings = TrainingSettings(
            epochs=epochs,
            optimizer=optimizer,
            learning_rate=learning_rate,
            warmup_steps=warmup_steps,
            weight_decay=weight_decay,
            batch_tokens=batch_tokens,
            batches_per_step=batches_per_step,
            seed=seed,
            bfloat16=dtype == "bfloat16",
            evaluate_every=evaluate_every,
            patience=patience,
            save_every=save_every,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    request = TrainRequest(
        method=method,
        target=target,
        data=tuple(data),
        out=out,
        settings=settings,
        options=with_named(method, split_options(tuple(option or ())), num_drafts=num_drafts, num_layers=num_layers),
        regenerate=regenerate,
        max_tokens=max_tokens,
        max_length=max_length,
        temperature=temperature,
        answer_rows=answer_rows,
        compile=compile_,
        states=states,
        states_dir=states_dir,
        draft_vocab_size=draft_vocab_size,
        intermediate_size=intermediate_size,
        init_from=None if init_from is None else shipped_directory(init_from) or Path(init_from),
        learn_prompts=learn_prompts,
        drop_held_out=drop_held_out,
        held_out=held_out,
        target_dtype=target_dtype,
        device=device,
    )
    console = standard_output()
    if dry_run:
        with contextlib.redirect_stdout(sys.stderr):
            found = estimate(request, _note)
        for text in found.lines():
            console.print(text, highlight=False, soft_wrap=True)
        _write(json_file, found.to_json())
        return
    try:
        # Only the table may reach standard output, whatever a library prints.
        with contextlib.redirect_stdout(sys.stderr):
            ended = run(request, _note)
    except KeyboardInterrupt:
        typer.echo("interrupted: the same command goes on from what is kept", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if ended.stopped is not None:
        step = ended.stopped.position.step
        typer.echo(f"stopped after update {step}, which is saved: the same command goes on from there", err=True)
        raise typer.Exit(EXIT_INTERRUPTED)
    if ended.result is None:
        return  # a process that helped
    if ended.before:
        typer.echo("this run has ended already: nothing was done. For another, name another --out", err=True)
    show_result(ended.result, console)
    _write(json_file, ended.result.to_json())


def _note(text: str) -> None:
    typer.echo(text, err=True)


def _write(file: Path | None, value: object) -> None:
    if file is not None:
        write_output_file(file, json.dumps(value, ensure_ascii=False, indent=2) + "\n")
        typer.echo(f"JSON: {file}", err=True)


def _list_options(method: str) -> None:
    from ..model_zoo.training.option_fields import option_fields
    from ..model_zoo.training.registry import trainable

    for field in option_fields(trainable(method).options).values():
        typer.echo(f"{field.name}={field.default}  {field.meaning}")
