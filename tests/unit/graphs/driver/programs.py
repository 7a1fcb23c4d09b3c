"""Random programs that surely end, over a few small integers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

from draftgraph.graphs import DecodeState, Node, Program, Sequence, StateShape, Step, Switch, While
from draftgraph.graphs.driver.recording import RecordingDriver

SHAPE = StateShape(slots=1, context=4, num_drafts=1, vocab_size=3, max_bucket=1, max_width=4)
CELLS = 4

# A program as plain data: ("step", target, source, factor, term) | ("sequence", [..]) | ("while", passes, cell, body)
# | ("switch", cell, [..]).
Plan = tuple[Any, ...]

_cells = st.integers(0, CELLS - 1)
_steps = st.tuples(st.just("step"), _cells, _cells, st.integers(-2, 2), st.integers(-3, 3))


def _larger(plans: st.SearchStrategy[Plan]) -> st.SearchStrategy[Plan]:
    return st.one_of(
        st.tuples(st.just("sequence"), st.lists(plans, max_size=4)),
        st.tuples(st.just("while"), st.integers(0, 3), _cells, plans),
        st.tuples(st.just("switch"), _cells, st.lists(plans, min_size=1, max_size=4)),
    )


plans: st.SearchStrategy[Plan] = st.recursive(_steps, _larger, max_leaves=12)


@dataclass
class World:
    """One copy of everything that a random program changes."""

    cells: torch.Tensor = field(default_factory=lambda: torch.tensor([1, -1, 2, 0], dtype=torch.int32))
    log: list[str] = field(default_factory=list)
    flags: list[torch.Tensor] = field(default_factory=list)
    state: DecodeState = field(default_factory=lambda: DecodeState.allocate(SHAPE, dtype=torch.float32, device="cpu"))

    def program(self, plan: Plan) -> Program:
        return Program("random", self._node(plan, "p"), self.state)

    def outcome(self) -> tuple[list[int], list[str], list[bool]]:
        return self.cells.tolist(), self.log, [bool(flag) for flag in self.flags]

    def step(self, name: str, change: Callable[[], object]) -> Step:
        def run(state: DecodeState) -> None:
            self.log.append(name)
            change()

        return Step(name, run)

    def _node(self, plan: Plan, path: str) -> Node:
        match plan:
            case ("step", target, source, factor, term):

                def change() -> None:
                    value = self.cells[target] * factor + self.cells[source] + term
                    self.cells[target] = torch.remainder(value, 7) - 2  # out of a switch's range now and then

                return self.step(path, change)
            case ("sequence", parts):
                return Sequence(*(self._node(part, f"{path}.{n}") for n, part in enumerate(parts)))
            case ("switch", cell, parts):
                branches = tuple(self._node(part, f"{path}.{n}") for n, part in enumerate(parts))
                return Switch(self.cells[cell : cell + 1], branches)
            case ("while", passes, cell, body):
                return self._while(passes, cell, body, path)
        raise AssertionError(plan)

    def _while(self, passes: int, cell: int, body: Plan, path: str) -> Node:
        """A loop of at most `passes` passes, which ends early where a cell says so."""
        fuel, flag = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.bool)
        self.flags.append(flag)

        def start() -> None:
            fuel.fill_(passes)
            flag.copy_(fuel > 0)

        def tick() -> None:
            fuel.sub_(1)
            flag.copy_((fuel > 0) & (self.cells[cell] != 4))

        loop = While(flag, Sequence(self._node(body, path + "w"), self.step(path + "-", tick)))
        return Sequence(self.step(path + "+", start), loop)


def record_steps(driver: RecordingDriver, program: Program) -> dict[Step, Any]:
    """A recorded graph for every step of a program."""
    return {step: driver.record_call(step.name, lambda step=step: step.fn(program.state)) for step in program.steps()}
