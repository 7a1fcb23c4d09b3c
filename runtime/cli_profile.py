"""`draftgraph profile`: where the time of an answer goes, beside the least it could take."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .cache import device_rates_directory
from .cli_demo import PROMPT
from .cli_support import EXIT_FAILED, DebugOption, engine_class, named, readable_errors, standard_output
from .errors import ConfigError
from .models import model_source
from .output_files import check_output_file, write_output_file
from .progress import terminal_progress
from .prompts import chat_or_text
from .sampling_params import SamplingParams
from .speculative_config import SpeculativeConfig

if TYPE_CHECKING:
    from .engine import Engine
    from .profile import AnswerProfile
    from .prompts import Prompt

ENGINE = "Engine"


@readable_errors
def profile(
    model: Annotated[str, typer.Argument(help="An alias (smollm2-135m), a hub id, a GGUF file or a directory.")],
    prompt: Annotated[
        str | None, typer.Option(help="- reads it from standard input. Default: the demo's, a list to be repeated.")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--no-chat", help="Use the chat template. Default: if the model has one."),
    ] = None,
    speculative_config: Annotated[
        str | None,
        typer.Option(help='JSON, e.g. \'{"method": "ngram", "num_speculative_tokens": 8}\'. Default: none.'),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="The most tokens of the answer.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy decoding.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    trace: Annotated[
        Path | None,
        typer.Option(help="Answer once more under torch.profiler, and write a Chrome trace to this file."),
    ] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file; - is standard output.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the device's rates anew, even if they are kept in the cache.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.", rich_help_panel=ENGINE)] = "auto",
    device: Annotated[str, typer.Option(help="Where to run, or auto.", rich_help_panel=ENGINE)] = "auto",
    exact: Annotated[
        bool,
        typer.Option("--exact", help="Plain and speculative decoding at one width.", rich_help_panel=ENGINE),
    ] = False,
    compile_: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compile the model.", rich_help_panel=ENGINE)
    ] = True,
    debug: DebugOption = False,
) -> None:
    """Answer a prompt and show the time of every step, beside the least it could take on this machine.

    The prompt is answered twice: once to warm up, and once under the timer. What a step must move are the weights,
    the keys and values, the logits and the decode state; the limit comes from the bandwidth and the matrix rate of
    this machine, which are measured once and kept in the cache.
    """
    speculation = SpeculativeConfig.parse(speculative_config)
    speculation.require_available()
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
    to_stdout = as_json is not None and str(as_json) == "-"
    for name, file in (("--trace", trace), ("--json", None if to_stdout else as_json)):
        if file is not None:
            check_output_file(name, file)
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else PROMPT if prompt is None else prompt
    if not text:
        raise ConfigError("the prompt is empty")
    engine = engine_class().from_pretrained(
        model,
        speculation,
        dtype=dtype,
        device=device,
        max_batch_size=1,
        compile=compile_,
        exact=exact,
        prefix_caching=False,
    )
    with engine:
        request = chat_or_text(engine.tokenizer, text, chat=chat)
        engine.stream(request, params).close()  # checks the request before anything is compiled
        found = _measure(engine, request, params, again=measure)
        if trace is not None:
            _trace(engine, request, params, trace)
        source = model_source(engine.model_path)
    document = {"model": source, "speculative_config": speculation.to_dict(), **found.to_dict()}
    lost = None
    if as_json is not None:
        out = json.dumps(document, indent=2) + "\n"
        if to_stdout:
            sys.stdout.write(out)
        else:
            try:
                write_output_file(as_json, out)
            except OSError as error:
                lost = f"--json {str(as_json)!r} could not be written: {error.strerror or error}"
    if not to_stdout:
        _show(found, source, trace)
    if lost is not None:
        typer.echo(f"error: {lost}", err=True)
        raise typer.Exit(EXIT_FAILED)
    if found.result.finish_reason == "error":
        typer.echo(f"error: {found.result.error}", err=True)
        raise typer.Exit(EXIT_FAILED)


def _measure(engine: Engine, request: Prompt, params: SamplingParams, *, again: bool) -> AnswerProfile:
    from ..profiling.device_rates import load_rates
    from .profile import measured_dtypes, profile_answer

    with terminal_progress() as progress:
        engine.warmup(named(progress, "warming up"))
        progress(0, 1, "measuring the device")
        rates = load_rates(device_rates_directory(), engine.config.torch_device, measured_dtypes(engine), again=again)
        progress(1, 1, "measuring the device")
    engine.generate(request, params)
    return profile_answer(engine, request, params, rates)


def _trace(engine: Engine, request: Prompt, params: SamplingParams, file: Path) -> None:
    from ..profiling.torch_trace import TorchTrace

    with TorchTrace() as recorded, engine.observe(recorded):
        engine.generate(request, params)
    recorded.save(file)


def _show(found: AnswerProfile, source: Any, trace: Path | None) -> None:
    from ..profiling.report import step_table

    console = standard_output()
    console.print(step_table(found.rows))
    result, rates = found.result, found.rates
    lines = [
        f"tokens: {len(result.prompt_token_ids)} of the prompt, {len(result.token_ids)} of the answer",
        f"decoding: {found.decode}" if found.decode is not None else "no round was run",
        f"model: {source}",
        f"limit: {rates.bandwidth / 1e9:.1f} GB/s, "
        + ", ".join(f"{rate / 1e12:.2f} TFLOP/s in {kind}" for kind, rate in sorted(rates.matmul.items()))
        + f", measured on {rates.device} with {rates.threads} thread{'s' if rates.threads > 1 else ''}",
    ]
    if trace is not None:
        lines.append(f"trace: {trace}, for chrome://tracing or https://ui.perfetto.dev")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
