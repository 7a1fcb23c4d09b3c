"""What watches an engine at work: told of passes, steps and requests. The base of timers and range markers."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from ..graphs import Program, Step


class Observer:
    """Sees nothing; a subclass overrides what it is interested in.

    Passes and steps nest (a step inside its pass), requests overlap. All calls come from the thread that runs the
    engine's round, one at a time.
    """

    def run(self, program: Program) -> AbstractContextManager[Any]:
        """Returns a context for one round, or one prefill chunk."""
        return nullcontext()

    def step(self, program: Program, step: Step) -> AbstractContextManager[Any]:
        """Returns a context for one step of a pass."""
        return nullcontext()

    def request_started(self, number: int, prompt_tokens: int) -> None:
        """A request got its slot; `number` tells the requests of a process apart."""

    def request_decoding(self, number: int) -> None:
        """A request's prompt is written: it takes part in the next round."""

    def request_finished(self, number: int) -> None:
        """A request ended, whatever the reason."""


class Observers(Observer):
    """Several observers as one; contexts are entered in order and left in reverse."""

    def __init__(self, *observers: Observer) -> None:
        self.observers = observers

    def run(self, program: Program) -> AbstractContextManager[Any]:
        """Enters the contexts of all."""
        return _entered([observer.run(program) for observer in self.observers])

    def step(self, program: Program, step: Step) -> AbstractContextManager[Any]:
        """Enters the contexts of all."""
        return _entered([observer.step(program, step) for observer in self.observers])

    def request_started(self, number: int, prompt_tokens: int) -> None:
        """Tells all."""
        for observer in self.observers:
            observer.request_started(number, prompt_tokens)

    def request_decoding(self, number: int) -> None:
        """Tells all."""
        for observer in self.observers:
            observer.request_decoding(number)

    def request_finished(self, number: int) -> None:
        """Tells all."""
        for observer in self.observers:
            observer.request_finished(number)


class _Together(ExitStack):
    def __init__(self, contexts: list[AbstractContextManager[Any]]) -> None:
        super().__init__()
        self._contexts = contexts

    def __enter__(self) -> _Together:
        for context in self._contexts:
            self.enter_context(context)
        return self


def _entered(contexts: list[AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    return _Together(contexts)
