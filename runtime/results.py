"""From tokens to what the caller gets: pieces of text, and the finished result."""

from __future__ import annotations

import time
from itertools import chain, repeat

from ..graphs import DecodeState, HostReader
from ..graphs.state import FINISH_CANCELLED, FINISH_ERROR, FINISH_LENGTH, FINISH_STOP
from .outputs import FinishReason, GenerationResult, RequestMetrics, StreamChunk, TokenLogprobs
from .request import Request
from .rounds import LogprobBuffers

_NAMES: dict[int, FinishReason] = {
    FINISH_STOP: "stop",
    FINISH_LENGTH: "length",
    FINISH_CANCELLED: "cancelled",
    FINISH_ERROR: "error",
}


def finish_name(code: int) -> FinishReason:
    """The name of a `FINISH_*` code of the decode state."""
    return _NAMES[code]


def record_tokens(request: Request, tokens: list[int], now: float) -> bool:
    """Adds tokens that just arrived, and the text that they complete, to a request.

    Returns whether a stop string came up; then only the tokens up to the one that completes it were added.
    """
    piece = request.detokenizer.push(tokens)
    match = request.detokenizer.match
    kept = tokens if match is None else tokens[: match.kept_tokens]
    request.token_ids.extend(kept)
    request.arrivals.append((now, len(kept)))
    request.text.append(piece)
    request.chunks.append(StreamChunk(text=piece, token_ids=tuple(kept), index=request.index))
    return match is not None


def finish_request(
    request: Request,
    state: DecodeState,
    reader: HostReader,
    metrics: str,
    logprobs: LogprobBuffers | None,
    reason: FinishReason,
    *,
    error: str | None = None,
    budget_rule: str | None = None,
) -> None:
    """Makes the request's result and its last chunk; reads the counters that the device kept.

    The device may still be running: for other rows, or even for this one if the host ended it. Then rounds that began
    before the device learned of it count too.
    """
    tail = request.detokenizer.finish()
    request.text.append(tail)
    match = request.detokenizer.match
    stop_reason: str | int | None = None
    if reason == "stop":
        stop_reason = match.string if match is not None else request.token_ids[-1]
    request.result = GenerationResult(
        text="".join(request.text),
        token_ids=tuple(request.token_ids),
        finish_reason=reason,
        error=error,
        stop_reason=stop_reason,
        logprobs=_logprobs(request, reader, logprobs),
        metrics=None if metrics == "none" else _metrics(request, state, reader, metrics == "detailed", budget_rule),
        prompt_token_ids=request.prompt_ids,
        seed=request.seed,
        index=request.index,
        synthetic=request.synthetic,
    )
    request.chunks.append(
        StreamChunk(text=tail, token_ids=(), index=request.index, finish_reason=reason, result=request.result)
    )


def _metrics(
    request: Request, state: DecodeState, reader: HostReader, detailed: bool, budget_rule: str | None
) -> RequestMetrics:
    slot = request.slot
    table = reader.read(state.histogram[slot]).tolist() if slot >= 0 else [[0]]
    pairs = None
    if detailed:
        rounds = sum(map(sum, table))
        written = reader.read(state.round_pairs[slot, :rounds]).tolist() if slot >= 0 else []
        pairs = [(int(a), int(b)) for a, b in written]
    return RequestMetrics.from_histogram(
        table,
        prompt_tokens=len(request.prompt_ids),
        reused_prompt_tokens=request.reused,
        output_tokens=len(request.token_ids),
        submitted=request.submitted_at,
        token_times=list(chain.from_iterable(repeat(when, count) for when, count in request.arrivals)),
        finished=time.perf_counter(),
        round_pairs=pairs,
        budget_rule=budget_rule,
    )


def _logprobs(request: Request, reader: HostReader, buffers: LogprobBuffers | None) -> tuple[TokenLogprobs, ...] | None:
    wanted = request.params.logprobs
    if wanted is None:
        return None
    if buffers is None or request.slot < 0:
        return ()
    start = len(request.prompt_ids)
    end = start + len(request.token_ids)
    values = reader.read(buffers.values[request.slot, start:end]).tolist()
    tokens = reader.read(buffers.tokens[request.slot, start:end]).tolist()
    return tuple(
        TokenLogprobs(
            token_id=ids[0],
            logprob=logs[0],
            top=tuple(zip(ids[1 : wanted + 1], logs[1 : wanted + 1], strict=True)),
        )
        for ids, logs in zip(tokens, values, strict=True)
    )
