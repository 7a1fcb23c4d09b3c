"""What a recording driver records: graphs, nodes, edges, handles and bodies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .protocol import ConditionalKind, Kernel, NodeKind


@dataclass(eq=False)
class RecordedHandle:
    """The value that one conditional node reads."""

    graph: RecordedGraph
    """The graph it was created for."""
    default: int
    context: str
    node: RecordedNode | None = None
    """The conditional node that reads it."""


@dataclass(frozen=True, eq=False)
class Conditional:
    """What a conditional node holds."""

    kind: ConditionalKind
    handle: RecordedHandle
    bodies: tuple[RecordedGraph, ...]


@dataclass(frozen=True, eq=False)
class RecordedNode:
    """A node; beside its kind it holds what only that kind has."""

    graph: RecordedGraph
    """The graph it was added to."""
    kind: NodeKind
    after: tuple[RecordedNode, ...]
    context: str
    kernel: Kernel | None = None
    """Which of this package's kernels it is; None for kernels of steps."""
    child: RecordedGraph | None = None
    """A copy, made when the node was added."""
    conditional: Conditional | None = None


@dataclass(eq=False)
class RecordedGraph:
    """A graph under construction, or a conditional node's body."""

    name: str
    owner: RecordedGraph | None = None
    """The graph whose conditional node this is a body of."""
    nodes: list[RecordedNode] = field(default_factory=list)
    handles: list[RecordedHandle] = field(default_factory=list)
    instantiations: int = 0

    def copy(self) -> RecordedGraph:
        """A graph with the same nodes, to which later changes of this one do not matter."""
        return RecordedGraph(self.name, None, list(self.nodes), list(self.handles))

    def enclosing(self) -> Iterator[RecordedGraph]:
        """This graph, then the ones whose conditional nodes it lies in, innermost first."""
        graph: RecordedGraph | None = self
        while graph is not None:
            yield graph
            graph = graph.owner

    def has_conditionals(self) -> bool:
        """Whether the graph, or a child graph in it, has a conditional node."""
        return NodeKind.CONDITIONAL in self.kinds()

    def kinds(self) -> tuple[NodeKind, ...]:
        """The kinds of all nodes, those inside child graphs included, those inside bodies not."""
        found: list[NodeKind] = []
        for node in self.nodes:
            found.append(node.kind)
            if node.child is not None:
                found += node.child.kinds()
        return tuple(found)


@dataclass(eq=False)
class RecordedStep(RecordedGraph):
    """A graph that stands for a captured step: nodes of given kinds in a row, and the function that they amount to."""

    fn: Callable[[], None] = lambda: None

    def copy(self) -> RecordedStep:
        """A step with the same nodes and the same function."""
        return RecordedStep(self.name, None, list(self.nodes), list(self.handles), fn=self.fn)


@dataclass(eq=False)
class RecordedExecutable:
    """An instantiated graph."""

    graph: RecordedGraph
    launches: int = 0
    uploads: int = 0
    destroyed: bool = False
