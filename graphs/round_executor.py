"""Runs a loop as one captured graph per round, which the host launches again and again without waiting for it."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch

from .driver.protocol import Executable, GraphError, Publish
from .driver.stream import DeviceEvent
from .graph_executor import GraphExecutor, straight_steps
from .host_memory import SharedTensor, shared
from .program import Node, Program, Sequence, Step, Switch, While

IN_FLIGHT = 2
"""Rounds launched and not known to have ended: one runs, and the next is there when it ends."""

_NUMBER_MASK = 0xFFFFFFFF
_INDEX_MASK = 0x7FFFFFFF
_POLLS_PER_QUERY = 32
"""Looks at the published word between two questions to the driver whether the device still works."""


@dataclass(frozen=True)
class Stage:
    """A `Switch` of a loop's body, and the steps up to the next one or to the body's end."""

    switch: Switch
    branches: tuple[tuple[Step, ...], ...]
    after: tuple[Step, ...]


@dataclass(frozen=True)
class RoundParts:
    """A loop's body, taken apart at its `Switch` nodes."""

    flag: torch.Tensor
    before: tuple[Step, ...]
    """Before the first `Switch`."""
    stages: tuple[Stage, ...]


@dataclass(frozen=True)
class Published:
    """What the device told the host last: see `Publish`."""

    number: int
    """Rounds published, modulo 2^32."""
    index: int
    flag: bool

    @classmethod
    def parse(cls, word: int) -> Published:
        """Takes a word apart."""
        return cls(word >> 32 & _NUMBER_MASK, word >> 1 & _INDEX_MASK, bool(word & 1))


@dataclass(frozen=True)
class _Loop:
    """A program made ready."""

    first: Executable
    """The whole body if it has no `Switch`, else what comes before the first one."""
    stages: tuple[tuple[Executable, ...], ...]
    """Per `Switch` and branch: the branch and what comes after it, up to the next `Switch`: for the last, to that of
    the next round. The last of a stage is for an index out of range, without a branch."""
    word: SharedTensor

    def published(self) -> Published:
        return Published.parse(int(self.word.host[0]))


class RoundExecutor(GraphExecutor):
    """Launches rounds as graphs; the host learns how a round ended from one word of pinned memory.

    A body without a `Switch` is one graph. It is launched while the one before it runs, so the host sees `flag` one
    round late, and the device never waits for the host. A body with `Switch` nodes is turned round: a graph starts with
    a branch and ends with what comes before the next `Switch`, be it in this round or in the next one, so that its end
    publishes which graph is next. There the device waits for the host, for as long as reading a word and launching
    takes.

    Programs must allow for that:

    - A body run while its flag is false changes nothing that matters: the flag was false one round ago.
    - What comes before the first `Switch` may run once more on an unchanged state: it has run already when the loop is
      left between two rounds, and runs again when the loop is entered. Nor does it change anything that matters while
      the flag is false.

    Supported are a `While` around steps and `Switch` nodes, whose branches are steps; and programs of steps alone.
    """

    name = "round"

    def run(self, program: Program) -> None:
        """Runs the whole program: a loop to its end, steps as one graph that may still run on return."""
        if isinstance(program.root, While):
            for _ in self.rounds(program):
                pass
        else:
            self._launch(program, self._prepared(program))

    def rounds(self, program: Program) -> Generator[None, None, None]:
        """Runs a loop; yields after every round that the host learns of, and after the last.

        Closing the generator launches no further round and waits for what is in flight, one or two rounds.

        Raises:
            GraphError: the program is not a supported loop, or a round failed on the device.
        """
        if not isinstance(program.root, While):
            raise ValueError(f"program {program.name!r} is not a loop: its root is a {type(program.root).__name__}")
        loop: _Loop = self._prepared(program)
        return self._turned(program, loop) if loop.stages else self._relaunched(program, loop)

    def _relaunched(self, program: Program, loop: _Loop) -> Generator[None, None, None]:
        flight = _Flight(loop)
        going = True
        try:
            while going:
                while flight.in_flight < IN_FLIGHT:
                    flight.launched(self._launch(program, loop.first))
                going = self._await(program, flight, flight.seen + 1).flag
                if going:
                    yield
        except GeneratorExit:
            self._await(program, flight, flight.count)
            raise
        self._await(program, flight, flight.count)
        yield

    def _turned(self, program: Program, loop: _Loop) -> Generator[None, None, None]:
        flight, rounds = _Flight(loop), 0
        flight.launched(self._launch(program, loop.first))
        state = self._await(program, flight, flight.count)
        while state.flag:
            left = False
            for number, stage in enumerate(loop.stages):
                flight.launched(self._launch(program, stage[min(state.index, len(stage) - 1)]))
                if number == 0 and rounds > 0:
                    try:
                        yield  # the round before; the device works meanwhile
                    except GeneratorExit:
                        left = True  # with the end of the round that has begun
                state = self._await(program, flight, flight.count)
            if left:
                return
            rounds += 1
        if rounds > 0:
            yield

    def _await(self, program: Program, flight: _Flight, target: int) -> Published:
        """Waits until `target` launches of this flight have published."""
        backoff, looks = self._backoff(), 0
        while True:
            published = flight.look()
            if flight.seen >= target:
                return published
            looks += 1
            if looks % _POLLS_PER_QUERY == 0 and self._passed(program, flight.event):
                published = flight.look()
                if flight.seen >= target:
                    return published
                raise GraphError(f"program {program.name!r} ran on the device, but published nothing")
            backoff.pause()

    def _check(self, program: Program) -> None:
        if straight_steps(program.root) is None:
            take_apart(program)

    def _build(self, program: Program) -> _Loop | Executable:
        steps = straight_steps(program.root)
        if steps is not None:
            return self._instantiate(program, self._graph_of(steps))
        parts = take_apart(program)
        device = parts.flag.device
        word, count = shared((1,), torch.int64, device), torch.zeros(1, dtype=torch.int64, device=device)

        def graph(following: Switch | None, *steps: Step) -> Executable:
            """Steps whose end publishes the index of the `Switch` that comes next."""
            index = None if following is None else following.index
            made = self.driver.create_graph()
            publish = Publish(parts.flag, index, count, word.device)
            self.driver.add_kernel(made, publish, self._append(made, steps, ()))
            return self._instantiate(program, made)

        if not parts.stages:
            return _Loop(graph(None, *parts.before), (), word)
        stages = []
        for number, stage in enumerate(parts.stages):
            ends_round = number == len(parts.stages) - 1
            following = parts.stages[0 if ends_round else number + 1].switch
            after = (*stage.after, *parts.before) if ends_round else stage.after
            stages.append(tuple(graph(following, *branch, *after) for branch in (*stage.branches, ())))
        return _Loop(graph(parts.stages[0].switch, *parts.before), tuple(stages), word)


class _Flight:
    """The launches of one pass through a loop, and how many of them have published."""

    event: DeviceEvent
    """Behind the last launch."""

    def __init__(self, loop: _Loop) -> None:
        self._loop = loop
        self._start = loop.published().number
        self.count = 0
        self.seen = 0

    @property
    def in_flight(self) -> int:
        return self.count - self.seen

    def launched(self, event: DeviceEvent) -> None:
        self.event = event
        self.count += 1

    def look(self) -> Published:
        published = self._loop.published()
        self.seen = published.number - self._start & _NUMBER_MASK
        return published


def take_apart(program: Program) -> RoundParts:
    """The parts of a loop that `RoundExecutor` supports.

    Raises `GraphError`, saying what is supported, for any other program.
    """
    root = program.root
    if not isinstance(root, While):
        raise _unsupported(program, f"a {type(root).__name__} as its root")
    runs: list[list[Step]] = [[]]
    switches: list[tuple[Switch, tuple[tuple[Step, ...], ...]]] = []
    for node in _flat(root.body):
        if isinstance(node, Step):
            runs[-1].append(node)
        elif isinstance(node, Switch):
            parts = [straight_steps(branch) for branch in node.branches]
            if any(part is None for part in parts):
                raise _unsupported(program, "control flow inside a branch")
            switches.append((node, tuple(part for part in parts if part is not None)))
            runs.append([])
        else:
            raise _unsupported(program, "a While inside its loop")
    stages = tuple(
        Stage(switch, branches, tuple(after)) for (switch, branches), after in zip(switches, runs[1:], strict=True)
    )
    return RoundParts(root.flag, tuple(runs[0]), stages)


def _flat(node: Node) -> Generator[Node, None, None]:
    if isinstance(node, Sequence):
        for child in node.nodes:
            yield from _flat(child)
    else:
        yield node


def _unsupported(program: Program, what: str) -> GraphError:
    return GraphError(
        f"program {program.name!r} has {what}; the executor 'round' supports a While around steps and Switches of "
        "steps, and programs of steps alone; 'loop' and 'host' support every program"
    )
