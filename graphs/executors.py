"""Which executors there are, which of them this machine can use, and how one is chosen."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from .capture import CaptureReport, TorchCapture
from .driver.stream import TorchStream
from .host_executor import HostExecutor
from .loop_executor import LoopExecutor
from .probe import probe
from .program import Program
from .round_executor import RoundExecutor
from .step_trace import ObserveOps, StepTrace

logger = logging.getLogger("draftgraph.graphs")


class Executor(Protocol):
    """Runs programs. Every executor gives the same tokens for the same program."""

    name: str

    @property
    def report(self) -> CaptureReport:
        """Which graphs were captured so far."""

    def prepare(self, program: Program, progress: Callable[[str], None] | None = None) -> None:
        """Compiles and captures all that a program needs, which otherwise happens when it first runs.

        Changes nothing that matters, so it may be called between any two rounds. `progress` is called with the name of
        each step that takes time.
        """

    def run(self, program: Program) -> None:
        """Runs the whole program. What the host asks of the device afterwards comes after it."""

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

_HOST = ExecutorStatus("host", True, "plain Python; works on every device")


def available_executors(
    device: torch.device | str, cache_directory: Path | None = None, *, fresh: bool = False
) -> list[ExecutorStatus]:
    """The ladder of executors for `device`, best first.

    Args:
        device: where programs would run.
        cache_directory: where the answer of a CUDA device is kept; None keeps none.
        fresh: try again what an earlier process found out.
    """
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        return [ExecutorStatus(name, False, "needs a CUDA device") for name in EXECUTOR_NAMES[:-1]] + [_HOST]
    found = probe(device, cache_directory, fresh=fresh)
    return [ExecutorStatus(name, found[name].works, found[name].reason) for name in EXECUTOR_NAMES[:-1]] + [_HOST]


def select_executor(
    name: str, device: torch.device | str, cache_directory: Path | None = None
) -> tuple[ExecutorStatus, tuple[ExecutorStatus, ...]]:
    """The executor called `name`, or for "auto" the best that `device` offers; and those better ones passed over.

    Raises `ValueError` for an unknown name, and for one that does not work here, saying why.
    """
    if name not in ("auto", *EXECUTOR_NAMES):
        raise ValueError(f"executor must be one of auto, {', '.join(EXECUTOR_NAMES)}; got {name!r}")
    ladder = [_HOST] if name == "host" else available_executors(device, cache_directory)
    if name == "auto":
        best = next(index for index, status in enumerate(ladder) if status.available)  # the host's always is
        return ladder[best], tuple(ladder[:best])
    status = next(status for status in ladder if status.name == name)
    if not status.available:
        raise ValueError(f"executor {name!r} cannot be used on {device}: {status.reason}")
    return status, ()


def choose_executor(
    name: str,
    device: torch.device | str,
    cache_directory: Path | None = None,
    observe_ops: ObserveOps | None = None,
) -> Executor:
    """Creates what `select_executor` selects, and logs what was taken and why in one line."""
    taken, passed_over = select_executor(name, device, cache_directory)
    others = " | ".join(f"{status.name}: {status.reason}" for status in passed_over)
    logger.info("executor: %s (%s)%s", taken.name, taken.reason, f"; passed over {others}" if others else "")
    return create_executor(taken.name, torch.device(device), observe_ops)


def create_executor(name: str, device: torch.device, observe_ops: ObserveOps | None = None) -> Executor:
    """Creates an executor without asking whether it works here; with `observe_ops` its graphs trace their ops."""
    if name == "host":
        return HostExecutor()
    from .driver.cuda import CudaDriver  # needs cuda-bindings, which a machine without a GPU may lack

    driver = CudaDriver()
    made = {"round": RoundExecutor, "loop": LoopExecutor}[name]
    trace = None if observe_ops is None else StepTrace(device, observe_ops)
    return made(driver, TorchCapture(driver, device, trace), TorchStream(device))
