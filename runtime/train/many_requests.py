"""Many requests at once through one engine, by continuous batching: as a sequence ends, the next takes its row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ..outputs import GenerationResult
from ..prompts import Prompt
from ..sampling_params import SamplingParams

if TYPE_CHECKING:
    from ..engine import Engine
    from ..stream import TokenStream

Request = tuple[Prompt, SamplingParams]
Answers = tuple[GenerationResult, ...]

_AHEAD = 2
"""Sequences given to the engine, in batches: one that is decoded, and one that takes its rows."""


def answers_as_done(engine: Engine, requests: Iterable[Request]) -> Iterator[tuple[int, Answers]]:
    """Answers requests, each as soon as it is done.

    Args:
        engine: decodes `max_batch_size` sequences together.
        requests: prompts and how to answer each; taken as there is room, and may be without end.

    Yields:
        The number of a request, from 0, and its `n` answers.

    Raises:
        RequestError: a prompt cannot be answered.
    """
    streams: dict[int, TokenStream] = {}
    waiting = enumerate(requests)
    sequences, more = 0, True
    try:
        while True:
            while more and sequences < _AHEAD * engine.config.max_batch_size:
                number, (prompt, params) = next(waiting, (-1, (None, None)))
                if prompt is None or params is None:
                    more = False
                else:
                    streams[number] = engine.stream(prompt, params)
                    sequences += params.n
            if not streams:
                return
            next(next(iter(streams.values())), None)  # one step of the engine advances all of them
            for number, stream in list(streams.items()):
                answers = tuple(result for result in stream.results if result is not None)
                if len(answers) == len(stream.results):
                    streams.pop(number).close()
                    sequences -= len(answers)
                    yield number, answers
    finally:
        for stream in streams.values():
            stream.close()


def answers_in_order(engine: Engine, requests: Iterable[Request]) -> Iterator[Answers]:
    """Answers requests as `answers_as_done` does, and gives the answers in the order of the requests."""
    held: dict[int, Answers] = {}
    following = 0
    for number, answers in answers_as_done(engine, requests):
        held[number] = answers
        while following in held:
            yield held.pop(following)
            following += 1
