"""What the commands share: readable errors, the `--debug` switch, and the engine they drive."""

from __future__ import annotations

import errno
import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console

from .progress import ProgressCallback

if TYPE_CHECKING:
    from .engine import Engine

EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130

_OF_THE_PLACE = (
    errno.EACCES,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.ENAMETOOLONG,
    errno.ENOSPC,
    errno.EPERM,
    errno.EROFS,
)
"""What is wrong with a file or a disk that the user named, whatever the program did there."""

_Command = TypeVar("_Command", bound=Callable[..., Any])


class _Debugging:
    """Whether errors are shown with their traceback."""

    on = False


def _switch_debugging(value: bool) -> None:
    _Debugging.on = value
    if value:
        logging.getLogger("draftgraph").setLevel(logging.DEBUG)


DebugOption = Annotated[
    bool, typer.Option("--debug", help="Show tracebacks and log messages.", callback=_switch_debugging)
]


def readable_errors(command: _Command) -> _Command:
    """Turns what a command raises into one line on standard error and an exit code.

    2 for errors that draftgraph itself defines and for files and disks that cannot be used, which a user can act on;
    1 for any other; 130 for Ctrl-C.
    """

    @functools.wraps(command)
    def wrapped(*args: Any, **options: Any) -> Any:
        try:
            return command(*args, **options)
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except typer.Exit:
            raise
        except BrokenPipeError:
            # Whoever read the output has left, as `head` does. Nothing can be told, and nothing is wrong.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(EXIT_FAILED) from None
        except Exception as error:
            if _Debugging.on:
                raise
            message = " ".join(str(error).split())
            kind = type(error)
            if isinstance(error, OSError) and error.errno in _OF_THE_PLACE and error.filename is not None:
                typer.echo(f"error: {str(error.filename)!r}: {error.strerror}", err=True)
                raise typer.Exit(EXIT_REFUSED) from None
            if kind.__module__.split(".")[0] == __package__.split(".")[0]:
                typer.echo(f"error: {message}", err=True)
                raise typer.Exit(EXIT_REFUSED) from None
            typer.echo(f"internal error: {kind.__name__}: {message} (--debug shows the traceback)", err=True)
            raise typer.Exit(EXIT_FAILED) from None

    return wrapped  # type: ignore[return-value]


def engine_class() -> type[Engine]:
    """The engine, imported when a command needs it: torch takes seconds, and `--help` should not."""
    from .engine import Engine

    return Engine


def standard_output() -> Console:
    """Where answers and tables go, at the stream that is in place now."""
    return Console(file=sys.stdout)


def named(progress: ProgressCallback, phase: str) -> ProgressCallback:
    """Shows all steps of some work as the one phase `phase`."""
    return lambda done, total, _: progress(done, total, phase)
