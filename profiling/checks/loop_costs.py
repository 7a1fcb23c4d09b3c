"""What a round costs beside its kernels: empty rounds run through an executor, and launches of graphs of many nodes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ...graphs import DecodeState, Executor, Program, Sequence, StateShape, Step, Switch, While

REPEATS = 5


@dataclass(frozen=True)
class LoopCost:
    """Empty rounds through one executor."""

    executor: str
    body: str
    """What a round holds."""
    rounds: int
    microseconds_per_round: float
    """Wall time of the whole loop over its rounds, the median of `REPEATS` loops."""

    def to_dict(self) -> dict[str, Any]:
        """In types that JSON has."""
        return asdict(self)


@dataclass(frozen=True)
class LaunchCost:
    """One step of many small kernels, launched once."""

    executor: str
    kernels: int
    host_microseconds: float
    """Until the call returned."""
    total_microseconds: float
    """Until the device was done."""

    def to_dict(self) -> dict[str, Any]:
        """In types that JSON has."""
        return asdict(self)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _state(device: torch.device) -> DecodeState:
    shape = StateShape(slots=1, context=8, num_drafts=0, vocab_size=8, max_bucket=1, max_width=4)
    return DecodeState.allocate(shape, dtype=torch.float32, device=device)


@dataclass(frozen=True)
class CountdownLoop:
    """A loop that runs a given number of rounds and does nothing else."""

    program: Program
    left: torch.Tensor
    """int64 [1]: rounds left."""

    @classmethod
    def build(cls, device: torch.device, *, kernels: int, branches: int) -> CountdownLoop:
        """A loop whose rounds have `kernels` small kernels and, above 0 `branches`, a switch over as many widths."""
        state = _state(device)
        left = torch.zeros(1, dtype=torch.int64, device=device)
        work = torch.zeros(64, device=device)

        def count(s: DecodeState) -> None:
            left.sub_(1)
            torch.gt(left, 0, out=s.running)

        def small(s: DecodeState) -> None:
            work.add_(1.0)

        nodes: list[Any] = [Step(f"small[{index}]", small) for index in range(kernels)]
        if branches:
            nodes.append(Switch(state.width_index, tuple(Step(f"branch[{i}]", small) for i in range(branches))))
        nodes.append(Step("count", count))
        name = f"countdown[{kernels}, {branches}]"
        return cls(Program(name, While(state.running, Sequence(*nodes)), state), left)

    def run(self, executor: Executor, rounds: int) -> float:
        """Runs `rounds` rounds; the seconds until the device is done."""
        device = self.program.state.device
        self.left.fill_(rounds)
        self.program.state.running.fill_(True)
        _synchronize(device)
        start = time.perf_counter()
        for _ in executor.rounds(self.program):
            pass
        _synchronize(device)
        seconds = time.perf_counter() - start
        if int(self.left) > 0:
            raise RuntimeError(
                f"executor {executor.name!r} left the loop with {int(self.left)} of {rounds} rounds to go"
            )
        return seconds


def loop_costs(executor: Executor, device: torch.device, rounds: int = 1000) -> Iterator[LoopCost]:
    """Times empty rounds: of one kernel, of five, and of five and a switch over four widths."""
    for body, kernels, branches in (("1 step", 0, 0), ("5 steps", 4, 0), ("5 steps and a switch", 3, 4)):
        loop = CountdownLoop.build(device, kernels=kernels, branches=branches)
        loop.run(executor, 3)  # captures
        seconds = statistics.median(loop.run(executor, rounds) for _ in range(REPEATS))
        yield LoopCost(executor.name, body, rounds, 1e6 * seconds / rounds)


def launch_costs(
    executor: Executor, device: torch.device, sizes: tuple[int, ...] = (1, 10, 100, 1000)
) -> Iterator[LaunchCost]:
    """Times one launch of a step of so many small kernels."""
    for kernels in sizes:
        state, work = _state(device), torch.zeros(64, device=device)

        def step(s: DecodeState, kernels: int = kernels, work: torch.Tensor = work) -> None:
            for _ in range(kernels):
                work.add_(1.0)

        program = Program(f"kernels[{kernels}]", Step(f"kernels[{kernels}]", step), state)
        executor.run(program)  # captures
        host, total = [], []
        for _ in range(REPEATS):
            _synchronize(device)
            start = time.perf_counter()
            executor.run(program)
            host.append(time.perf_counter() - start)
            _synchronize(device)
            total.append(time.perf_counter() - start)
        yield LaunchCost(executor.name, kernels, 1e6 * statistics.median(host), 1e6 * statistics.median(total))
