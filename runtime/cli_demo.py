"""`draftgraph demo`: one prompt, answered plainly and with speculation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .cli_support import EXIT_FAILED, DebugOption, engine_class, named, readable_errors, standard_output
from .errors import ConfigError
from .models import model_source, resolve_model
from .outputs import GenerationResult, RequestMetrics
from .progress import terminal_progress
from .sampling_params import SamplingParams
from .shipped_heads import ShippedHead, heads_for, with_shipped_head
from .speculative_config import SpeculativeConfig
from .speculative_methods import METHODS, nearest

PROMPT = """Write this list again, exactly as it is:

1. Fill the kettle with fresh cold water.
2. Bring the water to a boil.
3. Warm the teapot with a little hot water.
4. Add one spoon of tea leaves for each cup.
5. Pour the boiling water over the leaves.
6. Let the tea steep for four minutes.
7. Pour the tea through a strainer into the cups.
8. Add milk, lemon or sugar to taste.
"""
"""The answer repeats its prompt, as edits, summaries and code changes do: what prompt lookup is good at."""

LOOKUP, LOOKUP_DRAFTS = "ngram", 8
"""What is shown of any model, and how many drafts methods without weights make."""

_PROMPT_ROOM = 256
"""Tokens set aside for the prompt, which has 130 to 150 in the vocabularies of the supported families."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One way of answering the prompt."""

    name: str
    result: GenerationResult

    @property
    def metrics(self) -> RequestMetrics:
        """The figures, which the engine was asked to keep."""
        assert self.result.metrics is not None
        return self.result.metrics


@readable_errors
def demo(
    model: Annotated[str, typer.Option(help="An alias, a hub id, a GGUF file or a directory.")] = "smollm2-135m",
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="A method to compare with plain decoding; repeatable. Default: ngram, and the best of the draft heads "
            "that come with draftgraph for the model."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="The most tokens of the answer.")] = 160,
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(help="The most drafts per target pass. Default: 8, and what a draft head was made for."),
    ] = None,
    debug: DebugOption = False,
) -> None:
    """Answer one prompt plainly and with speculation, side by side."""
    depth = num_speculative_tokens
    lookup = SpeculativeConfig(method=LOOKUP, num_speculative_tokens=LOOKUP_DRAFTS if depth is None else depth)
    chosen = None if method is None else [_config(name, depth) for name in dict.fromkeys(method)]
    params = SamplingParams(max_tokens=max_tokens)
    console = standard_output()
    directory = resolve_model(model)
    if chosen is None:
        best = best_head(heads_for(model, directory))
        chosen = [lookup] if best is None else [lookup, _config(best.method, depth)]
    configs = [with_shipped_head(config, model, directory) for config in chosen]
    console.print(f"[bold]{model}[/bold], from {model_source(directory)}", highlight=False, soft_wrap=True)
    console.print(PROMPT, style="dim", markup=False, highlight=False)
    runs = [_answer(console, directory, config, params) for config in (None, *configs)]
    for run in runs:
        if run.result.finish_reason == "error":
            typer.echo(f"error: {run.name}: {run.result.error}", err=True)
            raise typer.Exit(EXIT_FAILED)
    console.print(comparison(runs))
    if any(run.result.token_ids != runs[0].result.token_ids for run in runs):
        console.print("The texts differ: rounding broke a tie between two tokens. `exact=True` avoids that.")
        raise typer.Exit(EXIT_FAILED)


def best_head(heads: Sequence[ShippedHead]) -> ShippedHead | None:
    """The one that makes a target fastest, as far as it was measured."""
    return max(heads, key=lambda head: head.rank, default=None)


def _config(name: str, depth: int | None) -> SpeculativeConfig:
    """A method by its name alone: one that needs no more, or one of which heads ship."""
    drafting = {key: traits for key, traits in METHODS.items() if traits.drafts}
    accepted = [key for key, traits in drafting.items() if traits.self_sufficient or traits.ships_heads]
    if name not in accepted:
        raise ConfigError(
            f"demo cannot show method {name!r}{nearest(name, accepted)}; accepted: {', '.join(map(repr, accepted))}"
        )
    if depth is None and METHODS[name].self_sufficient:
        depth = LOOKUP_DRAFTS
    return SpeculativeConfig(method=name, num_speculative_tokens=depth)


def _answer(console: Console, directory: Path, config: SpeculativeConfig | None, params: SamplingParams) -> Run:
    """Loads an engine, streams the answer to the console, and lets the engine go."""
    result = None
    room = _PROMPT_ROOM + params.max_tokens
    with engine_class().from_pretrained(directory, config, max_batch_size=1, max_model_len=room) as engine:
        name = _name(engine, config)
        with terminal_progress() as progress:
            engine.warmup(named(progress, f"warming up: {name}"))
        console.rule(name)
        with engine.stream([{"role": "user", "content": PROMPT}], params) as stream:
            for chunk in stream:
                console.out(chunk.text, end="", highlight=False)
                result = chunk.result or result
        console.print()
    assert result is not None
    return Run(name=name, result=result)


def _name(engine: Any, config: SpeculativeConfig | None) -> str:
    """The method and its number of drafts, which the checkpoint may have given."""
    if config is None:
        return "plain"
    depth = config.num_speculative_tokens
    return f"{config.method}, {engine.config.speculative.num_speculative_tokens if depth is None else depth} drafts"


def comparison(runs: Sequence[Run]) -> Table:
    """The figures of all runs side by side; the first is plain decoding."""
    plain = runs[0]
    table = Table(title="one prompt, answered in turn")
    table.add_column("")
    for run in runs:
        table.add_column(run.name, justify="right")
    rows: tuple[tuple[str, Callable[[Run], str]], ...] = (
        ("tokens", lambda run: f"{run.metrics.output_tokens}"),
        ("target passes", lambda run: f"{run.metrics.rounds}"),
        ("tokens per pass", lambda run: _per_pass(run.metrics)),
        ("tokens per second", lambda run: f"{run.metrics.tokens_per_second:.1f}"),
        ("time to first token", lambda run: f"{run.metrics.time_to_first_token * 1e3:.0f} ms"),
        ("speed-up", lambda run: "" if run is plain else f"{_speed_up(plain.metrics, run.metrics):.2f} x"),
        ("identical text", lambda run: "" if run is plain else _identical(plain, run)),
    )
    for label, cell in rows:
        table.add_row(label, *(cell(run) for run in runs))
    return table


def _speed_up(plain: RequestMetrics, other: RequestMetrics) -> float:
    return other.tokens_per_second / plain.tokens_per_second if plain.tokens_per_second else 0.0


def _identical(plain: Run, other: Run) -> str:
    return "yes" if other.result.token_ids == plain.result.token_ids else "no"


def _per_pass(metrics: RequestMetrics) -> str:
    return f"{metrics.output_tokens / metrics.rounds:.2f}" if metrics.rounds else "-"
