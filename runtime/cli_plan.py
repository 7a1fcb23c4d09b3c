"""`draftgraph plan`: how many drafts per round would pay here?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .checks import check_integer, check_number
from .cli_demo import PROMPT
from .cli_support import DebugOption, named, readable_errors, standard_output
from .errors import ConfigError
from .progress import terminal_progress
from .sampling_params import SamplingParams
from .speculative_config import SpeculativeConfig

if TYPE_CHECKING:
    from ..profiling.speed_model import Acceptance
    from .plan.measure import BucketCosts
    from .plan.planner import Plan

MEASURED, GIVEN, ENGINE = "Measured", "Given", "Engine"
_QUESTION = "Explain in a few sentences how a steam engine works."
_DEFAULT_CONFIG = '{"method": "ngram", "num_speculative_tokens": 16}'
_ROOM = 1024
"""Tokens of a sequence unless the caller asks for more: the measurement makes a few short answers."""


@readable_errors
def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            help="An alias (smollm2-135m), a hub id, a GGUF file or a directory. Leave it out to give all costs."
        ),
    ] = None,
    speculative_config: Annotated[
        str, typer.Option(help="JSON: how to draft; its number of drafts is not used.")
    ] = _DEFAULT_CONFIG,
    max_drafts: Annotated[int, typer.Option(help="The largest K, 1 to 64.")] = 16,
    alpha: Annotated[
        float | None,
        typer.Option(
            help="Chance in [0, 1] that a draft is accepted after those before it were. Default: measured.",
            rich_help_panel=GIVEN,
        ),
    ] = None,
    baseline_ms: Annotated[
        float | None, typer.Option(help="A token of plain decoding, in milliseconds.", rich_help_panel=GIVEN)
    ] = None,
    draft_ms: Annotated[float | None, typer.Option(help="One draft, in milliseconds.", rich_help_panel=GIVEN)] = None,
    verify_ms: Annotated[
        float | None, typer.Option(help="A target pass over a window, in milliseconds.", rich_help_panel=GIVEN)
    ] = None,
    state_ms: Annotated[
        float | None,
        typer.Option(help="The rest of a round, in milliseconds. Default: 0.", rich_help_panel=GIVEN),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure acceptance on the answer to this chat message; repeatable. Default: a text to repeat, and "
            "a question.",
            rich_help_panel=MEASURED,
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="The most tokens of an answer.", rich_help_panel=MEASURED)] = 96,
    temperature: Annotated[
        float, typer.Option(help="Of the answers; 0 is greedy decoding.", rich_help_panel=MEASURED)
    ] = 0.0,
    max_batch_size: Annotated[
        int, typer.Option(help="Plan for up to this many rows, 1 to 16.", rich_help_panel=MEASURED)
    ] = 4,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.", rich_help_panel=ENGINE)] = "auto",
    device: Annotated[str, typer.Option(help="Where to run, or auto.", rich_help_panel=ENGINE)] = "auto",
    max_model_len: Annotated[
        int, typer.Option(help="The most tokens, prompt and answer.", rich_help_panel=ENGINE)
    ] = _ROOM,
    compile_: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compile the model.", rich_help_panel=ENGINE)
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, nothing else.")] = False,
    debug: DebugOption = False,
) -> None:
    """Estimate the speed-up of K = 0 to 16 drafts per round, and suggest a configuration.

    With a model, the costs of rounds are measured on this machine, for every batch bucket, and how often drafts are
    accepted on a few answers, unless --alpha says it. Without one, all costs must be given.

    The model: a round of K drafts yields (1 - alpha^(K+1)) / (1 - alpha) tokens (Leviathan et al. 2023, eq. 1), and the
    speed-up is baseline * tokens / (K * draft + verify + state). A drafter that has nothing to propose in some rounds
    is averaged over both kinds of rounds.

    Examples: draftgraph plan smollm2-135m

    draftgraph plan --alpha 0.8 --baseline-ms 10 --draft-ms 1 --verify-ms 12 --state-ms 2
    """
    check_integer(ConfigError, "--max-drafts", max_drafts, 1, 64)
    check_integer(ConfigError, "--max-batch-size", max_batch_size, 1, 16)
    if alpha is not None:
        check_number(ConfigError, "--alpha", alpha, 0.0, 1.0)
    speculation = SpeculativeConfig.parse(speculative_config)
    given = {"--baseline-ms": baseline_ms, "--draft-ms": draft_ms, "--verify-ms": verify_ms, "--state-ms": state_ms}
    if model is None:
        costs, acceptance = _given(given, alpha, max_drafts)
    else:
        stray = [name for name, value in given.items() if value is not None]
        if stray:
            raise ConfigError(f"{', '.join(stray)} cannot go together with a model, whose costs are measured")
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=0)
        options = {"dtype": dtype, "device": device, "max_model_len": max_model_len, "compile": compile_}
        costs, acceptance = _measured(
            model, speculation, max_drafts, alpha, prompt, params, {**options, "max_batch_size": max_batch_size}
        )
    from .plan.planner import make_plan

    found = make_plan(costs, acceptance)
    if as_json:
        typer.echo(json.dumps(plan_document(found, speculation, measured_alpha=alpha is None), indent=2))
    else:
        _show(standard_output(), found, speculation, measured_alpha=alpha is None)


def _given(
    given: dict[str, float | None], alpha: float | None, max_drafts: int
) -> tuple[list[BucketCosts], Acceptance]:
    from ..profiling.speed_model import Acceptance
    from .plan.planner import given_costs

    needed = {"--alpha": alpha, **{name: given[name] for name in ("--baseline-ms", "--draft-ms", "--verify-ms")}}
    missing = [name for name, value in needed.items() if value is None]
    if missing:
        raise ConfigError(f"without a model every cost must be given: {', '.join(missing)} missing")
    values = {name: 0.0 if value is None else value for name, value in given.items()}
    for name, value in values.items():
        positive = name in ("--baseline-ms", "--verify-ms")
        check_number(ConfigError, name, value, 0.0, low_included=not positive)
    baseline, draft, verify, state = values.values()
    costs = given_costs(baseline_ms=baseline, draft_ms=draft, verify_ms=verify, state_ms=state, most_drafts=max_drafts)
    assert alpha is not None
    return [costs], Acceptance(alpha=alpha)


def _measured(
    model: str,
    speculation: SpeculativeConfig,
    max_drafts: int,
    alpha: float | None,
    prompts: list[str] | None,
    params: SamplingParams,
    options: dict[str, Any],
) -> tuple[list[BucketCosts], Acceptance]:
    from ..profiling.speed_model import Acceptance
    from .engine_config import EngineConfig
    from .loading import load_target
    from .plan.measure import measure_acceptance, measure_costs, with_depth

    if not speculation.traits.drafts:
        raise ConfigError("there is nothing to plan for method 'none', which makes no drafts: name a drafting method")
    config = EngineConfig(speculative=with_depth(speculation, max_drafts), **options)
    with terminal_progress() as progress:
        target = load_target(model, config, named(progress, "loading the model"))
        chat = bool(getattr(target.tokenizer, "chat_template", None))
        texts = prompts or [PROMPT, _QUESTION]
        asked: list[Any] = [[{"role": "user", "content": text}] if chat else text for text in texts]
        costs = measure_costs(target, config, asked[0], progress=progress)
        if alpha is not None:
            return costs, Acceptance(alpha=alpha)
        return costs, measure_acceptance(target, config, asked, params, progress=progress)


def plan_document(found: Plan, speculation: SpeculativeConfig, *, measured_alpha: bool) -> dict[str, Any]:
    """The plan in types that JSON has; times in milliseconds."""
    return {
        "alpha": found.acceptance.alpha,
        "alpha_measured": measured_alpha,
        "coverage": found.acceptance.coverage,
        "buckets": [
            {
                "bucket": bucket.costs.bucket,
                "baseline_ms": bucket.costs.plain.round_ms,
                "suggested_drafts": bucket.depth,
                "estimates": [
                    {
                        "drafts": e.num_drafts,
                        **_parts(bucket.costs, e.num_drafts),
                        "round_ms": e.round_ms,
                        "tokens_per_round": e.tokens_per_round,
                        "ms_per_token": e.ms_per_token,
                        "speed_up": e.speed_up,
                    }
                    for e in bucket.estimates
                ],
            }
            for bucket in found.buckets
        ],
        "num_speculative_tokens_per_batch_size": found.table,
        "speculative_config": found.suggestion(speculation).to_dict(),
    }


def _parts(costs: BucketCosts, drafts: int) -> dict[str, float]:
    parts = costs.by_depth[drafts] if drafts else costs.plain
    return {"draft_ms": parts.draft_ms, "verify_ms": parts.verify_ms, "state_ms": parts.state_ms}


def _show(console: Console, found: Plan, speculation: SpeculativeConfig, *, measured_alpha: bool) -> None:
    from ..profiling.speed_model import TOLERANCE

    acceptance = found.acceptance
    source = "measured" if measured_alpha else "given"
    line = f"alpha {acceptance.alpha:.3f} ({source}): the chance that a draft is accepted after those before it were"
    console.print(line, highlight=False)
    if acceptance.coverage < 1.0:
        console.print(f"rounds with drafts: {acceptance.coverage:.0%} (measured)", highlight=False)
    for bucket in found.buckets:
        rows = bucket.costs.bucket
        title = f"{rows} row{'s' * (rows > 1)}: plain decoding takes {bucket.costs.plain.round_ms:.2f} ms a token"
        table = Table(title=title)
        for column in ("K", "draft ms", "verify ms", "rest ms", "tokens/round", "ms/token", "speed-up"):
            table.add_column(column, justify="right")
        for e in bucket.estimates:
            parts = _parts(bucket.costs, e.num_drafts)
            table.add_row(
                str(e.num_drafts),
                *(f"{value:.2f}" for value in parts.values()),
                f"{e.tokens_per_round:.2f}",
                f"{e.ms_per_token:.3f}",
                f"{e.speed_up:.3f} x",
                style="bold green" if e.num_drafts == bucket.depth else None,
            )
        console.print(table)
    suggestion = found.suggestion(speculation)
    if suggestion.num_speculative_tokens is None:
        console.print("No number of drafts is expected to pay here: decode plainly.", highlight=False)
        return
    ways = "; ".join(f"{_rows(first, last)}: K = {depth}" for first, last, depth in found.table)
    console.print(f"suggested: {ways} (the fewest drafts within {TOLERANCE:.0%} of the best speed-up)", highlight=False)
    console.print(f"--speculative-config '{json.dumps(suggestion.to_dict())}'", highlight=False, soft_wrap=True)


def _rows(first: int, last: int) -> str:
    count = str(first) if first == last else f"{first} to {last}"
    return f"{count} row{'s' * (last > 1)}"
