"""The driver over cuda.bindings 12.8 to 13.x: CUDA's own graphs.

Nothing of CUDA is imported or touched before a `CudaDriver` is made. Graph objects are not safe to use from several
threads at once.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import ptx
from .protocol import ConditionalKind, GraphError, Kernel, NodeKind

logger = logging.getLogger("draftgraph.graphs")

OLDEST_BINDINGS = (12, 8)
_WANTED = "12.8 or newer is needed (cuda-python>=12.8)"
CONDITIONAL_VERSION = 12040
"""The driver version that has IF and WHILE nodes, as `cuDriverGetVersion` gives it: of CUDA 12.4."""
SWITCH_VERSION = 12080
"""The one that has SWITCH nodes and IF nodes with two bodies: of CUDA 12.8, r570."""

_KINDS: dict[str, NodeKind] = {
    "CU_GRAPH_NODE_TYPE_KERNEL": NodeKind.KERNEL,
    "CU_GRAPH_NODE_TYPE_MEMCPY": NodeKind.MEMCPY,
    "CU_GRAPH_NODE_TYPE_MEMSET": NodeKind.MEMSET,
    "CU_GRAPH_NODE_TYPE_HOST": NodeKind.HOST,
    "CU_GRAPH_NODE_TYPE_GRAPH": NodeKind.CHILD_GRAPH,
    "CU_GRAPH_NODE_TYPE_EMPTY": NodeKind.EMPTY,
    "CU_GRAPH_NODE_TYPE_WAIT_EVENT": NodeKind.EVENT_WAIT,
    "CU_GRAPH_NODE_TYPE_EVENT_RECORD": NodeKind.EVENT_RECORD,
    "CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL": NodeKind.EXTERNAL_SEMAPHORE,
    "CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT": NodeKind.EXTERNAL_SEMAPHORE,
    "CU_GRAPH_NODE_TYPE_MEM_ALLOC": NodeKind.MEM_ALLOC,
    "CU_GRAPH_NODE_TYPE_MEM_FREE": NodeKind.MEM_FREE,
    "CU_GRAPH_NODE_TYPE_BATCH_MEM_OP": NodeKind.BATCH_MEM_OP,
    "CU_GRAPH_NODE_TYPE_CONDITIONAL": NodeKind.CONDITIONAL,
}


@dataclass(eq=False)
class CudaGraph:
    """A CUDA graph. One that was created here is destroyed when it is dropped; a body lives with the graph it is in."""

    raw: Any
    """`CUgraph`."""
    root: CudaGraph | None = None
    """The created graph that a body lies in."""
    keep: list[Any] = field(default_factory=list)
    """What the nodes refer to by address: tensors, and the torch graphs whose pools children use."""

    @property
    def owner(self) -> CudaGraph:
        """The graph that keeps things alive for this one."""
        return self.root or self


class CudaExecutable:
    """An instantiated graph. Keeps alive what it refers to; is freed when it is dropped, once it has run to its end."""

    def __init__(self, api: Any, raw: Any, graph: CudaGraph) -> None:
        self.raw, self.graph = raw, graph
        self.streams: list[Any] = []
        """The stream of the last launch, or nothing before the first."""
        self.release = weakref.finalize(self, _release, api, raw, self.streams)
        self.release.atexit = False  # the driver may be gone by then, and the process's end frees all

    @property
    def destroyed(self) -> bool:
        """Whether it can no longer be used."""
        return not self.release.alive


class CudaDriver:
    """Implements `GraphDriver` with CUDA's driver API, in the context that torch uses."""

    name = "cuda"

    def __init__(self, api: Any = None, bindings_version: str | None = None) -> None:
        """Connects to the driver.

        Args:
            api: what has the functions and types of `cuda.bindings.driver`; that module itself if None.
            bindings_version: its version, if `api` is given.

        Raises:
            GraphError: cuda.bindings is missing or too old, or there is no driver; says what is needed.
        """
        if api is None:
            api, bindings_version = _import_bindings()
        self._api = api
        self._bindings = _parsed(bindings_version or "")
        if self._bindings < OLDEST_BINDINGS:
            raise GraphError(
                f"cuda.bindings {bindings_version} is too old: 12.8 or newer is needed (cuda-python>=12.8)"
            )
        self._call("cuInit", 0)
        self.driver_version: int = self._call("cuDriverGetVersion")
        """Of the installed driver: 12080 is CUDA 12.8."""
        self.has_conditionals = self.driver_version >= CONDITIONAL_VERSION
        self.has_switch = self.driver_version >= SWITCH_VERSION
        self._functions: dict[int, dict[type[Kernel], Any]] = {}

    # GraphDriver

    def create_graph(self) -> CudaGraph:
        """An empty graph."""
        raw = self._call("cuGraphCreate", 0)
        graph = CudaGraph(raw)
        weakref.finalize(graph, _warn_on_failure, self._api, "cuGraphDestroy", raw).atexit = False
        return graph

    def create_handle(self, graph: CudaGraph, default: int) -> Any:
        """A conditional handle, for one node of `graph` or of a body inside it; `default` when a launch starts."""
        if not self.has_conditionals:
            raise GraphError(
                f"conditional nodes need a driver of CUDA 12.4 or newer; this one is of CUDA {self.cuda_version}"
            )
        flags = self._api.CU_GRAPH_COND_ASSIGN_DEFAULT
        return self._call("cuGraphConditionalHandleCreate", graph.raw, self._context(), default, flags)

    def add_child(self, graph: CudaGraph, child: Any, after: Sequence[Any]) -> Any:
        """Adds a graph that CUDA clones.

        Args:
            graph: where to.
            child: a graph of this driver; a `torch.cuda.CUDAGraph` captured with `keep_graph=True`, which is then kept
                alive with `graph`; or the address of a graph, which the caller keeps alive.
            after: the nodes that it comes after.
        """
        params = self._params("CU_GRAPH_NODE_TYPE_GRAPH")
        params.graph.graph = self._raw_graph(child)
        node = self._add_node(graph, params, after)
        graph.owner.keep.append(child)
        return node

    def add_conditional(
        self, graph: CudaGraph, kind: ConditionalKind, handle: Any, bodies: int, after: Sequence[Any]
    ) -> tuple[Any, tuple[CudaGraph, ...]]:
        """Adds a conditional node; returns it and its empty bodies.

        No body may stay empty: drivers before r570 hang on that. An empty node might not be enough, so a `NoOp` kernel
        belongs into a body with nothing to do.
        """
        if kind is ConditionalKind.SWITCH and not self.has_switch:
            raise GraphError(
                f"SWITCH nodes need a driver of CUDA 12.8 or newer; this one is of CUDA {self.cuda_version}"
            )
        params = self._params("CU_GRAPH_NODE_TYPE_CONDITIONAL")
        conditional = params.conditional
        conditional.handle = handle
        conditional.type = getattr(self._api.CUgraphConditionalNodeType, f"CU_GRAPH_COND_TYPE_{kind.name}")
        conditional.size = bodies
        conditional.ctx = self._context()
        node = self._add_node(graph, params, after)
        # The list's entries point into CUDA's array; what they hold is copied.
        made = [int(body) for body in params.conditional.phGraph_out or ()]
        if len(made) != bodies or not all(made):
            raise GraphError(
                f"cuGraphAddNode gave {sum(map(bool, made))} bodies for a conditional node of {bodies}: "
                f"cuda.bindings {_WANTED}"
            )
        return node, tuple(CudaGraph(self._api.CUgraph(body), root=graph.owner) for body in made)

    def add_kernel(self, graph: CudaGraph, kernel: Kernel, after: Sequence[Any]) -> Any:
        """Adds one of this package's kernels, and keeps its tensors alive with the graph."""
        tensors = ptx.tensors(kernel)
        for name, tensor in tensors.items():
            _check_reachable(f"{type(kernel).__name__} {name}", tensor, pinned_will_do=name == "word")
        params = self._params("CU_GRAPH_NODE_TYPE_KERNEL")
        launch = params.kernel
        launch.func = self._function(type(kernel))
        launch.gridDimX = launch.gridDimY = launch.gridDimZ = 1
        launch.blockDimX = launch.blockDimY = launch.blockDimZ = 1
        arguments = ptx.PackedArguments(kernel)
        launch.kernelParams = arguments.address
        node = self._add_node(graph, params, after)
        graph.owner.keep += tensors.values()
        return node

    def node_kinds(self, graph: Any) -> tuple[NodeKind, ...]:
        """The kinds of all nodes of a graph or of what `add_child` takes, those inside child graphs included."""
        return tuple(self._node_kinds(self._raw_graph(graph)))

    def instantiate(self, graph: CudaGraph) -> CudaExecutable:
        """Makes the graph launchable. A graph with conditional nodes can be instantiated once."""
        params = self._api.CUDA_GRAPH_INSTANTIATE_PARAMS()
        try:
            raw = self._call("cuGraphInstantiateWithParams", graph.raw, params)
        except GraphError as error:
            result = getattr(params.result_out, "name", params.result_out)
            raise GraphError(f"{error} (result: {result})") from None
        return CudaExecutable(self._api, raw, graph)

    def upload(self, executable: CudaExecutable, stream: Any) -> None:
        """Moves an executable to the device ahead of its first launch."""
        self._call("cuGraphUpload", _usable(executable, "upload").raw, self._stream(stream))

    def launch(self, executable: CudaExecutable, stream: Any) -> None:
        """Launches; returns at once."""
        raw_stream = self._stream(stream)
        self._call("cuGraphLaunch", _usable(executable, "launch").raw, raw_stream)
        executable.streams[:] = [raw_stream]

    def destroy(self, executable: CudaExecutable) -> None:
        """Waits for the last launch to end, then frees the executable. Does nothing the second time."""
        executable.release()

    # What it is made of

    @property
    def cuda_version(self) -> str:
        """The CUDA version of the driver, such as 12.8."""
        return f"{self.driver_version // 1000}.{self.driver_version % 1000 // 10}"

    def _call(self, name: str, *arguments: Any) -> Any:
        return _call(self._api, name, *arguments)

    def _params(self, kind: str) -> Any:
        params = self._api.CUgraphNodeParams()
        params.type = getattr(self._api.CUgraphNodeType, kind)
        return params

    def _add_node(self, graph: CudaGraph, params: Any, after: Sequence[Any]) -> Any:
        nodes = list(after)
        # From 13.0 on the function of this name is the one that takes data for each edge.
        edge_data = (None,) if self._bindings >= (13, 0) else ()
        return self._call("cuGraphAddNode", graph.raw, nodes or None, *edge_data, len(nodes), params)

    def _raw_graph(self, graph: Any) -> Any:
        if isinstance(graph, CudaGraph):
            return graph.raw
        if hasattr(graph, "raw_cuda_graph"):
            return self._api.CUgraph(int(graph.raw_cuda_graph()))
        if isinstance(graph, int):
            return self._api.CUgraph(graph)
        raise GraphError(f"a graph is a torch.cuda.CUDAGraph, a graph of this driver or an address; got {graph!r}")

    def _node_kinds(self, raw: Any) -> list[NodeKind]:
        _, count = self._call("cuGraphGetNodes", raw, 0)
        nodes, _ = self._call("cuGraphGetNodes", raw, count) if count else ((), 0)
        found = []
        for node in nodes:
            kind = self._call("cuGraphNodeGetType", node)
            found.append(_KINDS.get(getattr(kind, "name", ""), NodeKind.OTHER))
            if found[-1] is NodeKind.CHILD_GRAPH:
                found += self._node_kinds(self._call("cuGraphChildGraphNodeGetGraph", node))
        return found

    def _context(self) -> Any:
        """The context of this thread; in a thread that has none yet, that of torch's current device."""
        context = self._call("cuCtxGetCurrent")
        if not int(context):
            device = self._call("cuDeviceGet", torch.cuda.current_device())
            context = self._call("cuDevicePrimaryCtxRetain", device)
            self._call("cuCtxSetCurrent", context)
        return context

    def _function(self, kernel: type[Kernel]) -> Any:
        """The kernel's function. The module is loaded once for each context and stays as long as the process."""
        key = int(self._context())
        if key not in self._functions:
            module = self._call("cuModuleLoadData", ptx.MODULE.encode("ascii") + b"\0")
            self._functions[key] = {
                kind: self._call("cuModuleGetFunction", module, entry.name.encode("ascii"))
                for kind, entry in ptx.ENTRIES.items()
            }
        return self._functions[key][kernel]

    def _stream(self, stream: Any) -> Any:
        return self._api.CUstream(int(getattr(stream, "cuda_stream", stream)))


def _import_bindings() -> tuple[Any, str]:
    try:
        from cuda import bindings
        from cuda.bindings import driver
    except ImportError as error:
        raise GraphError(f"cuda.bindings cannot be imported; {_WANTED}: {error}") from None
    return driver, bindings.__version__


def _parsed(version: str) -> tuple[int, int]:
    """Major and minor of a version."""
    try:
        major, minor = version.split(".")[:2]
        return int(major), int(minor)
    except ValueError:
        raise GraphError(f"cuda.bindings has a version that cannot be read: {version!r}") from None


def _call(api: Any, name: str, *arguments: Any) -> Any:
    """Calls a function of the driver API; returns what it gives beside the error code.

    Raises `GraphError` with the call's name where it fails, also where the driver or the function is missing.
    """
    try:
        code, *results = getattr(api, name)(*arguments)
    except Exception as error:
        raise GraphError(f"{name} could not be called: {type(error).__name__}: {error}") from error
    if code != api.CUresult.CUDA_SUCCESS:
        raise GraphError(f"{name} failed: {getattr(code, 'name', code)}{_explained(api, code)}")
    if not results:
        return None
    return results[0] if len(results) == 1 else tuple(results)


def _explained(api: Any, code: Any) -> str:
    try:
        known, text = api.cuGetErrorString(code)
    except Exception:
        return ""
    return f" ({text.decode(errors='replace')})" if known == api.CUresult.CUDA_SUCCESS and text else ""


def _usable(executable: Any, action: str) -> CudaExecutable:
    if not isinstance(executable, CudaExecutable):
        raise GraphError(f"only an instantiated graph can be used to {action}, got {type(executable).__name__}")
    if executable.destroyed:
        raise GraphError(f"cannot {action} an executable that was destroyed")
    return executable


def _check_reachable(what: str, tensor: torch.Tensor, pinned_will_do: bool) -> None:
    if tensor.is_cuda or (pinned_will_do and tensor.is_pinned()):
        return
    wanted = "on a CUDA device" + (", or in pinned memory" if pinned_will_do else "")
    raise GraphError(f"{what} must be {wanted}; it is on {tensor.device}")


def _release(api: Any, raw: Any, streams: list[Any]) -> None:
    """Frees an executable once its last launch is over: what it reads and writes is freed right after it.

    May run in the middle of a capture on another stream, where waiting would count as an unsafe call and end the
    capture, unless the thread says that it does not mind.
    """
    relaxed = api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    mode = _warn_on_failure(api, "cuThreadExchangeStreamCaptureMode", relaxed)
    for stream in streams:
        _warn_on_failure(api, "cuStreamSynchronize", stream)
    _warn_on_failure(api, "cuGraphExecDestroy", raw)
    if mode is not None:
        _warn_on_failure(api, "cuThreadExchangeStreamCaptureMode", mode)


def _warn_on_failure(api: Any, name: str, *arguments: Any) -> Any:
    """Calls where nobody could catch an error: when an object is dropped."""
    try:
        return _call(api, name, *arguments)
    except GraphError as error:
        logger.warning("%s", error)
        return None
