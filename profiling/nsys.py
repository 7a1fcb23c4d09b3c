"""Runs a command under Nsight Systems, recording only while requests decode, and shows the time by step.

python -m draftgraph.profiling.nsys -- draftgraph generate smollm2-135m "Why is the sky blue?"
python -m draftgraph.profiling.nsys --table draftgraph.sqlite
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .launching import print_command, refuse, require_tool, run_command, with_ranges
from .names import DOMAIN
from .nsys_stats import read_stats
from .nvtx_ranges import STEADY
from .report import report_rows, step_table

SOURCE = (
    "It is part of NVIDIA Nsight Systems: package nsight-systems-cli in NVIDIA's apt and dnf repositories, "
    "nsight-systems in Debian and Ubuntu, or https://developer.nvidia.com/nsight-systems"
)


def profile_command(command: Sequence[str], *, output: str, whole: bool = False) -> list[str]:
    """The command line that records `command`.

    Args:
        command: the program and its arguments.
        output: path of the report, without its suffix; `.nsys-rep` and `.sqlite` files are made.
        whole: record the whole run, and not only the steady state of decoding.
    """
    if not command:
        raise ValueError("no command to profile was given")
    capture = [] if whole else ["--capture-range=nvtx", f"--nvtx-capture={STEADY}@{DOMAIN}", "--capture-range-end=stop"]
    return with_ranges(
        [
            "nsys",
            "profile",
            "--trace=cuda,nvtx",
            "--sample=none",
            "--cpuctxsw=none",
            "--cuda-graph-trace=node",
            *capture,
            "--export=sqlite",
            "--force-overwrite=true",
            f"--output={output}",
            *command,
        ]
    )


def main(
    command: Annotated[
        list[str] | None, typer.Argument(help="The command to profile, after --.", show_default=False)
    ] = None,
    show: Annotated[bool, typer.Option("--print", help="Print the command line and run nothing.")] = False,
    output: Annotated[str, typer.Option("--output", "-o", help="Path of the report, without suffix.")] = "draftgraph",
    whole: Annotated[
        bool, typer.Option("--whole", help="Record the whole run: loading, compiling and prefill too.")
    ] = False,
    table: Annotated[
        Path | None,
        typer.Option(help="Profile nothing; show the table of a recording: SQLite export or CSV of `nsys stats`."),
    ] = None,
) -> None:
    """Run a command under Nsight Systems and show the time by step.

    Only the steady state is recorded: from the first request's first round to its last, warm-up and prefill left out.
    The command runs with DRAFTGRAPH_NVTX=1, which makes draftgraph mark its rounds, steps and requests.
    """
    if table is not None:
        if command:
            refuse("--table shows a recording that is there, and cannot go together with a command")
        _show(table)
        return
    if not command:
        refuse("no command to profile: give one after --, or a recording with --table")
    line = profile_command(command or [], output=output, whole=whole)
    if show:
        print_command(line)
        return
    require_tool("nsys", SOURCE)
    run_command(line)
    _show(Path(f"{output}.sqlite"))


def _show(file: Path) -> None:
    try:
        rows = report_rows(read_stats(file))
    except OSError as error:
        refuse(f"{file} cannot be read: {error.strerror or error}")
    except ValueError as error:
        refuse(str(error))
    else:
        Console(file=sys.stdout).print(step_table(rows, f"time by step, from {file}"))


if __name__ == "__main__":
    typer.run(main)
