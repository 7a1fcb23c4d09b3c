"""Runs a whole program as one graph: one launch generates until a row finishes, and the host only reads."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from .driver.protocol import Executable, GraphError
from .graph_executor import GraphExecutor
from .loop_graph import LoopGraphReport, build_loop_graph
from .program import Program, While


@dataclass(frozen=True)
class _Whole:
    """A program made ready."""

    executable: Executable
    report: LoopGraphReport


class LoopExecutor(GraphExecutor):
    """One graph per program, with `While` and `Switch` as conditional nodes; the device decides when to stop.

    Supports every program. Graphs are instantiated and uploaded once, ahead of the first launch. While one runs, the
    host learns of tokens from `DecodeState.host.published` and of the end from an event.
    """

    name = "loop"

    def run(self, program: Program) -> None:
        """Launches the whole program; returns at once, and what is launched after it runs after it."""
        self._launch(program, self._prepared(program).executable)

    def rounds(self, program: Program) -> Generator[None, None, None]:
        """Launches a loop once; yields whenever rows have published something, and at the end.

        Closing the generator waits for the end of the launch. The host has set `pause` before; without it that is when
        the loop ends by itself.

        Raises:
            GraphError: the loop failed on the device.
        """
        if not isinstance(program.root, While):
            raise ValueError(f"program {program.name!r} is not a loop: its root is a {type(program.root).__name__}")
        return self._watch(program, self._prepared(program).executable)

    def structure(self, program: Program) -> LoopGraphReport:
        """What the program's graph is made of, which is built if need be."""
        return self._prepared(program).report

    def _watch(self, program: Program, executable: Executable) -> Generator[None, None, None]:
        published = program.state.host.published.numpy()
        seen = published.tobytes()
        event = self._launch(program, executable)
        backoff = self._backoff()
        try:
            ended = False
            while not ended:
                # Asked before the words are read: what was published before the end is then seen.
                ended = self._passed(program, event)
                now = published.tobytes()
                if now != seen or ended:
                    seen = now
                    yield
                    backoff.reset()
                else:
                    backoff.pause()
        except GeneratorExit:
            self._wait(program, event)
            raise

    def _check(self, program: Program) -> None:
        pass

    def _build(self, program: Program) -> _Whole:
        captured = {step: self._steps[step].graph for step in program.steps()}
        try:
            built = build_loop_graph(self.driver, program, captured)
        except GraphError as error:
            raise GraphError(f"program {program.name!r}: {error}") from error
        return _Whole(self._instantiate(program, built.graph), built.report)
