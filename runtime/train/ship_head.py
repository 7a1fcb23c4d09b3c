"""Puts a trained head among those that come with draftgraph, with the note that says how it was made.

`python -m draftgraph.runtime.train.ship_head DIR --target smollm2-135m --command ... --data ... --seed 0
--acceptance FILE`, where FILE is what `draftgraph bench --acceptance-only --json FILE` wrote about the head in DIR.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ...model_zoo.draft_checkpoint import open_draft
from ...model_zoo.weights_identity import weights_identity
from .. import shipped_heads
from ..cli_support import readable_errors
from ..errors import ConfigError
from ..models import model_source, resolve_model
from ..shipped_heads import NOTE_NAME
from ..speculative_methods import METHODS

LARGEST_BYTES = 25_000_000
"""Of a head's weights: every installation carries them."""

FILES = ("config.json", "model.safetensors")


def ship_head(source: Path, target: str, target_directory: Path, note: Mapping[str, Any]) -> Path:
    """Copies a head to where heads are found.

    Args:
        source: the directory that training wrote.
        target: alias of the model that it was trained for.
        target_directory: where that model lies.
        note: `command`, `data`, `seed` and `held_out`; the method and the target are added.

    Returns:
        Its new directory.

    Raises:
        CheckpointError, UnsupportedModelError: it is no draft head, or is incomplete.
        ConfigError: heads of its method are not shipped, or it is too large.
    """
    checkpoint = open_draft(source)
    checkpoint.check()
    method = checkpoint.config.method
    if not METHODS[method].ships_heads:
        fitting = ", ".join(repr(name) for name, traits in METHODS.items() if traits.ships_heads)
        raise ConfigError(f"{source} is a head of method {method!r}; those that are shipped are of {fitting}")
    size = (source / "model.safetensors").stat().st_size
    if size >= LARGEST_BYTES:
        raise ConfigError(f"{source} has {size / 1e6:.1f} MB of weights; a head that ships has less than 25 MB")
    document = {
        "method": method,
        "target": {
            "alias": target,
            "source": model_source(target_directory),
            "weights": [weights_identity(target_directory)],
        },
        **note,
    }
    directory = shipped_heads.HEADS_DIRECTORY / target / method
    directory.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(source / name, directory / name)
    (directory / NOTE_NAME).write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return directory


def held_out_of(document: Mapping[str, Any], source: Path, prompt_set: str) -> dict[str, Any]:
    """The part of an acceptance document that is about a head.

    Args:
        document: as `draftgraph bench --acceptance-only --json` writes it.
        source: the head's directory, as the speculative config named it.
        prompt_set: which of the prompt sets.

    Raises:
        ConfigError: it does not measure that head on that set.
    """
    for method in document.get("methods") or ():
        named = (method.get("config") or {}).get("model")
        if named is not None and Path(named).resolve() == source.resolve() and prompt_set in method["by_set"]:
            figures = method["by_set"][prompt_set]
            return {
                "what": prompt_set,
                "prompts": figures["answers"],
                "num_speculative_tokens": len(figures["acceptance_by_position"]),
                "mean_acceptance_length": round(figures["tokens_per_round"], 3),
                "acceptance_by_position": [round(rate, 3) for rate in figures["acceptance_by_position"]],
            }
    raise ConfigError(f"the acceptance file has nothing about {source} on {prompt_set!r}")


@readable_errors
def main(
    source: Annotated[Path, typer.Argument(help="The directory that training wrote.")],
    target: Annotated[str, typer.Option(help="Alias of the model that it was trained for.")],
    command: Annotated[str, typer.Option(help="The exact command that trained it.")],
    data: Annotated[str, typer.Option(help="What it was trained on, and under which licence.")],
    seed: Annotated[int, typer.Option(help="Of the training.")],
    acceptance: Annotated[Path, typer.Option(help="Written by `draftgraph bench --acceptance-only --json`.")],
    held_out: Annotated[str, typer.Option(help="The prompt set of it that is noted.")] = "mtbench",
    speed_up: Annotated[float | None, typer.Option(help="Against plain decoding, if it was measured.")] = None,
) -> None:
    """Ship a trained head."""
    measured = held_out_of(json.loads(acceptance.read_text(encoding="utf-8")), source, held_out)
    if speed_up is not None:
        measured["speed_up"] = speed_up
    note = {"command": command, "data": data, "seed": seed, "held_out": measured}
    typer.echo(ship_head(source, target, resolve_model(target), note))


if __name__ == "__main__":
    typer.run(main)
