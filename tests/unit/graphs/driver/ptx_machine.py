"""Runs the kernels of `ptx.MODULE` as one thread on the host's memory, instruction by instruction."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence

WIDTHS = {"b64": 64, "u64": 64, "b32": 32, "u32": 32, "b16": 16, "u16": 16, "u8": 8}
_CELLS = {64: ctypes.c_uint64, 32: ctypes.c_uint32, 8: ctypes.c_uint8}


def entries(module: str) -> dict[str, tuple[list[tuple[str, int]], str]]:
    """Name to (parameters as (name, bits), body)."""
    found = {}
    text = re.sub(r"//.*", "", module)
    for match in re.finditer(r"\.visible \.entry (\w+)\((.*?)\)\n\.maxntid 1, 1, 1\n\{\n(.*?)\n\}\n", text, re.DOTALL):
        name, parameters, body = match.groups()
        found[name] = ([(n, WIDTHS[t]) for t, n in re.findall(r"\.param \.(\w+) (\w+)", parameters)], body)
    return found


class Machine:
    """One thread; `set_to` has what it called cudaGraphSetConditional with, `stores` the kind of each store."""

    def __init__(self, module: str, entry: str, arguments: Sequence[int]) -> None:
        parameters, body = entries(module)[entry]
        assert len(parameters) == len(arguments)
        self._params = {name: value for (name, _), value in zip(parameters, arguments, strict=True)}
        self._bits = dict(parameters)
        self._registers: dict[str, int] = {}
        self._widths: dict[str, int] = {}
        self.set_to: list[tuple[int, int]] = []
        self.stores: list[str] = []
        for kind, names in re.findall(r"\.reg \.(\w+) (.*?);", body):
            for name in names.split(", "):
                self._widths[name] = WIDTHS.get(kind, 1)
        self._run(body)

    def _run(self, body: str) -> None:
        lines = [line.strip() for line in re.sub(r"\.(reg|param) .*?;|[{}]", "", body).splitlines()]
        lines = [line for line in lines if line]
        labels = {line[:-1]: number for number, line in enumerate(lines) if line.endswith(":")}
        at = 0
        while True:
            line = lines[at]
            at += 1
            if line.endswith(":"):
                continue
            guard = re.match(r"@(%\w+) ", line)
            if guard is not None:
                line = line[guard.end() :]
                if not self._registers[guard[1]]:
                    continue
            operation, _, rest = line.rstrip(";").partition(" ")
            if operation == "ret":
                return
            if operation == "bra":
                at = labels[rest]
            elif operation == "call.uni":
                assert rest == "cudaGraphSetConditional, (to_handle, to_value)"
                self.set_to.append((self._params["to_handle"], self._params["to_value"]))
            else:
                self._step(operation.split("."), [part.strip("[] ") for part in rest.split(",")])

    def _step(self, operation: list[str], operands: list[str]) -> None:
        target, *sources = operands
        bits = WIDTHS[operation[-1]]
        match operation:
            case ["ld", "param", _]:
                assert bits == self._bits[sources[0]], f"{sources[0]} is loaded with {bits} bits"
                self._write(target, self._params[sources[0]])
            case ["st", "param", _]:
                self._params[target] = self._value(sources[0], bits)
            case ["ld", "volatile", "global", _]:
                self._write(target, _CELLS[bits].from_address(self._value(sources[0], 64)).value)
            case ["st", *how, "global", _]:
                self.stores.append(".".join(how))
                _CELLS[bits].from_address(self._value(target, 64)).value = self._value(sources[0], bits)
            case ["cvta", "to", "global", _] | ["mov", _] | ["cvt", _, _]:
                self._write(target, self._value(sources[0]))
            case ["setp", relation, _]:
                a, b = (self._value(source, bits) for source in sources)
                self._write(target, int({"eq": a == b, "ne": a != b}[relation]))
            case ["selp", _]:
                first, second, predicate = sources
                self._write(target, self._value(first if self._value(predicate) else second))
            case [name, _]:
                a, b = (self._value(source) for source in sources)
                results = {"min": min(a, b), "add": a + b, "or": a | b, "shl": a << b if b < 64 else 0}
                self._write(target, results[name])
            case _:
                raise AssertionError(f"no such instruction here: {operation}")

    def _value(self, source: str, bits: int | None = None) -> int:
        if not source.startswith("%"):
            return int(source)
        assert bits in (None, self._widths[source]), f"{source} has {self._widths[source]} bits, not {bits}"
        return self._registers[source]

    def _write(self, target: str, value: int) -> None:
        self._registers[target] = value % (1 << self._widths[target])
