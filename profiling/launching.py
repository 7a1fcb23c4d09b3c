"""What the Nsight scripts share: they print a command or run it, and say where a missing tool comes from."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from typing import NoReturn

import typer

from .nvtx_ranges import ENVIRONMENT_VARIABLE

EXIT_REFUSED = 2


def with_ranges(command: Sequence[str]) -> list[str]:
    """The command with an environment in which draftgraph marks its NVTX ranges."""
    return ["env", f"{ENVIRONMENT_VARIABLE}=1", *command]


def require_tool(tool: str, source: str) -> None:
    """Ends the script unless `tool` is on the path; `source` says which packages have it."""
    if shutil.which(tool) is None:
        refuse(f"{tool} was not found on the PATH. {source}. --print shows the command without running it")


def refuse(message: str) -> NoReturn:
    """Ends the script with a message for the user."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(EXIT_REFUSED)


def print_command(command: Sequence[str]) -> None:
    """Prints a command so that a shell takes it."""
    typer.echo(shlex.join(command))


def run_command(command: Sequence[str]) -> None:
    """Runs a command to its end; ends the script with its exit code if that is not 0."""
    code = subprocess.run(command, check=False).returncode
    if code != 0:
        typer.echo(f"error: {command[2]} ended with exit code {code}", err=True)
        raise typer.Exit(code if code > 0 else 1)
