"""What the graph builder asks of a driver: create graphs, add nodes, instantiate, launch.

Implementations: `cuda.py` over cuda.bindings, and `recording.py`, which needs no GPU, enforces CUDA's documented rules
and can run what it recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, TypeAlias

import torch

Graph: TypeAlias = Any
"""A driver's graph: a template that can be instantiated, or become a child of another."""
Node: TypeAlias = Any
"""A node of a graph, for naming what another node comes after."""
Handle: TypeAlias = Any
"""The value that one conditional node reads."""
Executable: TypeAlias = Any
"""An instantiated graph."""


class NodeKind(StrEnum):
    """Kinds of graph nodes, as CUDA names them."""

    KERNEL = "kernel"
    MEMCPY = "memcpy"
    MEMSET = "memset"
    EMPTY = "empty"
    CHILD_GRAPH = "child graph"
    CONDITIONAL = "conditional"
    HOST = "host"
    EVENT_RECORD = "event record"
    EVENT_WAIT = "event wait"
    MEM_ALLOC = "memory allocation"
    MEM_FREE = "memory free"
    EXTERNAL_SEMAPHORE = "external semaphore"
    BATCH_MEM_OP = "batch memory operation"
    OTHER = "other"


ALLOWED_IN_BODY = frozenset(
    {
        NodeKind.KERNEL,
        NodeKind.EMPTY,
        NodeKind.MEMCPY,
        NodeKind.MEMSET,
        NodeKind.CHILD_GRAPH,
        NodeKind.CONDITIONAL,
    }
)
"""What the body of a conditional node may hold (CUDA programming guide, conditional graph nodes)."""


class ConditionalKind(StrEnum):
    """Kinds of conditional nodes."""

    IF = "if"
    """Runs its body once if the value is not 0. CUDA 12.4."""
    WHILE = "while"
    """Runs its body while the value is not 0, tested before each time. CUDA 12.4."""
    SWITCH = "switch"
    """Runs body n if the value is n, none if it is the number of bodies or more. CUDA 12.8."""


@dataclass(frozen=True)
class SetWhile:
    """A kernel: the handle becomes 1 if the flag is true, else 0. For WHILE."""

    handle: Handle
    flag: torch.Tensor
    """bool [1], on the device."""

    def __post_init__(self) -> None:
        _require_one("SetWhile flag", self.flag, torch.bool)


@dataclass(frozen=True)
class SetSwitch:
    """A kernel: the handle becomes the index, or the number of branches if it is out of range. For SWITCH."""

    handle: Handle
    index: torch.Tensor
    """int32 [1], on the device."""
    branches: int

    def __post_init__(self) -> None:
        _require_one("SetSwitch index", self.index, torch.int32)
        if self.branches < 1:
            raise ValueError(f"SetSwitch branches must be at least 1, got {self.branches}")


@dataclass(frozen=True)
class SetIf:
    """A kernel: the handle becomes 1 if the index is `branch`, else 0. For IF, where SWITCH is missing."""

    handle: Handle
    index: torch.Tensor
    """int32 [1], on the device."""
    branch: int

    def __post_init__(self) -> None:
        _require_one("SetIf index", self.index, torch.int32)
        if self.branch < 0:
            raise ValueError(f"SetIf branch must be at least 0, got {self.branch}")


@dataclass(frozen=True)
class Publish:
    """A kernel: tells the host how a loop stands, in one word that it stores with release order at system scope.

    The round number goes up by one, then word = (round number << 32) | (index & 0x7FFFFFFF) << 1 | flag; of the round
    number the low 32 bits are left. So the first word that a new `count` gives has round number 1.
    """

    flag: torch.Tensor
    """bool [1], on the device."""
    index: torch.Tensor | None
    """int32 [1], on the device; None publishes 0."""
    count: torch.Tensor
    """int64 [1], on the device: the round number, kept from one launch to the next."""
    word: torch.Tensor
    """int64 [1]: the device's view of memory that the host polls: device memory, or pinned memory of the host."""

    def __post_init__(self) -> None:
        _require_one("Publish flag", self.flag, torch.bool)
        if self.index is not None:
            _require_one("Publish index", self.index, torch.int32)
        _require_one("Publish count", self.count, torch.int64)
        _require_one("Publish word", self.word, torch.int64)


@dataclass(frozen=True)
class NoOp:
    """A kernel that does nothing, for a body that would be empty: drivers before r570 hang on those."""


SetKernel: TypeAlias = SetWhile | SetSwitch | SetIf
"""The kernels that set a handle."""
Kernel: TypeAlias = SetWhile | SetSwitch | SetIf | Publish | NoOp
"""The kernels that graphs/ brings along; each runs as a single thread."""


def _require_one(what: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.numel() != 1 or tensor.dtype != dtype:
        raise ValueError(f"{what} must be a tensor of one {dtype}, got {tensor.dtype} {list(tensor.shape)}")


class GraphError(RuntimeError):
    """A graph that CUDA would refuse, or that it did refuse: says which step or node, and which rule."""


class GraphDriver(Protocol):
    """Builds and launches graphs. Methods raise `GraphError` where a rule is broken or a call fails."""

    name: str
    has_switch: bool
    """Whether SWITCH nodes exist here."""

    def create_graph(self) -> Graph:
        """An empty graph."""

    def create_handle(self, graph: Graph, default: int) -> Handle:
        """A conditional handle, for one node of `graph` or of a body inside it; `default` when a launch starts."""

    def add_child(self, graph: Graph, child: Graph, after: Sequence[Node]) -> Node:
        """Adds `child`, which the driver clones; what it was captured from must be kept alive.

        The CUDA driver also takes a `torch.cuda.CUDAGraph` that keeps its graph, and then keeps it alive itself.
        """

    def add_conditional(
        self, graph: Graph, kind: ConditionalKind, handle: Handle, bodies: int, after: Sequence[Node]
    ) -> tuple[Node, tuple[Graph, ...]]:
        """Adds a conditional node; returns it and its empty bodies, to be filled before instantiation."""

    def add_kernel(self, graph: Graph, kernel: Kernel, after: Sequence[Node]) -> Node:
        """Adds one of this package's kernels."""

    def node_kinds(self, graph: Graph) -> tuple[NodeKind, ...]:
        """The kinds of all nodes, those inside child graphs included."""

    def instantiate(self, graph: Graph) -> Executable:
        """Makes the graph launchable. A graph with conditional nodes can be instantiated once."""

    def upload(self, executable: Executable, stream: Any) -> None:
        """Moves an executable to the device ahead of its first launch."""

    def launch(self, executable: Executable, stream: Any) -> None:
        """Launches; returns at once. `stream` is a `torch.cuda.Stream` or the address of one."""

    def destroy(self, executable: Executable) -> None:
        """Frees an executable once its last launch is over. So does dropping it; doing both is allowed."""
