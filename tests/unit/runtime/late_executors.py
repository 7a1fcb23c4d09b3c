"""Executors whose device runs ahead of the host, in plain Python: what the core sees of a loop on a real device."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Generator, Sequence

import torch

from draftgraph.graphs import HostExecutor, Program

_ENDED = object()


class LateExecutor:
    """Runs up to `most` rounds between two looks of the host, and learns of a pause one round late.

    Checks on the way that the host changes nothing of the state but `DecodeState.host` while the loop may be running.
    """

    name = "late"

    def __init__(self, seed: int = 0, most: int = 5) -> None:
        self.watched: list[torch.Tensor] = []
        """More tensors that the host must not change meanwhile."""
        self.entered: list[str] = []
        """The program of each loop so far."""
        self.began: list[int] = []
        """Rounds that had been run when each loop began."""
        self.rounds_run = 0
        self._random, self._most = random.Random(seed), most

    def run(self, program: Program) -> None:
        HostExecutor().run(program)

    def rounds(self, program: Program) -> Generator[None, None, None]:
        self.entered.append(program.name)
        self.began.append(self.rounds_run)
        state = program.state
        shared = {field.name for field in dataclasses.fields(state.host)}
        tensors = [tensor for name, tensor in state.tensors().items() if name not in shared]
        device = HostExecutor().rounds(program)
        versions: Sequence[int] = ()
        try:
            while True:
                for _ in range(self._random.randint(1, self._most)):
                    if next(device, _ENDED) is _ENDED:
                        return
                    self.rounds_run += 1
                versions = [tensor._version for tensor in [*tensors, *self.watched]]
                yield
                assert versions == [tensor._version for tensor in [*tensors, *self.watched]]
        except GeneratorExit:
            assert versions == [tensor._version for tensor in [*tensors, *self.watched]]
            assert state.host.pause[0]
            late = sum(1 for _ in device)
            self.rounds_run += late
            assert late <= 1
            raise


class ThreadedExecutor:
    """Runs the loop in a thread of its own, while the host looks whenever it likes."""

    name = "threaded"

    def __init__(self) -> None:
        self.watched: list[torch.Tensor] = []
        self.entered: list[str] = []

    def run(self, program: Program) -> None:
        HostExecutor().run(program)

    def rounds(self, program: Program) -> Generator[None, None, None]:
        self.entered.append(program.name)
        failures: list[BaseException] = []

        def work() -> None:
            try:
                for _ in HostExecutor().rounds(program):
                    pass
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            while thread.is_alive():
                time.sleep(1e-4)
                yield
        finally:
            thread.join(timeout=60)
            assert not thread.is_alive()
            if failures:
                raise failures[0]
