"""The driver over cuda.bindings: its structs, read back as CUDA would, give the program that was meant."""

from __future__ import annotations

import gc
import logging

import pytest
import torch
from fake_cuda_api import CONTEXT, FakeCudaApi, FakeTorchGraph
from hypothesis import given, settings
from programs import World, plans

from draftgraph.graphs import HostExecutor, Program, Sequence, Switch, While
from draftgraph.graphs.driver import cuda
from draftgraph.graphs.driver.cuda import CudaDriver
from draftgraph.graphs.driver.protocol import ConditionalKind, GraphError, NodeKind, NoOp, Publish, SetWhile
from draftgraph.graphs.loop_graph import build_loop_graph

pytest.importorskip("cuda.bindings.driver")

FLAG = torch.ones(1, dtype=torch.bool)
SHAPES = [("12.8.0", 12080), ("12.9.4", 12090), ("13.0.0", 13000), ("13.4.4", 13040), ("13.0.0", 12060)]


@pytest.fixture(autouse=True)
def _tensors_count_as_on_the_device(monkeypatch):
    monkeypatch.setattr(cuda, "_check_reachable", lambda what, tensor, pinned_will_do: None)


def connect(version: str = "13.0.0", driver_version: int = 13000) -> tuple[FakeCudaApi, CudaDriver]:
    api = FakeCudaApi(version, driver_version)
    return api, CudaDriver(api, version)


@pytest.mark.parametrize(("version", "driver_version"), SHAPES)
@settings(max_examples=40, deadline=None)
@given(plan=plans)
def test_a_random_program_built_for_cuda_has_the_host_executors_outcome(version, driver_version, plan):
    by_host, by_graph = World(), World()
    HostExecutor().run(by_host.program(plan))
    api, driver = connect(version, driver_version)
    assert driver.has_switch == (driver_version >= 12080)
    program = by_graph.program(plan)
    captured = {step: api.record_call(step.name, lambda s=step: s.fn(program.state)) for step in program.steps()}
    executable = driver.instantiate(build_loop_graph(driver, program, captured).graph)
    driver.upload(executable, 5)
    driver.launch(executable, 5)
    assert by_graph.outcome() == by_host.outcome()
    assert api.recording.launches == 1
    assert api.names().count("cuModuleLoadData") <= 1


@pytest.mark.parametrize("with_index", [True, False])
def test_publish_reaches_its_tensors(with_index):
    world = World()
    api, driver = connect()
    flag, index = torch.ones(1, dtype=torch.bool), torch.tensor([3], dtype=torch.int32)
    count, word = torch.full((1,), 6), torch.zeros(1, dtype=torch.int64)
    step = world.step("stop", lambda: flag.fill_(False))
    program = Program("p", While(flag, Sequence(step)), world.state)
    captured = {step: FakeTorchGraph(api.record_call("stop", lambda: step.fn(world.state)))}
    publish = Publish(flag, index if with_index else None, count, word)
    built = build_loop_graph(driver, program, captured, publish)
    driver.launch(driver.instantiate(built.graph), 0)
    assert int(word) == 7 << 32 | ((3 << 1) if with_index else 0)
    # The graph keeps alive what its nodes refer to by address.
    assert any(kept is captured[step] for kept in built.graph.keep)
    assert {id(t) for t in (flag, count, word)} <= {id(kept) for kept in built.graph.keep}


def test_a_stream_object_is_taken_by_its_address():
    api, driver = connect()

    class Stream:
        cuda_stream = 99

    executable = driver.instantiate(driver.create_graph())
    driver.launch(executable, Stream())
    name, arguments = api.calls[-1]
    assert (name, int(arguments[1])) == ("cuGraphLaunch", 99)


def test_node_kinds_of_a_captured_graph():
    api, driver = connect()
    kinds = [kind for kind in NodeKind if kind not in (NodeKind.CHILD_GRAPH, NodeKind.CONDITIONAL)]
    step = api.record_call("step", lambda: None, kinds)
    assert driver.node_kinds(FakeTorchGraph(step)) == tuple(kinds)
    graph = driver.create_graph()
    assert driver.node_kinds(graph) == ()
    driver.add_child(graph, api.record_call("two", lambda: None, (NodeKind.KERNEL, NodeKind.MEMCPY)), ())
    assert driver.node_kinds(graph) == (NodeKind.CHILD_GRAPH, NodeKind.KERNEL, NodeKind.MEMCPY)
    with pytest.raises(GraphError, match=r"a graph is a torch.cuda.CUDAGraph, a graph of this driver or an address"):
        driver.node_kinds("graph")


@pytest.mark.parametrize(
    ("call", "act"),
    [
        ("cuGraphCreate", lambda d: d.create_graph()),
        ("cuGraphConditionalHandleCreate", lambda d: d.create_handle(d.create_graph(), 0)),
        ("cuCtxGetCurrent", lambda d: d.create_handle(d.create_graph(), 0)),
        ("cuModuleLoadData", lambda d: d.add_kernel(d.create_graph(), NoOp(), ())),
        ("cuModuleGetFunction", lambda d: d.add_kernel(d.create_graph(), NoOp(), ())),
        ("cuGraphAddNode", lambda d: d.add_kernel(d.create_graph(), NoOp(), ())),
        ("cuGraphGetNodes", lambda d: d.node_kinds(d.create_graph())),
        ("cuGraphUpload", lambda d: d.upload(d.instantiate(d.create_graph()), 0)),
        ("cuGraphLaunch", lambda d: d.launch(d.instantiate(d.create_graph()), 0)),
    ],
)
def test_a_failed_call_is_named_with_its_error(call, act):
    api, driver = connect()
    api.fail[call] = "CUDA_ERROR_INVALID_VALUE"
    with pytest.raises(GraphError, match=rf"^{call} failed: CUDA_ERROR_INVALID_VALUE \(text of CUDA_ERROR_INVALID"):
        act(driver)


def test_a_failed_instantiation_says_what_cuda_found():
    api, driver = connect()
    api.fail["cuGraphInstantiateWithParams"] = "CUDA_ERROR_NOT_SUPPORTED"
    with pytest.raises(GraphError, match=r"cuGraphInstantiateWithParams failed: CUDA_ERROR_NOT_SUPPORTED .*\(result: "):
        driver.instantiate(driver.create_graph())


def test_no_driver_is_a_graph_error():
    api = FakeCudaApi()
    api.fail["cuInit"] = "CUDA_ERROR_NO_DEVICE"
    with pytest.raises(GraphError, match="cuInit failed: CUDA_ERROR_NO_DEVICE"):
        CudaDriver(api, "13.0.0")
    if not torch.cuda.is_available():
        with pytest.raises(GraphError, match=r"cuInit (could not be called|failed): "):
            CudaDriver()


@pytest.mark.parametrize("version", ["12.3.0", "12.7", "11.8.3"])
def test_old_bindings_are_refused(version):
    with pytest.raises(GraphError, match=rf"cuda.bindings {version} is too old: 12.8 or newer is needed"):
        CudaDriver(FakeCudaApi(version), version)


def test_an_unreadable_version_is_refused():
    with pytest.raises(GraphError, match="a version that cannot be read: 'main'"):
        CudaDriver(FakeCudaApi(), "main")


def test_bindings_that_give_no_bodies_are_refused(monkeypatch):
    api, driver = connect()
    monkeypatch.setattr(api, "_conditional", lambda graph, at, after: api.recording.add_kernel(graph, NoOp(), after))
    graph = driver.create_graph()
    handle = driver.create_handle(graph, 0)
    params = driver._params("CU_GRAPH_NODE_TYPE_CONDITIONAL")

    class OldConditional:
        phGraph_out: tuple[()] = ()

    class OldParams:
        conditional = OldConditional()
        getPtr = params.getPtr

    params.conditional.size = 1
    monkeypatch.setattr(driver, "_params", lambda kind: OldParams())
    with pytest.raises(GraphError, match=r"gave 0 bodies for a conditional node of 2: cuda.bindings 12.8 or newer"):
        driver.add_conditional(graph, ConditionalKind.SWITCH, handle, 2, ())


def test_what_the_driver_is_too_old_for_is_refused():
    _, driver = connect("13.0.0", 12020)
    with pytest.raises(GraphError, match=r"need a driver of CUDA 12.4 or newer; this one is of CUDA 12.2"):
        driver.create_handle(driver.create_graph(), 0)
    _, driver = connect("13.0.0", 12060)
    graph = driver.create_graph()
    with pytest.raises(GraphError, match=r"SWITCH nodes need a driver of CUDA 12.8 or newer; this one is of CUDA 12.6"):
        driver.add_conditional(graph, ConditionalKind.SWITCH, driver.create_handle(graph, 0), 2, ())


def test_a_thread_without_context_gets_that_of_torchs_device(monkeypatch):
    api, driver = connect()
    api.context = 0
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    driver.create_handle(driver.create_graph(), 0)
    assert api.context == CONTEXT
    assert [name for name in api.names() if "Ctx" in name] == [
        "cuCtxGetCurrent",
        "cuDevicePrimaryCtxRetain",
        "cuCtxSetCurrent",
    ]


def test_the_module_is_loaded_once_per_context():
    api, driver = connect()
    graph = driver.create_graph()
    driver.add_kernel(graph, NoOp(), ())
    driver.add_kernel(graph, NoOp(), ())
    assert api.names().count("cuModuleLoadData") == 1
    api.context = 0x88
    driver.add_kernel(graph, NoOp(), ())
    assert api.names().count("cuModuleLoadData") == 2


def freed(api: FakeCudaApi) -> list[str]:
    return [name for name in api.names() if "Destroy" in name or "Synchronize" in name]


def test_an_executable_is_freed_once_after_its_last_launch():
    api, driver = connect()
    executable = driver.instantiate(driver.create_graph())
    driver.launch(executable, 3)
    driver.launch(executable, 4)
    assert freed(api) == []
    driver.destroy(executable)
    driver.destroy(executable)
    assert freed(api) == ["cuStreamSynchronize", "cuGraphExecDestroy"]
    assert int(next(arguments[0] for name, arguments in api.calls if name == "cuStreamSynchronize")) == 4
    assert api.mode == api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    for use in (driver.launch, driver.upload):
        with pytest.raises(GraphError, match="an executable that was destroyed"):
            use(executable, 4)
    with pytest.raises(GraphError, match="only an instantiated graph can be used to launch, got CudaGraph"):
        driver.launch(executable.graph, 4)


def test_dropping_frees_too_and_a_body_keeps_its_graph():
    api, driver = connect()
    graph = driver.create_graph()
    _, (body,) = driver.add_conditional(graph, ConditionalKind.WHILE, driver.create_handle(graph, 0), 1, ())
    driver.add_kernel(body, SetWhile(driver.create_handle(graph, 0), FLAG), ())
    assert any(kept is FLAG for kept in graph.keep)
    del graph
    gc.collect()
    assert freed(api) == []
    del body
    gc.collect()
    assert freed(api) == ["cuGraphDestroy"]
    api.calls.clear()
    executable = driver.instantiate(driver.create_graph())
    driver.launch(executable, 3)
    del executable
    gc.collect()
    assert freed(api) == ["cuStreamSynchronize", "cuGraphExecDestroy", "cuGraphDestroy"]


def test_a_failure_while_freeing_is_logged(caplog):
    api, driver = connect()
    executable = driver.instantiate(driver.create_graph())
    api.fail["cuGraphExecDestroy"] = "CUDA_ERROR_ILLEGAL_ADDRESS"
    with caplog.at_level(logging.WARNING, "draftgraph.graphs"):
        driver.destroy(executable)
    assert "cuGraphExecDestroy failed: CUDA_ERROR_ILLEGAL_ADDRESS" in caplog.text


def test_kernels_want_device_tensors(monkeypatch):
    monkeypatch.undo()
    _, driver = connect()
    graph = driver.create_graph()
    handle = driver.create_handle(graph, 0)
    with pytest.raises(GraphError, match="SetWhile flag must be on a CUDA device; it is on cpu"):
        driver.add_kernel(graph, SetWhile(handle, FLAG), ())
    with pytest.raises(GraphError, match="word must be on a CUDA device, or in pinned memory; it is on cpu"):
        cuda._check_reachable("word", FLAG, pinned_will_do=True)


def test_a_switch_of_a_round_reaches_cuda_whole():
    """The branches' number and every index reach the kernels: an index out of range runs none."""
    world = World()
    api, driver = connect()
    index = world.cells[3:4]
    steps = [world.step(str(n), lambda: None) for n in range(3)]
    program = Program("p", Switch(index, tuple(steps)), world.state)
    captured = {step: api.record_call(step.name, lambda s=step: s.fn(world.state)) for step in steps}
    executable = driver.instantiate(build_loop_graph(driver, program, captured).graph)
    for value in (-1, 0, 1, 2, 3):
        index.fill_(value)
        driver.launch(executable, 0)
    assert world.log == ["0", "1", "2"]
