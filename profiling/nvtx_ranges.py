"""NVTX ranges for Nsight: each prefill chunk, round and step, each request, and the steady state of decoding.

All are in the domain `draftgraph`. Passes and steps are push/pop ranges named as in `names.py`; requests and the
steady state, which overlap with others, are start/end ranges. Without a tool attached, or without CUDA, the package
`nvtx` makes every call a no-op.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

from ..graphs import Program, Step
from .names import DOMAIN, StepName
from .observer import Observer

ENVIRONMENT_VARIABLE = "DRAFTGRAPH_NVTX"
"""Set to 1, every engine marks its ranges from the start."""
STEADY = "steady"
"""The range that is open while requests decode, warm-up and the first request's prefill left out."""


def wanted() -> bool:
    """Whether the environment asks for ranges; raises `ValueError` for a value that is neither 0 nor 1."""
    value = os.environ.get(ENVIRONMENT_VARIABLE, "0")
    if value not in ("", "0", "1"):
        raise ValueError(f"{ENVIRONMENT_VARIABLE} must be 0 or 1, got {value!r}")
    return value == "1"


class _Range:
    """A push/pop range, used again and again."""

    __slots__ = ("_attributes", "_domain")

    def __init__(self, domain: Any, message: str) -> None:
        self._domain, self._attributes = domain, domain.get_event_attributes(message=message)

    def __enter__(self) -> None:
        self._domain.push_range(self._attributes)

    def __exit__(self, *exc: object) -> None:
        self._domain.pop_range()


class NvtxRanges(Observer):
    """Marks ranges; `Engine.observe` attaches it, or `DRAFTGRAPH_NVTX=1` for all engines of a process."""

    def __init__(self) -> None:
        import nvtx  # not before ranges are wanted: the device check runs where only torch and the like are installed

        self._domain = nvtx.get_domain(DOMAIN)
        self._ranges: dict[tuple[str, str], _Range] = {}
        self._requests: dict[int, Any] = {}
        self._decoding: set[int] = set()
        self._steady: Any = None

    def run(self, program: Program) -> AbstractContextManager[Any]:
        """A range named after the program."""
        return self._range((program.name, ""))

    def step(self, program: Program, step: Step) -> AbstractContextManager[Any]:
        """A range named after program and step."""
        return self._range((program.name, step.name))

    def request_started(self, number: int, prompt_tokens: int) -> None:
        """Starts the request's range."""
        self._requests[number] = self._start(f"request {number}, {prompt_tokens} prompt tokens")

    def request_decoding(self, number: int) -> None:
        """Starts the steady state, unless other requests decode already."""
        self._decoding.add(number)
        if len(self._decoding) == 1:
            self._steady = self._start(STEADY)

    def request_finished(self, number: int) -> None:
        """Ends the request's range, and with the last of those that decode, the steady state."""
        if number in self._requests:
            self._domain.end_range(self._requests.pop(number))
        if number in self._decoding:
            self._decoding.remove(number)
            if not self._decoding:
                self._domain.end_range(self._steady)

    def _start(self, message: str) -> Any:
        return self._domain.start_range(self._domain.get_event_attributes(message=message))

    def _range(self, key: tuple[str, str]) -> _Range:
        found = self._ranges.get(key)
        if found is None:
            found = self._ranges[key] = _Range(self._domain, str(StepName(*key)))
        return found
