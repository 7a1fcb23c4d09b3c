"""The recording driver lets lawful graphs through and catches a planted breach of every rule."""

from __future__ import annotations

import pytest
import torch

from draftgraph.graphs.driver.interpreter import running_order
from draftgraph.graphs.driver.protocol import (
    ALLOWED_IN_BODY,
    ConditionalKind,
    GraphError,
    NodeKind,
    NoOp,
    Publish,
    SetIf,
    SetSwitch,
    SetWhile,
)
from draftgraph.graphs.driver.recording import RecordingDriver

FLAG = torch.ones(1, dtype=torch.bool)
INDEX = torch.zeros(1, dtype=torch.int32)
WORD = torch.zeros(1, dtype=torch.int64)
WHILE, IF, SWITCH = ConditionalKind.WHILE, ConditionalKind.IF, ConditionalKind.SWITCH


@pytest.fixture
def driver() -> RecordingDriver:
    return RecordingDriver()


def conditional(driver, graph, kind, bodies=1, default=0, fill=True):
    """A conditional node; with `fill` every body has a kernel."""
    handle = driver.create_handle(graph, default)
    node, made = driver.add_conditional(graph, kind, handle, bodies, ())
    if fill:
        for body in made:
            driver.add_kernel(body, NoOp(), ())
    return handle, node, made


def log_step(driver, log, name):
    return driver.record_call(name, lambda: log.append(name))


# Running


def test_nodes_run_after_what_they_name_and_else_latest_first(driver):
    log: list[str] = []
    graph = driver.create_graph()
    a = driver.add_child(graph, log_step(driver, log, "a"), ())
    b = driver.add_child(graph, log_step(driver, log, "b"), ())
    c = driver.add_child(graph, log_step(driver, log, "c"), (a,))
    d = driver.add_child(graph, log_step(driver, log, "d"), (c, b))
    assert running_order(graph) == (b, a, c, d)
    driver.launch(driver.instantiate(graph), None)
    assert log == ["b", "a", "c", "d"]


@pytest.mark.parametrize(("default", "expected"), [(0, []), (1, ["body 0"]), (7, ["body 0"])])
def test_if_without_a_set_kernel_goes_by_the_default(driver, default, expected):
    log: list[str] = []
    graph = driver.create_graph()
    _, _, (body,) = conditional(driver, graph, IF, default=default)
    driver.add_child(body, log_step(driver, log, "body 0"), ())
    driver.launch(driver.instantiate(graph), None)
    assert log == expected


@pytest.mark.parametrize(("value", "expected"), [(0, ["else"]), (2, ["then"])])
def test_if_with_two_bodies(driver, value, expected):
    log: list[str] = []
    graph = driver.create_graph()
    _, _, bodies = conditional(driver, graph, IF, bodies=2, default=value)
    for body, name in zip(bodies, ("then", "else"), strict=True):
        driver.add_child(body, log_step(driver, log, name), ())
    driver.launch(driver.instantiate(graph), None)
    assert log == expected


@pytest.mark.parametrize(("index", "expected"), [(-1, []), (0, ["0"]), (1, ["1"]), (2, []), (9, [])])
def test_switch_runs_the_body_of_its_value_or_none(driver, index, expected):
    log: list[str] = []
    graph = driver.create_graph()
    handle = driver.create_handle(graph, 0)
    index_tensor = torch.tensor([index], dtype=torch.int32)
    setter = driver.add_kernel(graph, SetSwitch(handle, index_tensor, 2), ())
    _, bodies = driver.add_conditional(graph, SWITCH, handle, 2, (setter,))
    for number, body in enumerate(bodies):
        driver.add_child(body, log_step(driver, log, str(number)), ())
    driver.launch(driver.instantiate(graph), None)
    assert log == expected


def test_handles_start_every_launch_from_their_default(driver):
    log: list[str] = []
    flag = torch.zeros(1, dtype=torch.bool)
    graph = driver.create_graph()
    handle, _, (body,) = conditional(driver, graph, WHILE, default=1)
    driver.add_kernel(body, SetWhile(handle, flag), ())
    driver.add_child(body, log_step(driver, log, "pass"), ())
    executable = driver.instantiate(graph)
    driver.launch(executable, None)
    driver.launch(executable, None)
    assert log == ["pass", "pass"]
    assert (executable.launches, driver.launches) == (2, 2)


def test_a_missing_edge_shows(driver):
    """The kernel that sets the handle is not named by the node that reads it: the node runs first."""
    log: list[str] = []
    graph = driver.create_graph()
    handle = driver.create_handle(graph, 0)
    driver.add_kernel(graph, SetIf(handle, INDEX, 0), ())
    _, (body,) = driver.add_conditional(graph, IF, handle, 1, ())
    driver.add_child(body, log_step(driver, log, "body"), ())
    driver.launch(driver.instantiate(graph), None)
    assert log == []


def test_children_are_copies(driver):
    log: list[str] = []
    inner, outer = driver.create_graph(), driver.create_graph()
    driver.add_child(inner, log_step(driver, log, "a"), ())
    driver.add_child(outer, inner, ())
    driver.add_child(inner, log_step(driver, log, "b"), ())
    driver.launch(driver.instantiate(outer), None)
    assert log == ["a"]
    assert driver.node_kinds(outer) == (NodeKind.CHILD_GRAPH, NodeKind.CHILD_GRAPH, NodeKind.KERNEL)


def test_a_set_kernel_may_sit_in_a_child_graph_or_a_body(driver):
    flag = torch.zeros(1, dtype=torch.bool)
    graph = driver.create_graph()
    handle = driver.create_handle(graph, 0)
    child = driver.create_graph()
    driver.add_kernel(child, SetWhile(handle, FLAG), ())
    first = driver.add_child(graph, child, ())
    _, (body,) = driver.add_conditional(graph, WHILE, handle, 1, (first,))
    _, _, (nested,) = conditional(driver, body, IF, default=1)
    driver.add_kernel(nested, SetWhile(handle, flag), ())
    driver.launch(driver.instantiate(graph), None)


def test_a_body_may_read_a_handle_of_a_graph_around_it(driver):
    graph = driver.create_graph()
    handle = driver.create_handle(graph, 1)
    _, _, (body,) = conditional(driver, graph, IF, default=1)
    _, (nested,) = driver.add_conditional(body, IF, handle, 1, ())
    driver.add_kernel(nested, NoOp(), ())
    driver.launch(driver.instantiate(graph), None)


def test_every_allowed_plain_kind_may_be_in_a_body(driver):
    graph = driver.create_graph()
    _, _, (body,) = conditional(driver, graph, WHILE)
    plain = sorted(ALLOWED_IN_BODY - {NodeKind.CHILD_GRAPH, NodeKind.CONDITIONAL})
    driver.add_child(body, driver.record_call("step", lambda: None, kinds=plain), ())
    driver.instantiate(graph)


def test_a_plain_graph_can_be_instantiated_again_and_holds_host_nodes(driver):
    step = driver.record_call("step", lambda: None, kinds=(NodeKind.HOST, NodeKind.EVENT_RECORD))
    graph = driver.create_graph()
    driver.add_child(graph, step, ())
    assert driver.instantiate(graph) is not driver.instantiate(graph)


# Breaches


def refused_in_body(driver, kind, wrapped):
    graph = driver.create_graph()
    _, _, (body,) = conditional(driver, graph, WHILE)
    step = driver.record_call("step", lambda: None, kinds=(NodeKind.KERNEL, kind))
    if wrapped:
        outer = driver.create_graph()
        driver.add_child(outer, step, ())
        step = outer
    driver.add_child(body, step, ())


@pytest.mark.parametrize("wrapped", [False, True], ids=["direct", "in a child graph"])
@pytest.mark.parametrize("kind", sorted(set(NodeKind) - ALLOWED_IN_BODY))
def test_bodies_hold_allowed_kinds_only(driver, kind, wrapped):
    rule = "cannot be cloned" if kind in (NodeKind.MEM_ALLOC, NodeKind.MEM_FREE) else "may hold only these: "
    with pytest.raises(GraphError, match=f"holds a {kind} node: .*{rule}"):
        refused_in_body(driver, kind, wrapped)


def child_with_conditional(driver):
    graph, outer = driver.create_graph(), driver.create_graph()
    conditional(driver, graph, IF)
    driver.add_child(outer, graph, ())


def body_as_child(driver):
    _, _, (body,) = conditional(driver, driver.create_graph(), IF)
    driver.add_child(driver.create_graph(), body, ())


def graph_in_itself(driver):
    graph = driver.create_graph()
    driver.add_child(graph, graph, ())


def graph_in_its_own_body(driver):
    graph = driver.create_graph()
    _, _, (body,) = conditional(driver, graph, IF)
    driver.add_child(body, graph, ())


def no_graph_as_child(driver):
    driver.add_child(driver.create_graph(), 123, ())


def instantiated_twice(driver):
    graph = driver.create_graph()
    conditional(driver, graph, IF)
    driver.instantiate(graph)
    driver.instantiate(graph)


def body_instantiated(driver):
    _, _, (body,) = conditional(driver, driver.create_graph(), IF)
    driver.instantiate(body)


def handle_used_twice(driver):
    graph = driver.create_graph()
    handle, _, _ = conditional(driver, graph, IF)
    driver.add_conditional(graph, IF, handle, 1, ())


def handle_of_another_graph(driver):
    handle = driver.create_handle(driver.create_graph(), 0)
    driver.add_conditional(driver.create_graph(), IF, handle, 1, ())


def handle_of_a_body_read_outside(driver):
    graph = driver.create_graph()
    _, _, (body,) = conditional(driver, graph, IF)
    driver.add_conditional(graph, IF, driver.create_handle(body, 0), 1, ())


def handle_without_node(driver):
    graph = driver.create_graph()
    driver.create_handle(graph, 0)
    driver.instantiate(graph)


def handle_without_node_in_a_body(driver):
    graph = driver.create_graph()
    _, _, (body,) = conditional(driver, graph, IF)
    driver.create_handle(body, 0)
    driver.instantiate(graph)


def negative_default(driver):
    driver.create_handle(driver.create_graph(), -1)


def no_handle(driver):
    driver.add_conditional(driver.create_graph(), IF, None, 1, ())


def set_kernel_without_handle(driver):
    driver.add_kernel(driver.create_graph(), SetWhile(5, FLAG), ())


def set_kernel_of_another_graph(driver):
    handle, _, _ = conditional(driver, driver.create_graph(), WHILE)
    graph = driver.create_graph()
    driver.add_kernel(graph, SetWhile(handle, FLAG), ())
    driver.instantiate(graph)


def set_kernel_outside_of_its_handles_body(driver):
    graph = driver.create_graph()
    _, _, (body,) = conditional(driver, graph, IF)
    handle, _, _ = conditional(driver, body, WHILE)
    driver.add_kernel(graph, SetWhile(handle, FLAG), ())
    driver.instantiate(graph)


def set_kernel_of_another_kind(driver):
    graph = driver.create_graph()
    handle, _, _ = conditional(driver, graph, WHILE)
    driver.add_kernel(graph, SetIf(handle, INDEX, 0), ())
    driver.instantiate(graph)


def set_switch_of_other_branches(driver):
    graph = driver.create_graph()
    handle, _, _ = conditional(driver, graph, SWITCH, bodies=3)
    driver.add_kernel(graph, SetSwitch(handle, INDEX, 2), ())
    driver.instantiate(graph)


def edge_between_graphs(driver):
    node = driver.add_kernel(driver.create_graph(), NoOp(), ())
    driver.add_kernel(driver.create_graph(), NoOp(), (node,))


def edge_from_outside_into_a_body(driver):
    _, node, (body,) = conditional(driver, driver.create_graph(), IF)
    driver.add_kernel(body, NoOp(), (node,))


def edge_named_twice(driver):
    graph = driver.create_graph()
    node = driver.add_kernel(graph, NoOp(), ())
    driver.add_kernel(graph, NoOp(), (node, node))


def edge_to_no_node(driver):
    driver.add_kernel(driver.create_graph(), NoOp(), ("first",))


def empty_body(driver):
    graph = driver.create_graph()
    conditional(driver, graph, WHILE, fill=False)
    driver.instantiate(graph)


def one_empty_body_of_two(driver):
    graph = driver.create_graph()
    _, _, (first, _) = conditional(driver, graph, SWITCH, bodies=2, fill=False)
    driver.add_kernel(first, NoOp(), ())
    driver.instantiate(graph)


def body_of_empty_nodes(driver):
    graph = driver.create_graph()
    _, _, (body,) = conditional(driver, graph, IF, fill=False)
    driver.add_child(body, driver.record_call("idle", lambda: None, kinds=(NodeKind.EMPTY,)), ())
    driver.instantiate(graph)


def empty_body_deep_inside(driver):
    graph = driver.create_graph()
    _, _, (body,) = conditional(driver, graph, IF)
    conditional(driver, body, IF, fill=False)
    driver.instantiate(graph)


def while_of_two_bodies(driver):
    conditional(driver, driver.create_graph(), WHILE, bodies=2)


def if_of_three_bodies(driver):
    conditional(driver, driver.create_graph(), IF, bodies=3)


def switch_of_no_body(driver):
    conditional(driver, driver.create_graph(), SWITCH, bodies=0)


def switch_where_there_is_none(driver):
    driver.has_switch = False
    conditional(driver, driver.create_graph(), SWITCH, bodies=2)


def else_where_there_is_none(driver):
    driver.has_switch = False
    conditional(driver, driver.create_graph(), IF, bodies=2)


def launch_of_a_graph(driver):
    driver.launch(driver.create_graph(), None)


def upload_of_a_graph(driver):
    driver.upload(driver.create_graph(), None)


def launch_of_what_was_destroyed(driver):
    executable = driver.instantiate(driver.create_graph())
    driver.destroy(executable)
    driver.destroy(executable)
    driver.launch(executable, None)


def node_added_too_late(driver):
    graph = driver.create_graph()
    _, _, (body,) = conditional(driver, graph, IF)
    driver.instantiate(graph)
    driver.add_kernel(body, NoOp(), ())


def node_added_to_a_step(driver):
    driver.add_kernel(driver.record_call("step", lambda: None), NoOp(), ())


def step_with_a_conditional(driver):
    driver.record_call("step", lambda: None, kinds=(NodeKind.CONDITIONAL,))


def handle_of_another_context(driver):
    graph = driver.create_graph()
    handle = driver.create_handle(graph, 0)
    driver.context = "context 1"
    driver.add_conditional(graph, IF, handle, 1, ())


def set_kernel_of_another_context(driver):
    graph = driver.create_graph()
    handle, _, _ = conditional(driver, graph, WHILE)
    driver.context = "context 1"
    driver.add_kernel(graph, SetWhile(handle, FLAG), ())
    driver.instantiate(graph)


def body_of_another_context(driver):
    graph = driver.create_graph()
    _, _, (body,) = conditional(driver, graph, WHILE)
    driver.context = "context 1"
    step = driver.record_call("step", lambda: None)
    driver.context = "context 0"
    driver.add_child(body, step, ())
    driver.instantiate(graph)


BREACHES = {
    child_with_conditional: "a graph with conditional nodes cannot become a child graph",
    body_as_child: "is the body of a conditional node, and cannot become a child graph",
    graph_in_itself: "cannot become a child of itself",
    graph_in_its_own_body: "or of a body inside it",
    no_graph_as_child: "a child must be a graph of this driver, got 123",
    instantiated_twice: "such a graph can be instantiated only once",
    body_instantiated: "is not instantiated by itself",
    handle_used_twice: "one handle per node",
    handle_of_another_graph: "it must be of the graph that holds the node, or of one around it",
    handle_of_a_body_read_outside: "it must be of the graph that holds the node, or of one around it",
    handle_without_node: "has a handle that no conditional node reads",
    handle_without_node_in_a_body: "has a handle that no conditional node reads",
    negative_default: "must be an unsigned 32-bit number, got -1",
    no_handle: "needs a handle of this driver, got None",
    set_kernel_without_handle: "needs a handle of this driver, got 5",
    set_kernel_of_another_graph: "must lie in that graph, or in a child graph or a body inside it",
    set_kernel_outside_of_its_handles_body: "must lie in that graph, or in a child graph or a body inside it",
    set_kernel_of_another_kind: "a SetIf kernel sets the handle of a conditional node of kind while",
    set_switch_of_other_branches: "of 2 branches sets the handle of a node of 3 bodies",
    edge_between_graphs: "edges join nodes of one graph",
    edge_from_outside_into_a_body: "edges join nodes of one graph",
    edge_named_twice: "dependencies are distinct",
    edge_to_no_node: "must name nodes of this driver, got 'first'",
    empty_body: "has nothing to run: drivers before r570 hang on empty bodies",
    one_empty_body_of_two: "has nothing to run",
    body_of_empty_nodes: "has nothing to run",
    empty_body_deep_inside: "has nothing to run",
    while_of_two_bodies: "of kind while cannot have 2 bodies: accepted is 1",
    if_of_three_bodies: "of kind if cannot have 3 bodies: accepted is 1 to 2",
    switch_of_no_body: "of kind switch cannot have 0 bodies: accepted is at least 1",
    switch_where_there_is_none: "no SWITCH nodes: they need CUDA 12.8",
    else_where_there_is_none: "of kind if cannot have 2 bodies: accepted is 1",
    launch_of_a_graph: "only an instantiated graph can be used to launch, got RecordedGraph",
    upload_of_a_graph: "only an instantiated graph can be used to upload",
    launch_of_what_was_destroyed: "cannot launch an executable that was destroyed",
    node_added_too_late: "is instantiated: a node added to it now would be in no executable",
    node_added_to_a_step: "stands for a captured step",
    step_with_a_conditional: "record_call makes plain nodes",
    handle_of_another_context: "all is in one context",
    set_kernel_of_another_context: "a handle is set from its own context",
    body_of_another_context: "must belong to one context",
}


@pytest.mark.parametrize("breach", BREACHES, ids=lambda breach: breach.__name__)
def test_a_planted_breach_is_caught(driver, breach):
    with pytest.raises(GraphError, match=BREACHES[breach]):
        breach(driver)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SetWhile(None, INDEX), r"SetWhile flag must be a tensor of one torch.bool, got torch.int32 \[1\]"),
        (lambda: SetSwitch(None, FLAG, 2), "SetSwitch index must be a tensor of one torch.int32"),
        (lambda: SetSwitch(None, INDEX, 0), "SetSwitch branches must be at least 1, got 0"),
        (lambda: SetIf(None, INDEX.repeat(2), 0), r"SetIf index must be a tensor of one torch.int32, got .* \[2\]"),
        (lambda: SetIf(None, INDEX, -1), "SetIf branch must be at least 0, got -1"),
        (lambda: Publish(INDEX, None, WORD, WORD), "Publish flag must be a tensor of one torch.bool"),
        (lambda: Publish(FLAG, WORD, WORD, WORD), "Publish index must be a tensor of one torch.int32"),
        (lambda: Publish(FLAG, INDEX, INDEX, WORD), "Publish count must be a tensor of one torch.int64"),
        (lambda: Publish(FLAG, INDEX, WORD, FLAG), "Publish word must be a tensor of one torch.int64"),
    ],
)
def test_kernels_check_their_tensors(make, message):
    with pytest.raises(ValueError, match=message):
        make()
