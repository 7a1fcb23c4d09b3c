"""`draftgraph demo`: one prompt, answered plainly and with n-gram speculation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .cli_support import EXIT_FAILED, DebugOption, engine_class, named, readable_errors, standard_output
from .models import model_source, resolve_model
from .outputs import GenerationResult, RequestMetrics
from .progress import terminal_progress
from .sampling_params import SamplingParams
from .speculative_config import SpeculativeConfig

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
    max_tokens: Annotated[int, typer.Option(help="The most tokens of the answer.")] = 160,
    num_speculative_tokens: Annotated[int, typer.Option(help="The most drafts per target pass.")] = 8,
    debug: DebugOption = False,
) -> None:
    """Answer one prompt twice, plainly and with n-gram speculation, and compare."""
    speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=num_speculative_tokens)
    params = SamplingParams(max_tokens=max_tokens)
    console = standard_output()
    directory = resolve_model(model)
    console.print(f"[bold]{model}[/bold], from {model_source(directory)}", highlight=False, soft_wrap=True)
    console.print(PROMPT, style="dim", markup=False, highlight=False)
    runs = [
        Run(name=name, result=_answer(console, name, directory, config, params))
        for name, config in (("plain", None), (f"ngram, {num_speculative_tokens} drafts", speculation))
    ]
    for run in runs:
        if run.result.finish_reason == "error":
            typer.echo(f"error: {run.name}: {run.result.error}", err=True)
            raise typer.Exit(EXIT_FAILED)
    console.print(comparison(runs))
    if runs[0].result.token_ids != runs[1].result.token_ids:
        console.print("The two texts differ: rounding broke a tie between two tokens. `exact=True` avoids that.")
        raise typer.Exit(EXIT_FAILED)


def _answer(
    console: Console, name: str, directory: Any, config: SpeculativeConfig | None, params: SamplingParams
) -> GenerationResult:
    """Loads an engine, streams the answer to the console, and lets the engine go."""
    result = None
    room = _PROMPT_ROOM + params.max_tokens
    with engine_class().from_pretrained(directory, config, max_batch_size=1, max_model_len=room) as engine:
        with terminal_progress() as progress:
            engine.warmup(named(progress, f"warming up: {name}"))
        console.rule(name)
        with engine.stream([{"role": "user", "content": PROMPT}], params) as stream:
            for chunk in stream:
                console.out(chunk.text, end="", highlight=False)
                result = chunk.result or result
        console.print()
    assert result is not None
    return result


def comparison(runs: Sequence[Run]) -> Table:
    """The figures of a plain and a speculative run side by side."""
    plain, speculative = (run.metrics for run in runs)
    table = Table(title="one prompt, answered twice")
    table.add_column("")
    for run in runs:
        table.add_column(run.name, justify="right")
    identical = runs[0].result.token_ids == runs[1].result.token_ids
    speed_up = speculative.tokens_per_second / plain.tokens_per_second if plain.tokens_per_second else 0.0
    for label, cells in (
        ("tokens", [f"{metrics.output_tokens}" for metrics in (plain, speculative)]),
        ("target passes", [f"{metrics.rounds}" for metrics in (plain, speculative)]),
        ("tokens per pass", [_per_pass(metrics) for metrics in (plain, speculative)]),
        ("tokens per second", [f"{metrics.tokens_per_second:.1f}" for metrics in (plain, speculative)]),
        (
            "time to first token",
            [f"{metrics.time_to_first_token * 1e3:.0f} ms" for metrics in (plain, speculative)],
        ),
        ("speed-up", ["", f"{speed_up:.2f} x"]),
        ("identical text", ["", "yes" if identical else "no"]),
    ):
        table.add_row(label, *cells)
    return table


def _per_pass(metrics: RequestMetrics) -> str:
    return f"{metrics.output_tokens / metrics.rounds:.2f}" if metrics.rounds else "-"
