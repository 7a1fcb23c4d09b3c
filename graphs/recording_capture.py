"""Captured executors without a GPU: steps are recorded as calls, and the record runs on CPU tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .capture import CapturedStep, capture_error, run_steps
from .driver.protocol import NodeKind
from .driver.recording import RecordingDriver
from .driver.stream import HostStream
from .graph_executor import GraphExecutor
from .loop_executor import LoopExecutor
from .program import Step
from .round_executor import RoundExecutor
from .state import DecodeState
from .step_trace import StepTrace


class RecordingCapture:
    """Stands in for `TorchCapture`: what a graph of the steps would do is to run them."""

    def __init__(self, driver: RecordingDriver, trace: StepTrace | None = None) -> None:
        self._driver = driver
        self.trace = trace

    def warm_up(self, name: str, steps: Sequence[Step], state: DecodeState) -> int:
        """Runs the steps, as warming up on a device does."""
        try:
            with torch.inference_mode():
                run_steps(name, steps, state)
        except Exception as error:
            raise capture_error(name, error, "failed before capture") from error
        return 0

    def capture(self, name: str, steps: Sequence[Step], state: DecodeState) -> CapturedStep:
        """A graph of one kernel per step; nothing runs now."""
        kinds = (NodeKind.KERNEL,) * len(steps)
        graph = self._driver.record_call(name, lambda: self._call(name, steps, state), kinds)
        return CapturedStep(name=name, graph=graph, kinds=kinds, bytes=0, seconds=0.0, owner=None)

    def _call(self, name: str, steps: Sequence[Step], state: DecodeState) -> None:
        with torch.inference_mode():
            run_steps(name, steps, state, self.trace)


def recorded_executor(
    name: str, driver: RecordingDriver | None = None, trace: StepTrace | None = None
) -> GraphExecutor:
    """The executor "round" or "loop" on a recording driver, for CPU tensors.

    It builds the very graphs that a CUDA device would get, under the same rules, and runs them step by step.
    """
    driver = driver or RecordingDriver()
    made = {RoundExecutor.name: RoundExecutor, LoopExecutor.name: LoopExecutor}[name]
    return made(driver, RecordingCapture(driver, trace), HostStream())
