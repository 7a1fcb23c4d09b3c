"""Tells an observer which op of this package runs next; free unless asked for.

With `DRAFTGRAPH_TRACE_OPS=1` in the environment every op asks whether somebody observes. `graphs/step_trace.py` does,
so that a failure inside a graph can be told to be in one op. Without the variable ops are registered as they are.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

ENVIRONMENT_VARIABLE = "DRAFTGRAPH_TRACE_OPS"

ENABLED = os.environ.get(ENVIRONMENT_VARIABLE, "0") not in ("", "0")
"""Whether ops can be observed; read once, when they are registered."""

Observer = Callable[[str], None]
"""Called with the name of an op before it runs."""

_observer: ContextVar[Observer | None] = ContextVar("observer", default=None)


@contextmanager
def observing_ops(observer: Observer) -> Iterator[None]:
    """Inside, in this thread, `observer` is called before every op."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def observable(name: str, implementation: Callable[..., Any]) -> Callable[..., Any]:
    """An op's implementation that calls the observer first; the implementation itself if ops cannot be observed."""
    if not ENABLED:
        return implementation

    @functools.wraps(implementation)
    def observed(*args: Any, **kwargs: Any) -> Any:
        observer = _observer.get()
        if observer is not None:
            observer(name)
        return implementation(*args, **kwargs)

    return observed
