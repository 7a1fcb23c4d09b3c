"""Runs a command under Nsight Compute, which measures one kernel in depth, only while requests decode.

python -m draftgraph.profiling.ncu _attend_kernel -- draftgraph generate smollm2-135m "Why is the sky blue?"
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from .launching import print_command, refuse, require_tool, run_command, with_ranges
from .names import DOMAIN
from .nvtx_ranges import STEADY

SOURCE = (
    "It is part of NVIDIA Nsight Compute: packages cuda-nsight-compute-* in NVIDIA's apt and dnf repositories, "
    "nsight-compute in Debian and Ubuntu, or https://developer.nvidia.com/nsight-compute"
)


def profile_command(
    kernel: str, command: Sequence[str], *, output: str, skip: int = 0, count: int = 1, sections: str = "full"
) -> list[str]:
    """The command line that measures one kernel of `command`.

    Args:
        kernel: its function name, or "regex:" and a regular expression.
        command: the program and its arguments.
        output: path of the report, without its suffix.
        skip: launches of the kernel to pass over first.
        count: launches to measure; each is replayed many times.
        sections: the section set, such as basic, detailed or full.
    """
    if not kernel.removeprefix("regex:"):
        raise ValueError("the name of the kernel is empty")
    if not command:
        raise ValueError("no command to profile was given")
    if skip < 0 or count < 1:
        raise ValueError(f"skip must be at least 0 and count at least 1, got {skip} and {count}")
    return with_ranges(
        [
            "ncu",
            "--target-processes=all",
            "--nvtx",
            f"--nvtx-include={DOMAIN}@{STEADY}",
            f"--kernel-name={kernel}",
            f"--launch-skip={skip}",
            f"--launch-count={count}",
            "--graph-profiling=node",
            f"--set={sections}",
            "--force-overwrite",
            f"--export={output}",
            *command,
        ]
    )


def main(
    kernel: Annotated[str, typer.Argument(help="Its function name, or regex: and a regular expression.")],
    command: Annotated[
        list[str] | None, typer.Argument(help="The command to profile, after --.", show_default=False)
    ] = None,
    show: Annotated[bool, typer.Option("--print", help="Print the command line and run nothing.")] = False,
    output: Annotated[str, typer.Option("--output", "-o", help="Path of the report, without suffix.")] = "draftgraph",
    skip: Annotated[int, typer.Option(help="Launches of the kernel to pass over first.", min=0)] = 0,
    count: Annotated[int, typer.Option(help="Launches to measure.", min=1)] = 1,
    sections: Annotated[str, typer.Option("--set", help="What is measured: basic, detailed or full.")] = "full",
) -> None:
    """Measure one kernel in depth with Nsight Compute.

    Only launches in the steady state count: those after warm-up and prefill, while requests decode. The command runs
    with DRAFTGRAPH_NVTX=1, which makes draftgraph mark that state.
    """
    if not command:
        refuse("no command to profile: give one after --")
    try:
        line = profile_command(kernel, command, output=output, skip=skip, count=count, sections=sections)
    except ValueError as error:
        refuse(str(error))
    if show:
        print_command(line)
        return
    require_tool("ncu", SOURCE)
    run_command(line)
    typer.echo(f"wrote {output}.ncu-rep: `ncu --import {output}.ncu-rep` prints it, ncu-ui shows it")


if __name__ == "__main__":
    typer.run(main)
