"""`draftgraph fetch`: brings a model to this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from .cli_support import DebugOption, readable_errors
from .models import model_source, resolve_model


@readable_errors
def fetch(
    name: Annotated[str, typer.Argument(help="An alias (smollm2-135m), a hub id, a GGUF file or a directory.")],
    debug: DebugOption = False,
) -> None:
    """Fetch a model, convert it if needed, and print its local directory."""
    directory = resolve_model(name)
    typer.echo(f"source: {model_source(directory)}", err=True)
    typer.echo(str(directory))
