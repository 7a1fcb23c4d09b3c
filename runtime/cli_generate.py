"""`draftgraph generate`: answers one prompt."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer

from .cli_support import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    DebugOption,
    engine_class,
    named,
    readable_errors,
)
from .errors import ConfigError, RequestError
from .models import model_source
from .outputs import GenerationResult, StreamChunk
from .progress import terminal_progress
from .prompts import chat_or_text
from .sampling_params import SamplingParams
from .speculative_config import SpeculativeConfig

SAMPLING, ENGINE = "Sampling", "Engine"


@readable_errors
def generate(
    model: Annotated[str, typer.Argument(help="An alias (smollm2-135m), a hub id, a GGUF file or a directory.")],
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--no-chat", help="Use the chat template. Default: if the model has one."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message of the chat.")] = None,
    speculative_config: Annotated[
        str | None,
        typer.Option(help='JSON, e.g. \'{"method": "ngram", "num_speculative_tokens": 8}\'. Default: none.'),
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="0 is greedy decoding.", rich_help_panel=SAMPLING)
    ] = SamplingParams.temperature,
    top_k: Annotated[int, typer.Option(help="0 keeps every token.", rich_help_panel=SAMPLING)] = SamplingParams.top_k,
    top_p: Annotated[float, typer.Option(help="In (0, 1].", rich_help_panel=SAMPLING)] = SamplingParams.top_p,
    min_p: Annotated[float, typer.Option(help="In [0, 1].", rich_help_panel=SAMPLING)] = SamplingParams.min_p,
    seed: Annotated[
        int | None, typer.Option(help="Default: drawn, and reported with --json.", rich_help_panel=SAMPLING)
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(help="The most tokens of the answer.", rich_help_panel=SAMPLING)
    ] = SamplingParams.max_tokens,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="A string that ends the answer; repeatable.", rich_help_panel=SAMPLING),
    ] = None,
    stop_token_ids: Annotated[
        list[int] | None,
        typer.Option("--stop-token-id", help="A token that ends the answer; repeatable.", rich_help_panel=SAMPLING),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the end token.", rich_help_panel=SAMPLING)
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(help="Report this many likeliest tokens, 0 to 20.", rich_help_panel=SAMPLING),
    ] = None,
    n: Annotated[int, typer.Option("-n", "--n", help="Answers.", rich_help_panel=SAMPLING)] = 1,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.", rich_help_panel=ENGINE)] = "auto",
    device: Annotated[str, typer.Option(help="Where to run, or auto.", rich_help_panel=ENGINE)] = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(help="The most tokens, prompt and answer.", rich_help_panel=ENGINE)
    ] = None,
    exact: Annotated[
        bool,
        typer.Option("--exact", help="Plain and speculative decoding at one width.", rich_help_panel=ENGINE),
    ] = False,
    compile_: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compile the model.", rich_help_panel=ENGINE)
    ] = True,
    executor: Annotated[str, typer.Option(help="loop, round, host or auto.", rich_help_panel=ENGINE)] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, nothing else.")] = False,
    debug: DebugOption = False,
) -> None:
    """Answer a prompt, streaming the text as it is made."""
    speculation = SpeculativeConfig.parse(speculative_config)
    speculation.require_available()
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        stop_token_ids=tuple(stop_token_ids or ()),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        n=n,
    )
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    if not text:
        raise RequestError("the prompt is empty")
    if system is not None and chat is False:
        raise ConfigError("--system needs the chat template, which --no-chat turns off")

    output = sys.stdout
    started = time.perf_counter()
    # With --json nothing but the document may reach standard output, whatever a library prints.
    silence = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    with silence:
        engine = engine_class().from_pretrained(
            model,
            speculation,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            max_batch_size=max(1, min(n, 4)),
            compile=compile_,
            exact=exact,
            executor=executor,
            metrics="detailed" if as_json else "summary",
        )
        with engine:
            request = chat_or_text(engine.tokenizer, text, chat=chat, system=system)
            # A stream checks its request when it is opened: do that before compiling, which takes longer.
            engine.stream(request, params).close()
            with terminal_progress() as progress:
                engine.warmup(named(progress, "warming up"))
            ready = time.perf_counter()
            answers = _Answers(None if as_json else output, n)
            interrupted = answers.take(engine.stream(request, params))
            source = model_source(engine.model_path)
            timings = {"load_seconds": ready - started, "generate_seconds": time.perf_counter() - ready}
    if as_json:
        document = {
            **answers.document(),
            "timings": timings,
            "model": str(engine.model_path),
            "source": source,
            "speculative_config": speculation.to_dict(),
        }
        output.write(json.dumps(document, ensure_ascii=False) + "\n")
    if interrupted:
        typer.echo("interrupted", err=True)
        raise typer.Exit(EXIT_INTERRUPTED)
    for result in answers.results.values():
        if result.finish_reason == "error":
            typer.echo(f"error: {result.error}", err=True)
            raise typer.Exit(EXIT_FAILED)


class _Answers:
    """Collects the answers of a stream and shows their text: one answer as it comes, several one by one."""

    def __init__(self, output: Any, n: int) -> None:
        self._output, self._n = output, n
        self._chunks: dict[int, list[StreamChunk]] = {index: [] for index in range(n)}
        self.results: dict[int, GenerationResult] = {}

    def take(self, stream: Any) -> bool:
        """Takes the whole stream; on Ctrl-C it is cancelled and what is there is kept.

        Returns:
            Whether it was interrupted.
        """
        interrupted = False
        with stream:
            try:
                self._show(stream)
            except KeyboardInterrupt:
                interrupted = True
                stream.cancel()
                self._show(stream)
        if self._output is not None:
            self._print_rest()
        return interrupted

    def document(self) -> dict[str, Any]:
        """The first answer's fields; with several answers also `answers`, the list of all."""
        answers = [self._answer(index) for index in range(self._n)]
        return answers[0] if self._n == 1 else {**answers[0], "answers": answers}

    def _show(self, chunks: Iterable[StreamChunk]) -> None:
        for chunk in chunks:
            self._chunks[chunk.index].append(chunk)
            if chunk.result is not None:
                self.results[chunk.index] = chunk.result
            if self._output is not None and self._n == 1:
                self._output.write(chunk.text)
                self._output.flush()

    def _print_rest(self) -> None:
        if self._n > 1:
            for index in range(self._n):
                self._output.write(f"--- answer {index + 1} of {self._n}\n{''.join(self._texts(index))}\n")
        else:
            self._output.write("\n")
        self._output.flush()

    def _texts(self, index: int) -> Iterator[str]:
        return (chunk.text for chunk in self._chunks[index])

    def _answer(self, index: int) -> dict[str, Any]:
        result = self.results.get(index)
        if result is None:
            # Interrupted before the engine could say how it ended.
            result = GenerationResult(
                text="".join(self._texts(index)),
                token_ids=tuple(token for chunk in self._chunks[index] for token in chunk.token_ids),
                finish_reason="cancelled",
                index=index,
            )
        return result.to_dict()
