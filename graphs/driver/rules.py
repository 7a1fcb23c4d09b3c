"""What CUDA's documentation forbids about graphs with conditional nodes, checked on a record.

Sources: the CUDA programming guide, "Conditional Graph Nodes", and the driver API's pages on `cuGraphAddNode`,
`cuGraphConditionalHandleCreate`, `cuGraphInstantiate`, `CUDA_CONDITIONAL_NODE_PARAMS` and
`CUDA_CHILD_GRAPH_NODE_PARAMS`. A broken rule is a `GraphError` that states it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .protocol import (
    ALLOWED_IN_BODY,
    ConditionalKind,
    GraphError,
    Kernel,
    NodeKind,
    SetIf,
    SetKernel,
    SetSwitch,
    SetWhile,
)
from .record import Conditional, RecordedGraph, RecordedHandle, RecordedNode

REFUSED_IN_CHILD: dict[NodeKind, str] = {
    NodeKind.CONDITIONAL: "a graph with conditional nodes cannot become a child graph",
    NodeKind.MEM_ALLOC: "a graph that allocates memory cannot be cloned into a child graph",
    NodeKind.MEM_FREE: "a graph that frees memory cannot be cloned into a child graph",
}
"""Node kinds that no child graph may have, at whatever depth, and why."""

_SETTERS: dict[type[SetKernel], tuple[ConditionalKind, ...]] = {
    SetWhile: (ConditionalKind.WHILE, ConditionalKind.IF),
    SetSwitch: (ConditionalKind.SWITCH,),
    SetIf: (ConditionalKind.IF,),
}
"""Which nodes read what each kernel sets."""


def forbidden_kind(kinds: Iterable[NodeKind], in_body: bool) -> tuple[NodeKind, str] | None:
    """The first kind that a child graph with such nodes may not have, and the rule; None if it may be added."""
    for kind in kinds:
        if kind in REFUSED_IN_CHILD:
            return kind, REFUSED_IN_CHILD[kind]
        if in_body and kind not in ALLOWED_IN_BODY:
            allowed = ", ".join(sorted(ALLOWED_IN_BODY))
            return kind, f"the body of a conditional node may hold only these: {allowed}"
    return None


def check_after(graph: RecordedGraph, after: Sequence[RecordedNode]) -> None:
    """Checks what a new node of `graph` is to come after."""
    for node in after:
        if not isinstance(node, RecordedNode):
            raise GraphError(f"`after` must name nodes of this driver, got {node!r}")
        if node.graph is not graph:
            raise GraphError(
                f"a node of graph {graph.name!r} cannot come after a node of graph {node.graph.name!r}: "
                "edges join nodes of one graph"
            )
    if len(set(after)) != len(after):
        raise GraphError(f"a node of graph {graph.name!r} names a node twice in `after`: dependencies are distinct")


def check_open(graph: RecordedGraph) -> None:
    """Checks that nodes may still be added, in this graph and all around it."""
    for outer in graph.enclosing():
        if outer.instantiations:
            raise GraphError(f"graph {outer.name!r} is instantiated: a node added to it now would be in no executable")


def check_child(graph: RecordedGraph, child: RecordedGraph) -> None:
    """Checks that `child` may become a child graph of `graph`."""
    if child.owner is not None:
        raise GraphError(f"graph {child.name!r} is the body of a conditional node, and cannot become a child graph")
    if child in graph.enclosing():
        raise GraphError(f"graph {child.name!r} cannot become a child of itself or of a body inside it")
    refused = forbidden_kind(child.kinds(), in_body=graph.owner is not None)
    if refused is not None:
        kind, rule = refused
        raise GraphError(f"graph {child.name!r} holds a {kind} node: {rule}")


def check_conditional(
    graph: RecordedGraph, kind: ConditionalKind, handle: RecordedHandle, bodies: int, *, has_switch: bool, context: str
) -> None:
    """Checks a new conditional node of `graph`."""
    if kind is ConditionalKind.SWITCH and not has_switch:
        raise GraphError("this driver has no SWITCH nodes: they need CUDA 12.8")
    sizes = {ConditionalKind.WHILE: (1, 1), ConditionalKind.IF: (1, 2 if has_switch else 1)}
    least, most = sizes.get(kind, (1, None))
    if bodies < least or (most is not None and bodies > most):
        accepted = "at least 1" if most is None else f"{least} to {most}" if most > least else str(least)
        raise GraphError(f"a conditional node of kind {kind} cannot have {bodies} bodies: accepted is {accepted}")
    if not isinstance(handle, RecordedHandle):
        raise GraphError(f"a conditional node needs a handle of this driver, got {handle!r}")
    if handle.node is not None:
        raise GraphError(f"the handle of a node in graph {handle.node.graph.name!r} is used again: one handle per node")
    if handle.graph not in graph.enclosing():
        raise GraphError(
            f"a conditional node of graph {graph.name!r} cannot read a handle created for graph "
            f"{handle.graph.name!r}: it must be of the graph that holds the node, or of one around it"
        )
    if handle.context != context:
        raise GraphError(
            f"a conditional node in {context} cannot read a handle of {handle.context}: all is in one context"
        )


def check_instantiation(graph: RecordedGraph) -> None:
    """Checks a whole graph."""
    if graph.owner is not None:
        raise GraphError(f"graph {graph.name!r} is the body of a conditional node, and is not instantiated by itself")
    if graph.has_conditionals() and graph.instantiations:
        raise GraphError(f"graph {graph.name!r} has conditional nodes, and such a graph can be instantiated only once")
    _check_level(graph, (graph,))


def _check_level(graph: RecordedGraph, around: tuple[RecordedGraph, ...]) -> None:
    """Checks one graph and those in it; `around` are the graphs it lies in, itself included, at whatever depth."""
    for handle in graph.handles:
        if handle.node is None:
            raise GraphError(f"graph {graph.name!r} has a handle that no conditional node reads")
    for node in graph.nodes:
        if isinstance(node.kernel, SetWhile | SetSwitch | SetIf):
            _check_setter(node, node.kernel, around)
        if node.child is not None:
            _check_level(node.child, (*around, node.child))
        if node.conditional is not None:
            for body in node.conditional.bodies:
                _check_body(node, node.conditional, body)
                _check_level(body, (*around, body))


def _check_setter(node: RecordedNode, kernel: SetKernel, around: tuple[RecordedGraph, ...]) -> None:
    handle: RecordedHandle = kernel.handle
    name = type(kernel).__name__
    if handle.graph not in around:
        raise GraphError(
            f"a {name} kernel in graph {node.graph.name!r} sets a handle created for graph {handle.graph.name!r}: "
            "it must lie in that graph, or in a child graph or a body inside it"
        )
    if node.context != handle.context:
        raise GraphError(
            f"a {name} kernel in {node.context} sets a handle of {handle.context}: a handle is set from its own context"
        )
    reader = handle.node.conditional if handle.node is not None else None
    if reader is None:
        raise GraphError(f"a {name} kernel in graph {node.graph.name!r} sets a handle that no conditional node reads")
    if reader.kind not in _SETTERS[type(kernel)]:
        raise GraphError(f"a {name} kernel sets the handle of a conditional node of kind {reader.kind}")
    if isinstance(kernel, SetSwitch) and kernel.branches != len(reader.bodies):
        raise GraphError(
            f"a SetSwitch kernel of {kernel.branches} branches sets the handle of a node of {len(reader.bodies)} bodies"
        )


def _check_body(node: RecordedNode, conditional: Conditional, body: RecordedGraph) -> None:
    kinds = body.kinds()
    if all(kind in (NodeKind.EMPTY, NodeKind.CHILD_GRAPH) for kind in kinds):
        raise GraphError(
            f"body {body.name!r} has nothing to run: drivers before r570 hang on empty bodies, so add a NoOp kernel"
        )
    refused = next((kind for kind in kinds if kind not in ALLOWED_IN_BODY), None)
    if refused is not None:
        raise GraphError(f"body {body.name!r} holds a {refused} node, which the body of a conditional node may not")
    for context in _contexts(body):
        if context != node.context:
            raise GraphError(
                f"body {body.name!r} of a conditional node in {node.context} holds a kernel of {context}: "
                "all kernels of a body, at any depth, must belong to one context"
            )


def _contexts(graph: RecordedGraph) -> set[str]:
    """The contexts of the nodes of a graph and of its child graphs."""
    found = {node.context for node in graph.nodes}
    for node in graph.nodes:
        if node.child is not None:
            found |= _contexts(node.child)
    return found


def check_kernel(graph: RecordedGraph, kernel: Kernel) -> None:
    """Checks a new kernel of `graph` as far as can be told before the graph is whole."""
    if isinstance(kernel, SetWhile | SetSwitch | SetIf) and not isinstance(kernel.handle, RecordedHandle):
        raise GraphError(
            f"a {type(kernel).__name__} kernel in graph {graph.name!r} needs a handle of this driver, "
            f"got {kernel.handle!r}"
        )
