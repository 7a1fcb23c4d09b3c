"""Which executors there are, which of them this machine can use, and how one is chosen."""

from __future__ import annotations

import logging
from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol

import torch

from .host_executor import HostExecutor
from .program import Program

logger = logging.getLogger("draftgraph.graphs")


class Executor(Protocol):
    """Runs programs. Every executor gives the same tokens for the same program."""

    name: str

    def run(self, program: Program) -> None:
        """Runs the whole program."""

    def rounds(self, program: Program) -> Generator[None, None, None]:
        """Runs a program whose root is a `While`; yields whenever the host may look at what was published.

        The loop may go on while the host looks, so between two yields the host touches `DecodeState.host` alone. The
        generator ends when the loop has, be rows finished or not; the host then enters it again. To leave early the
        host sets `pause` and closes the generator, which waits for the rounds under way. Ended or closed, it leaves the
        device idle, with all that the rounds published still in the rings.
        """


@dataclass(frozen=True)
class ExecutorStatus:
    """Whether an executor works here, and why or why not."""

    name: str
    available: bool
    reason: str


# Best first: "auto" takes the first that is available.
EXECUTOR_NAMES = ("loop", "round", "host")

_NOT_BUILT = "this version does not capture graphs yet; every round runs through the host executor"


def available_executors(device: torch.device | str) -> list[ExecutorStatus]:
    """The ladder of executors for `device`, best first."""
    needs_cuda = "" if torch.device(device).type == "cuda" else "needs a CUDA device; "
    return [
        ExecutorStatus("loop", False, needs_cuda + _NOT_BUILT),
        ExecutorStatus("round", False, needs_cuda + _NOT_BUILT),
        ExecutorStatus("host", True, "plain Python; works on every device"),
    ]


def choose_executor(name: str, device: torch.device | str) -> Executor:
    """Creates the executor called `name`, or for "auto" the best that `device` offers.

    Raises `ValueError` for an unknown name, and for one that does not work here, saying why.
    """
    if name not in ("auto", *EXECUTOR_NAMES):
        raise ValueError(f"executor must be one of auto, {', '.join(EXECUTOR_NAMES)}; got {name!r}")
    ladder = available_executors(device)
    for status in ladder:
        if name == status.name and not status.available:
            raise ValueError(f"executor {name!r} cannot be used on {device}: {status.reason}")
        if status.available and name in ("auto", status.name):
            passed_over = [f"{s.name}: {s.reason}" for s in ladder if not s.available]
            logger.info(
                "executor: %s (%s)%s",
                status.name,
                status.reason,
                "; passed over " + " | ".join(passed_over) if name == "auto" and passed_over else "",
            )
            return HostExecutor()
    raise AssertionError("the host executor is always available")
