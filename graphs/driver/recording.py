"""A driver that needs no GPU: records what is built, enforces CUDA's rules, and runs the record on CPU tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from . import rules
from .interpreter import interpret
from .protocol import ConditionalKind, GraphError, Kernel, NodeKind, Publish
from .record import (
    Conditional,
    RecordedExecutable,
    RecordedGraph,
    RecordedHandle,
    RecordedNode,
    RecordedStep,
)


class RecordingDriver:
    """Implements `GraphDriver` without CUDA.

    A launch runs the record to its end before it returns. Streams are not looked at and may be None.
    """

    name = "recording"

    def __init__(
        self,
        *,
        has_switch: bool = True,
        context: str = "context 0",
        on_publish: Callable[[Publish], None] | None = None,
    ) -> None:
        """Creates a driver.

        Args:
            has_switch: whether it knows what CUDA 12.8 brought: SWITCH nodes, and IF nodes with two bodies.
            context: the context in which graphs are made; may be set anew at any time.
            on_publish: called after each `Publish` kernel of a launch, in place of a host that polls meanwhile.
        """
        self.has_switch = has_switch
        self.context = context
        self.on_publish = on_publish
        self.launches = 0
        """Launches of all executables."""
        self._graphs = 0

    def create_graph(self) -> RecordedGraph:
        """An empty graph."""
        self._graphs += 1
        return RecordedGraph(f"graph {self._graphs}")

    def record_call(
        self, name: str, fn: Callable[[], None], kinds: Sequence[NodeKind] = (NodeKind.KERNEL,)
    ) -> RecordedStep:
        """A graph that stands for a captured step.

        Args:
            name: what messages call it.
            fn: what running it does.
            kinds: the kinds of its nodes, which follow one another.
        """
        step = RecordedStep(name, fn=fn)
        for kind in kinds:
            if kind in (NodeKind.CHILD_GRAPH, NodeKind.CONDITIONAL):
                raise GraphError(f"record_call makes plain nodes, not a {kind} node")
            step.nodes.append(RecordedNode(step, kind, tuple(step.nodes[-1:]), self.context))
        return step

    def create_handle(self, graph: RecordedGraph, default: int) -> RecordedHandle:
        """A conditional handle, for one node of `graph` or of a body inside it; `default` when a launch starts."""
        rules.check_open(graph)
        if not 0 <= default < 1 << 32:
            raise GraphError(f"a handle's default must be an unsigned 32-bit number, got {default}")
        handle = RecordedHandle(graph, default, self.context)
        graph.handles.append(handle)
        return handle

    def add_child(self, graph: RecordedGraph, child: RecordedGraph, after: Sequence[RecordedNode]) -> RecordedNode:
        """Adds a copy of `child`."""
        if not isinstance(child, RecordedGraph):
            raise GraphError(f"a child must be a graph of this driver, got {child!r}")
        rules.check_child(graph, child)
        return self._add(graph, after, kind=NodeKind.CHILD_GRAPH, child=child.copy())

    def add_conditional(
        self,
        graph: RecordedGraph,
        kind: ConditionalKind,
        handle: RecordedHandle,
        bodies: int,
        after: Sequence[RecordedNode],
    ) -> tuple[RecordedNode, tuple[RecordedGraph, ...]]:
        """Adds a conditional node; returns it and its empty bodies."""
        rules.check_conditional(graph, kind, handle, bodies, has_switch=self.has_switch, context=self.context)
        names = (f"{graph.name}, {kind} {len(graph.nodes)}, body {index}" for index in range(bodies))
        made = tuple(RecordedGraph(name, owner=graph) for name in names)
        node = self._add(graph, after, kind=NodeKind.CONDITIONAL, conditional=Conditional(kind, handle, made))
        handle.node = node
        return node, made

    def add_kernel(self, graph: RecordedGraph, kernel: Kernel, after: Sequence[RecordedNode]) -> RecordedNode:
        """Adds one of this package's kernels."""
        rules.check_kernel(graph, kernel)
        return self._add(graph, after, kind=NodeKind.KERNEL, kernel=kernel)

    def node_kinds(self, graph: RecordedGraph) -> tuple[NodeKind, ...]:
        """The kinds of all nodes, those inside child graphs included."""
        return graph.kinds()

    def instantiate(self, graph: RecordedGraph) -> RecordedExecutable:
        """Checks the whole graph and makes it launchable."""
        rules.check_instantiation(graph)
        graph.instantiations += 1
        return RecordedExecutable(graph)

    def upload(self, executable: RecordedExecutable, stream: Any) -> None:
        """Counts the upload."""
        _check_executable(executable, "upload").uploads += 1

    def launch(self, executable: RecordedExecutable, stream: Any) -> None:
        """Runs the record to its end."""
        _check_executable(executable, "launch").launches += 1
        self.launches += 1
        interpret(executable.graph, self.on_publish)

    def destroy(self, executable: RecordedExecutable) -> None:
        """Makes the executable unusable."""
        executable.destroyed = True

    def _add(self, graph: RecordedGraph, after: Sequence[RecordedNode], **what: Any) -> RecordedNode:
        rules.check_open(graph)
        if isinstance(graph, RecordedStep):
            raise GraphError(f"graph {graph.name!r} stands for a captured step; nothing is added to it")
        rules.check_after(graph, after)
        node = RecordedNode(graph, after=tuple(after), context=self.context, **what)
        graph.nodes.append(node)
        return node


def _check_executable(executable: Any, action: str) -> RecordedExecutable:
    if not isinstance(executable, RecordedExecutable):
        raise GraphError(f"only an instantiated graph can be used to {action}, got {type(executable).__name__}")
    if executable.destroyed:
        raise GraphError(f"cannot {action} an executable that was destroyed")
    return executable
