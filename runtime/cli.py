"""The command line: `demo`, `generate`, `bench`, `train`, `profile`, `plan`, `gate`, `fetch`, `inspect`, `doctor`."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from .cli_bench import bench
from .cli_demo import demo
from .cli_doctor import doctor
from .cli_fetch import fetch
from .cli_gate import gate
from .cli_generate import generate
from .cli_inspect import inspect
from .cli_plan import plan
from .cli_profile import profile
from .cli_train import train

app = typer.Typer(
    name="draftgraph",
    help="Speculative decoding that gives the same text, sooner.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (demo, generate, bench, train, profile, plan, gate, fetch, inspect, doctor):
    app.command()(command)


def _show_version(value: bool) -> None:
    if value:
        from .doctor import package_version

        typer.echo(f"draftgraph {package_version('draftgraph') or '(not installed)'}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Speculative decoding that gives the same text, sooner."""
    # Standard output belongs to the answers.
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.WARNING)


def main() -> None:
    """Runs the command line and exits."""
    app(prog_name="draftgraph")
