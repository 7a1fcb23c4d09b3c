"""One graph for a whole program: steps become child graphs, `While` and `Switch` conditional nodes.

    Sequence        its nodes one after another
    While           SetWhile -> WHILE { body -> SetWhile }
    Switch          SetSwitch -> SWITCH { branches }, or of one branch and without SWITCH nodes:
                    SetIf, one per branch -> IF { branch }, one per branch

So a launch runs the program to its end and the host is not in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from .driver.protocol import (
    ConditionalKind,
    Graph,
    GraphDriver,
    GraphError,
    Kernel,
    NodeKind,
    NoOp,
    Publish,
    SetIf,
    SetSwitch,
    SetWhile,
)
from .driver.protocol import Node as GraphNode
from .driver.rules import forbidden_kind
from .program import Node, Program, Sequence, Step, Switch, While

_After = tuple[GraphNode, ...]
"""What the next node comes after: the last node added, or nothing in an empty graph."""


@dataclass(frozen=True)
class LoopGraphReport:
    """What a program's graph is made of. `str()` of it shows the structure."""

    program: str
    nodes: Mapping[NodeKind, int]
    """Nodes by kind: those of the graph itself, of every body, and of every step wherever it occurs."""
    steps: int
    """Child graphs; a step that occurs twice counts twice."""
    depth: int
    """How deep conditional nodes are nested; 0 without any."""
    structure: tuple[str, ...]
    """One line for each node, indented by nesting."""

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.nodes.items()))
        head = (
            f"{self.program}: {sum(self.nodes.values())} nodes ({kinds}), {self.steps} steps, "
            f"conditional nodes nested {self.depth} deep"
        )
        return "\n".join((head, *(f"  {line}" for line in self.structure)))


@dataclass(frozen=True)
class LoopGraph:
    """A program as one graph, ready to be instantiated."""

    graph: Graph
    report: LoopGraphReport


def build_loop_graph(
    driver: GraphDriver, program: Program, captured: Mapping[Step, Graph], publish: Publish | None = None
) -> LoopGraph:
    """Builds one graph that runs the whole program.

    Args:
        driver: makes the graph.
        program: what to run.
        captured: the graph of every step of the program. The driver clones it into each place where the step occurs.
        publish: a kernel to run at the end of each pass of a `While` that lies in no other `While` and no `Switch`.

    Raises:
        GraphError: a step is missing, or holds a node that a conditional body may not, or there is no such `While`
            for `publish`; names the step.
    """
    builder = _Builder(driver, captured, publish)
    for step in program.steps():
        builder.kinds(step)
    graph = driver.create_graph()
    builder.fill(graph, program.root, (), depth=0)
    if publish is not None and not builder.published:
        raise GraphError(f"program {program.name!r} has no outermost While at whose end a Publish kernel could run")
    report = LoopGraphReport(
        program=program.name,
        nodes=dict(builder.counts),
        steps=builder.steps,
        depth=builder.depth,
        structure=tuple(builder.lines),
    )
    return LoopGraph(graph, report)


class _Builder:
    """Adds nodes in the order in which they run, and notes what it added."""

    def __init__(self, driver: GraphDriver, captured: Mapping[Step, Graph], publish: Publish | None) -> None:
        self._driver, self._captured, self._publish = driver, captured, publish
        self._kinds: dict[Step, tuple[NodeKind, ...]] = {}
        self.counts: Counter[NodeKind] = Counter()
        self.steps = 0
        self.depth = 0
        self.lines: list[str] = []
        self.published = False

    def kinds(self, step: Step) -> tuple[NodeKind, ...]:
        """The kinds of nodes that a step's graph has."""
        if step not in self._kinds:
            if step not in self._captured:
                known = ", ".join(repr(other.name) for other in self._captured) or "none"
                raise GraphError(f"step {step.name!r} was not captured; captured are: {known}")
            self._kinds[step] = self._driver.node_kinds(self._captured[step])
        return self._kinds[step]

    def fill(self, graph: Graph, node: Node, after: _After, depth: int) -> _After:
        """Adds `node` to `graph`, which lies in `depth` conditional nodes; returns what comes next comes after."""
        match node:
            case Step():
                return self._step(graph, node, after, depth)
            case Sequence():
                for child in node.nodes:
                    after = self.fill(graph, child, after, depth)
                return after
            case While():
                return self._while(graph, node, after, depth)
            case Switch():
                return self._switch(graph, node, after, depth)

    def _step(self, graph: Graph, step: Step, after: _After, depth: int) -> _After:
        kinds = self.kinds(step)
        refused = forbidden_kind(kinds, in_body=depth > 0)
        if refused is not None:
            kind, rule = refused
            raise GraphError(f"step {step.name!r} holds a {kind} node: {rule}")
        child = self._driver.add_child(graph, self._captured[step], after)
        own = Counter(kinds)
        self.counts += own
        self.counts[NodeKind.CHILD_GRAPH] += 1
        self.steps += 1
        self._note(depth, f"{step.name}: " + (", ".join(f"{n} {kind}" for kind, n in sorted(own.items())) or "no node"))
        return (child,)

    def _while(self, graph: Graph, node: While, after: _After, depth: int) -> _After:
        handle = self._driver.create_handle(graph, 0)
        after = self._kernel(graph, SetWhile(handle, node.flag), after, depth)
        loop, (body,) = self._conditional(graph, ConditionalKind.WHILE, handle, 1, after, depth)
        last = self.fill(body, node.body, (), depth + 1)
        if self._publish is not None and depth == 0:
            last = self._kernel(body, self._publish, last, depth + 1)
            self.published = True
        self._kernel(body, SetWhile(handle, node.flag), last, depth + 1)
        return loop

    def _switch(self, graph: Graph, node: Switch, after: _After, depth: int) -> _After:
        if not any(_has_nodes(branch) for branch in node.branches):
            return after
        if self._driver.has_switch and len(node.branches) > 1:
            count = len(node.branches)
            handle = self._driver.create_handle(graph, count)
            after = self._kernel(graph, SetSwitch(handle, node.index, count), after, depth)
            switch, bodies = self._conditional(graph, ConditionalKind.SWITCH, handle, count, after, depth)
            for number, (body, branch) in enumerate(zip(bodies, node.branches, strict=True)):
                self._note(depth, f"  branch {number}:")
                self._branch(body, branch, depth + 1)
            return switch
        return self._if_chain(graph, node, after, depth)

    def _if_chain(self, graph: Graph, node: Switch, after: _After, depth: int) -> _After:
        """A `Switch` by IF nodes. All handles are set before the first IF: a branch may change the index."""
        branches = [(number, branch) for number, branch in enumerate(node.branches) if _has_nodes(branch)]
        handles = [self._driver.create_handle(graph, 0) for _ in branches]
        for handle, (number, _) in zip(handles, branches, strict=True):
            after = self._kernel(graph, SetIf(handle, node.index, number), after, depth)
        for handle, (number, branch) in zip(handles, branches, strict=True):
            after, (body,) = self._conditional(graph, ConditionalKind.IF, handle, 1, after, depth, f" branch {number}")
            self._branch(body, branch, depth + 1)
        return after

    def _branch(self, body: Graph, branch: Node, depth: int) -> None:
        last = self.fill(body, branch, (), depth)
        if not self._does_something(branch):
            self._kernel(body, NoOp(), last, depth)

    def _does_something(self, node: Node) -> bool:
        """Whether a node comes out as more than child graphs without work."""
        match node:
            case Step():
                return any(kind not in (NodeKind.EMPTY, NodeKind.CHILD_GRAPH) for kind in self.kinds(node))
            case Sequence():
                return any(self._does_something(child) for child in node.nodes)
            case While():
                return True
            case Switch():
                return any(_has_nodes(branch) for branch in node.branches)

    def _kernel(self, graph: Graph, kernel: Kernel, after: _After, depth: int) -> _After:
        self.counts[NodeKind.KERNEL] += 1
        self._note(depth, _described(kernel))
        return (self._driver.add_kernel(graph, kernel, after),)

    def _conditional(
        self,
        graph: Graph,
        kind: ConditionalKind,
        handle: object,
        bodies: int,
        after: _After,
        depth: int,
        what: str = "",
    ) -> tuple[_After, tuple[Graph, ...]]:
        self.counts[NodeKind.CONDITIONAL] += 1
        self.depth = max(self.depth, depth + 1)
        self._note(depth, f"{kind.upper()}{what}:")
        node, made = self._driver.add_conditional(graph, kind, handle, bodies, after)
        return (node,), made

    def _note(self, depth: int, text: str) -> None:
        self.lines.append("    " * depth + text)


def _has_nodes(node: Node) -> bool:
    """Whether a node comes out as any node of a graph: not so an empty `Sequence`, or a `Switch` between such."""
    match node:
        case Step() | While():
            return True
        case Sequence():
            return any(_has_nodes(child) for child in node.nodes)
        case Switch():
            return any(_has_nodes(branch) for branch in node.branches)


def _described(kernel: Kernel) -> str:
    match kernel:
        case SetWhile():
            return "set while"
        case SetSwitch():
            return f"set switch of {kernel.branches}"
        case SetIf():
            return f"set if index is {kernel.branch}"
        case Publish():
            return "publish"
        case NoOp():
            return "no-op"
