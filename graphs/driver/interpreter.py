"""Runs a recorded graph on CPU tensors, as a device would run the real one."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import torch

from .protocol import ConditionalKind, Kernel, NoOp, Publish, SetIf, SetSwitch, SetWhile
from .record import Conditional, RecordedGraph, RecordedHandle, RecordedNode, RecordedStep

_INT64 = 1 << 64


def interpret(graph: RecordedGraph, on_publish: Callable[[Publish], None] | None = None) -> None:
    """Runs one launch; `on_publish` is called after each `Publish` kernel."""
    with torch.inference_mode():
        _Launch(on_publish).run(graph)


def running_order(graph: RecordedGraph) -> tuple[RecordedNode, ...]:
    """An order that the edges allow: of the nodes that could run next always the one added last.

    A device may run nodes without an edge between them in any order, so this one differs from the order in which they
    were added wherever an edge is missing.
    """
    number = {node: index for index, node in enumerate(graph.nodes)}
    waits_for = {node: len(node.after) for node in graph.nodes}
    followers: dict[RecordedNode, list[RecordedNode]] = {node: [] for node in graph.nodes}
    for node in graph.nodes:
        for earlier in node.after:
            followers[earlier].append(node)
    ready = [-number[node] for node in graph.nodes if not waits_for[node]]
    heapq.heapify(ready)
    order = []
    while ready:
        node = graph.nodes[-heapq.heappop(ready)]
        order.append(node)
        for follower in followers[node]:
            waits_for[follower] -= 1
            if not waits_for[follower]:
                heapq.heappush(ready, -number[follower])
    return tuple(order)


class _Launch:
    """One launch: what the handles hold."""

    def __init__(self, on_publish: Callable[[Publish], None] | None) -> None:
        self._on_publish = on_publish
        self._set: dict[RecordedHandle, int] = {}
        self._orders: dict[RecordedGraph, tuple[RecordedNode, ...]] = {}

    def run(self, graph: RecordedGraph) -> None:
        if isinstance(graph, RecordedStep):
            graph.fn()
            return
        if graph not in self._orders:
            self._orders[graph] = running_order(graph)
        for node in self._orders[graph]:
            if node.child is not None:
                self.run(node.child)
            elif node.kernel is not None:
                self._kernel(node.kernel)
            elif node.conditional is not None:
                self._conditional(node.conditional)

    def _value(self, handle: RecordedHandle) -> int:
        return self._set.get(handle, handle.default)

    def _conditional(self, conditional: Conditional) -> None:
        handle, bodies = conditional.handle, conditional.bodies
        match conditional.kind:
            case ConditionalKind.WHILE:
                while self._value(handle):
                    self.run(bodies[0])
            case ConditionalKind.IF:
                chosen = 0 if self._value(handle) else 1
                if chosen < len(bodies):
                    self.run(bodies[chosen])
            case ConditionalKind.SWITCH:
                value = self._value(handle)
                if value < len(bodies):
                    self.run(bodies[value])

    def _kernel(self, kernel: Kernel) -> None:
        match kernel:
            case SetWhile():
                self._set[kernel.handle] = int(bool(kernel.flag))
            case SetSwitch():
                index = int(kernel.index)
                self._set[kernel.handle] = index if 0 <= index < kernel.branches else kernel.branches
            case SetIf():
                self._set[kernel.handle] = int(int(kernel.index) == kernel.branch)
            case Publish():
                _publish(kernel)
                if self._on_publish is not None:
                    self._on_publish(kernel)
            case NoOp():
                pass


def _publish(kernel: Publish) -> None:
    kernel.count.add_(1)
    index = 0 if kernel.index is None else int(kernel.index)
    word = (int(kernel.count) << 32 | (index & 0x7FFFFFFF) << 1 | int(bool(kernel.flag))) % _INT64
    kernel.word.fill_(word - _INT64 if word >= _INT64 // 2 else word)
