"""The program algebra: a round as data, so that one program runs under any executor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch

from .state import DecodeState


@dataclass(frozen=True)
class Step:
    """A function of the decode state, captured as one graph.

    It mutates the state in place, returns nothing, has fixed shapes and never waits for the device.
    """

    name: str
    """What error messages, profiles and captures call it."""
    fn: Callable[[DecodeState], None]


@dataclass(frozen=True, init=False)
class Sequence:
    """Nodes run one after another."""

    nodes: tuple[Node, ...]

    def __init__(self, *nodes: Node) -> None:
        object.__setattr__(self, "nodes", nodes)


@dataclass(frozen=True)
class While:
    """Runs `body` again and again while `flag` is true; tests before the first time."""

    flag: torch.Tensor
    """bool [1], on the device."""
    body: Node

    def __post_init__(self) -> None:
        _require_scalar("While flag", self.flag, (torch.bool,))


@dataclass(frozen=True)
class Switch:
    """Runs branch `index`, or none when `index` is out of range."""

    index: torch.Tensor
    """int32 [1], on the device."""
    branches: tuple[Node, ...]

    def __post_init__(self) -> None:
        _require_scalar("Switch index", self.index, (torch.int32,))
        if not self.branches:
            raise ValueError("a Switch needs at least one branch")


Node: TypeAlias = Step | Sequence | While | Switch


@dataclass(frozen=True)
class Program:
    """A node and the state it works on."""

    name: str
    root: Node
    state: DecodeState

    def steps(self) -> Iterator[Step]:
        """Every step of the program, each branch of a switch included, in program order."""
        yield from _steps(self.root)


def _steps(node: Node) -> Iterator[Step]:
    match node:
        case Step():
            yield node
        case Sequence():
            for child in node.nodes:
                yield from _steps(child)
        case While():
            yield from _steps(node.body)
        case Switch():
            for child in node.branches:
                yield from _steps(child)


def map_steps(node: Node, change: Callable[[Step], Step]) -> Node:
    """The same node with every step in it replaced by what `change` makes of it."""
    match node:
        case Step():
            return change(node)
        case Sequence():
            return Sequence(*(map_steps(child, change) for child in node.nodes))
        case While():
            return While(node.flag, map_steps(node.body, change))
        case Switch():
            return Switch(node.index, tuple(map_steps(child, change) for child in node.branches))


def _require_scalar(what: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.numel() != 1 or tensor.dtype not in dtypes:
        raise ValueError(
            f"{what} must be a tensor of one {' or '.join(str(d) for d in dtypes)}, "
            f"got {tensor.dtype} {list(tensor.shape)}"
        )
