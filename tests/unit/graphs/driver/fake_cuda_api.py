"""Stands for `cuda.bindings.driver`: its own types, and functions that read the structs and record what they mean.

What is built through it ends up in a `RecordingDriver`, so CUDA's rules are enforced and a launch runs.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from draftgraph.graphs.driver import ptx
from draftgraph.graphs.driver.protocol import (
    ConditionalKind,
    Kernel,
    NodeKind,
    NoOp,
    Publish,
    SetIf,
    SetSwitch,
    SetWhile,
)
from draftgraph.graphs.driver.record import RecordedGraph, RecordedNode
from draftgraph.graphs.driver.recording import RecordingDriver

CONTEXT = 0x77
# Offsets in CUgraphNodeParams_st of cuda.h: an int and three reserved ints, then a union of structs.
_UNION = 16
_KERNEL = {"func": 0, "grid": 8, "block": 20, "shared": 32, "params": 40, "extra": 48}
_CONDITIONAL = {"handle": 0, "type": 8, "size": 12, "bodies": 16, "context": 24}


def _read(address: int, kind: Any = ctypes.c_uint64) -> int:
    return kind.from_address(address).value


def _tensor(address: int, dtype: torch.dtype, size: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=dtype)


class FakeCudaApi:
    """The functions that `CudaDriver` calls, in the shape of bindings `version`; `calls` logs them."""

    def __init__(self, version: str = "13.0.0", driver_version: int = 13000) -> None:
        from cuda.bindings import driver

        self._types = driver
        self.version, self.driver_version = version, driver_version
        self.recording = RecordingDriver(has_switch=driver_version >= 12080)
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.fail: dict[str, str] = {}
        """Function name to the name of the error that it is to give."""
        self.context = CONTEXT
        self.mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        self._objects: dict[int, Any] = {}
        self._bodies: list[Any] = []  # CUDA owns these arrays

    def __getattr__(self, name: str) -> Any:
        return getattr(self._types, name)  # enums and structs

    def __getattribute__(self, name: str) -> Any:
        """Wraps the functions: logs the call, fails if told so, and puts the error code before the result."""
        value = object.__getattribute__(self, name)
        if not name.startswith("cu") or name in ("context", "calls"):
            return value

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, arguments))
            if name in self.fail:
                error = getattr(self._types.CUresult, self.fail[name])
                return (error, *[None] * (2 if name == "cuGraphGetNodes" else 1))
            result = value(*arguments)
            return (self._types.CUresult.CUDA_SUCCESS, *(result if isinstance(result, tuple) else (result,)))

        return call

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def register(self, thing: Any) -> int:
        """An address for an object."""
        address = 0x1000 + 0x10 * len(self._objects)
        self._objects[address] = thing
        return address

    def find(self, raw: Any) -> Any:
        return self._objects[int(raw)]

    def record_call(self, name: str, fn: Any, kinds: Any = (NodeKind.KERNEL,)) -> int:
        """A captured step; returns the address of its graph."""
        return self.register(self.recording.record_call(name, fn, kinds))

    # The driver API

    def cuInit(self, flags: int) -> tuple[()]:
        return ()

    def cuDriverGetVersion(self) -> int:
        return self.driver_version

    def cuGetErrorString(self, code: Any) -> bytes:
        return f"text of {code.name}".encode()

    def cuCtxGetCurrent(self) -> Any:
        return self._types.CUcontext(self.context)

    def cuDeviceGet(self, ordinal: int) -> Any:
        return self._types.CUdevice(ordinal)

    def cuDevicePrimaryCtxRetain(self, device: Any) -> Any:
        return self._types.CUcontext(CONTEXT + int(device))

    def cuCtxSetCurrent(self, context: Any) -> tuple[()]:
        self.context = int(context)
        return ()

    def cuModuleLoadData(self, image: bytes) -> Any:
        assert image == ptx.MODULE.encode() + b"\0"
        return self._types.CUmodule(self.register(image))

    def cuModuleGetFunction(self, module: Any, name: bytes) -> Any:
        assert b".entry " + name + b"(" in self.find(module)
        return self._types.CUfunction(self.register(name.decode()))

    def cuGraphCreate(self, flags: int) -> Any:
        assert flags == 0
        return self._types.CUgraph(self.register(self.recording.create_graph()))

    def cuGraphDestroy(self, graph: Any) -> tuple[()]:
        self.find(graph)
        return ()

    def cuGraphConditionalHandleCreate(self, graph: Any, context: Any, default: int, flags: int) -> Any:
        assert (int(context), flags) == (CONTEXT, 1)
        handle = self.recording.create_handle(self.find(graph), default)
        return self._types.CUgraphConditionalHandle(self.register(handle))

    def cuGraphAddNode(self, graph: Any, after: Any, *rest: Any) -> Any:
        if self.version.startswith("13."):
            edge_data, count, params = rest
            assert edge_data is None
        else:
            count, params = rest
        assert count == len(after or ())
        before = [self.find(node) for node in after or ()]
        node = self._add(self.find(graph), params, before)
        return self._types.CUgraphNode(self.register(node))

    def cuGraphGetNodes(self, graph: Any, count: int = 0) -> tuple[Any, int]:
        nodes = self.find(graph).nodes
        if not count:
            return [], len(nodes)
        return [self._types.CUgraphNode(self._address(node)) for node in nodes[:count]], count

    def cuGraphNodeGetType(self, node: Any) -> Any:
        types = self._types.CUgraphNodeType
        names = {
            NodeKind.CHILD_GRAPH: "GRAPH",
            NodeKind.EXTERNAL_SEMAPHORE: "EXT_SEMAS_WAIT",
            NodeKind.EVENT_WAIT: "WAIT_EVENT",
            NodeKind.MEM_ALLOC: "MEM_ALLOC",
            NodeKind.MEM_FREE: "MEM_FREE",
            NodeKind.BATCH_MEM_OP: "BATCH_MEM_OP",
        }
        kind = self.find(node).kind
        if kind is NodeKind.OTHER:
            return 1234  # what bindings older than the driver make of a kind that they do not know
        return getattr(types, "CU_GRAPH_NODE_TYPE_" + names.get(kind, kind.name))

    def cuGraphChildGraphNodeGetGraph(self, node: Any) -> Any:
        return self._types.CUgraph(self._address(self.find(node).child))

    def cuGraphInstantiateWithParams(self, graph: Any, params: Any) -> Any:
        assert int(params.flags) == 0
        return self._types.CUgraphExec(self.register(self.recording.instantiate(self.find(graph))))

    def cuGraphUpload(self, executable: Any, stream: Any) -> tuple[()]:
        self.recording.upload(self.find(executable), stream)
        return ()

    def cuGraphLaunch(self, executable: Any, stream: Any) -> tuple[()]:
        self.recording.launch(self.find(executable), stream)
        return ()

    def cuGraphExecDestroy(self, executable: Any) -> tuple[()]:
        self.recording.destroy(self.find(executable))
        return ()

    def cuStreamSynchronize(self, stream: Any) -> tuple[()]:
        assert self.mode == self._types.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        return ()

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> Any:
        self.mode, before = mode, self.mode
        return before

    # Reading structs

    def _address(self, thing: Any) -> int:
        known = next((address for address, other in self._objects.items() if other is thing), None)
        return known if known is not None else self.register(thing)

    def _add(self, graph: RecordedGraph, params: Any, after: list[RecordedNode]) -> RecordedNode:
        start = params.getPtr()
        kind = self._types.CUgraphNodeType(_read(start, ctypes.c_uint32)).name
        assert bytes((ctypes.c_uint8 * 12).from_address(start + 4)) == bytes(12), "reserved words must be zero"
        union = start + _UNION
        if kind == "CU_GRAPH_NODE_TYPE_GRAPH":
            return self.recording.add_child(graph, self.find(_read(union)), after)
        if kind == "CU_GRAPH_NODE_TYPE_KERNEL":
            return self.recording.add_kernel(graph, self._kernel(union), after)
        assert kind == "CU_GRAPH_NODE_TYPE_CONDITIONAL"
        return self._conditional(graph, union, after)

    def _kernel(self, at: int) -> Kernel:
        name = self.find(_read(at + _KERNEL["func"]))
        sizes = [_read(at + offset + 4 * i, ctypes.c_uint32) for offset in (8, 20) for i in range(3)]
        assert (sizes, _read(at + _KERNEL["shared"], ctypes.c_uint32)) == ([1] * 6, 0)
        entry = next(entry for entry in ptx.ENTRIES.values() if entry.name == name)
        array = _read(at + _KERNEL["params"])
        values = [_read(_read(array + 8 * n), kind) for n, kind in enumerate(entry.parameters)]
        match name:
            case "draftgraph_set_while":
                return SetWhile(self.find(values[0]), _tensor(values[1], torch.bool, 1))
            case "draftgraph_set_switch":
                return SetSwitch(self.find(values[0]), _tensor(values[1], torch.int32, 4), values[2])
            case "draftgraph_set_if":
                return SetIf(self.find(values[0]), _tensor(values[1], torch.int32, 4), values[2])
            case "draftgraph_publish":
                index = _tensor(values[1], torch.int32, 4) if values[1] else None
                flag, count, word = values[0], values[2], values[3]
                return Publish(
                    _tensor(flag, torch.bool, 1), index, _tensor(count, torch.int64, 8), _tensor(word, torch.int64, 8)
                )
        assert (name, array) == ("draftgraph_no_op", 0)
        return NoOp()

    def _conditional(self, graph: RecordedGraph, at: int, after: list[RecordedNode]) -> RecordedNode:
        handle = self.find(_read(at + _CONDITIONAL["handle"]))
        kind = self._types.CUgraphConditionalNodeType(_read(at + _CONDITIONAL["type"], ctypes.c_uint32))
        size = _read(at + _CONDITIONAL["size"], ctypes.c_uint32)
        assert _read(at + _CONDITIONAL["context"]) == CONTEXT
        name = kind.name.removeprefix("CU_GRAPH_COND_TYPE_").lower()
        node, bodies = self.recording.add_conditional(graph, ConditionalKind(name), handle, size, after)
        array = (ctypes.c_uint64 * size)(*(self.register(body) for body in bodies))
        self._bodies.append(array)
        ctypes.c_uint64.from_address(at + _CONDITIONAL["bodies"]).value = ctypes.addressof(array)
        return node


class FakeTorchGraph:
    """What of `torch.cuda.CUDAGraph` the driver uses."""

    def __init__(self, address: int) -> None:
        self._address = address

    def raw_cuda_graph(self) -> int:
        return self._address
