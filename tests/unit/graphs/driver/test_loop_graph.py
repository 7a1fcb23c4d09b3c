"""A program's graph: the same outcome as the host executor's, and the structure that was meant."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from programs import World, plans, record_steps

from draftgraph.graphs import DecodeState, HostExecutor, Program, Sequence, Step, Switch, While
from draftgraph.graphs.driver.interpreter import running_order
from draftgraph.graphs.driver.protocol import GraphError, NodeKind, Publish
from draftgraph.graphs.driver.recording import RecordingDriver
from draftgraph.graphs.loop_graph import build_loop_graph


def launch(driver: RecordingDriver, program: Program, publish: Publish | None = None):
    built = build_loop_graph(driver, program, record_steps(driver, program), publish)
    executable = driver.instantiate(built.graph)
    driver.upload(executable, None)
    driver.launch(executable, None)
    return built, executable


@pytest.mark.parametrize("has_switch", [True, False], ids=["switch", "if chain"])
@settings(max_examples=150, deadline=None)
@given(plan=plans)
def test_a_random_program_has_the_host_executors_outcome(has_switch, plan):
    by_host, by_graph = World(), World()
    HostExecutor().run(by_host.program(plan))
    driver = RecordingDriver(has_switch=has_switch)
    built, executable = launch(driver, by_graph.program(plan))
    assert by_graph.outcome() == by_host.outcome()
    assert driver.launches == executable.launches == 1
    assert built.report.steps == len(list(by_graph.program(plan).steps()))


@settings(max_examples=50, deadline=None)
@given(plan=plans)
def test_a_graph_can_be_launched_again(plan):
    by_host, by_graph = World(), World()
    driver = RecordingDriver()
    _, executable = launch(driver, by_graph.program(plan))
    driver.launch(executable, None)
    program = by_host.program(plan)
    HostExecutor().run(program)
    HostExecutor().run(program)
    assert by_graph.outcome() == by_host.outcome()


def counted(world: World, name: str = "count", cell: int = 0) -> Step:
    return world.step(name, lambda: world.cells[cell].add_(1))


@pytest.mark.parametrize("has_switch", [True, False], ids=["switch", "if chain"])
def test_a_branch_that_changes_the_index_does_not_start_another(has_switch):
    world = World()
    world.cells[0] = 0
    branches = tuple(counted(world, f"branch {n}") for n in range(3))
    program = Program("p", Switch(world.cells[:1], branches), world.state)
    launch(RecordingDriver(has_switch=has_switch), program)
    assert world.log == ["branch 0"]


def test_one_step_is_a_program():
    world = World()
    built, _ = launch(RecordingDriver(), Program("p", counted(world), world.state))
    assert world.log == ["count"]
    assert built.report.depth == 0
    assert built.report.nodes == {NodeKind.KERNEL: 1, NodeKind.CHILD_GRAPH: 1}


def test_a_step_may_occur_twice():
    world = World()
    step = counted(world)
    built, _ = launch(RecordingDriver(), Program("p", Sequence(step, Sequence(), step), world.state))
    assert world.log == ["count", "count"]
    assert built.report.steps == 2


def test_a_loop_without_body_runs_while_its_flag_is_set_from_outside():
    world = World()
    flag = torch.ones(1, dtype=torch.bool)
    count, word = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    program = Program("p", While(flag, Sequence()), world.state)
    passes = []

    def host(publish: Publish) -> None:
        passes.append(int(word))
        flag.fill_(len(passes) < 3)

    launch(RecordingDriver(on_publish=host), program, Publish(flag, None, count, word))
    assert passes == [1 << 32 | 1, 2 << 32 | 1, 3 << 32 | 1]
    launch(RecordingDriver(), program)
    assert not flag


def test_publish_reports_rounds_index_and_flag_of_the_outermost_loop():
    world = World()
    flag, inner = torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.bool)
    count, word = torch.full((1,), (1 << 32) - 2), torch.zeros(1, dtype=torch.int64)
    index = world.cells[1:2]

    def round_() -> None:
        world.cells[0] += 1
        index.fill_(-1 if int(world.cells[0]) == 2 else 5)
        flag.copy_(world.cells[:1] < 3)

    body = Sequence(world.step("round", round_), While(inner, counted(world, "inner")))
    words = []
    driver = RecordingDriver(on_publish=lambda publish: words.append(int(publish.word)))
    built, _ = launch(driver, Program("p", While(flag, body), world.state), Publish(flag, index, count, word))
    # The round number keeps its low 32 bits, the index its low 31.
    first, second = (0xFFFFFFFF << 32 | 0x7FFFFFFF << 1 | 1) - (1 << 64), 5 << 1
    assert words == [first, second]
    assert built.report.depth == 2
    assert "\n".join(built.report.structure).count("publish") == 1


def test_publish_needs_an_outermost_loop():
    world = World()
    publish = Publish(world.state.running, None, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    inside = Switch(world.state.width_index, (While(world.state.running, counted(world)),))
    program = Program("p", inside, world.state)
    driver = RecordingDriver()
    with pytest.raises(GraphError, match="program 'p' has no outermost While"):
        build_loop_graph(driver, program, record_steps(driver, program), publish)


@pytest.mark.parametrize("has_switch", [True, False], ids=["switch", "if chain"])
def test_empty_branches_and_steps_leave_no_empty_body(has_switch):
    world = World()
    driver = RecordingDriver(has_switch=has_switch)
    idle, busy = Step("idle", lambda s: None), counted(world)
    index = world.cells[1:2]
    nothing = Sequence(Switch(index, (Sequence(), Sequence())))
    program = Program("p", Sequence(nothing, Switch(index, (nothing, idle, busy))), world.state)
    captured = {idle: driver.record_call("idle", lambda: None, kinds=()), busy: driver.record_call("busy", lambda: 0)}
    built = build_loop_graph(driver, program, captured)
    driver.instantiate(built.graph)
    conditional = 1 if has_switch else 2
    assert built.report.nodes[NodeKind.CONDITIONAL] == conditional
    assert sum("no-op" in line for line in built.report.structure) == (2 if has_switch else 1)


def test_a_step_that_was_not_captured_is_named():
    world = World()
    program = Program("p", Sequence(counted(world, "a"), counted(world, "b")), world.state)
    driver = RecordingDriver()
    captured = record_steps(driver, program)
    del captured[list(program.steps())[1]]
    with pytest.raises(GraphError, match="step 'b' was not captured; captured are: 'a'"):
        build_loop_graph(driver, program, captured)


@pytest.mark.parametrize(
    "kind",
    [
        NodeKind.HOST,
        NodeKind.EVENT_RECORD,
        NodeKind.EVENT_WAIT,
        NodeKind.MEM_ALLOC,
        NodeKind.MEM_FREE,
        NodeKind.EXTERNAL_SEMAPHORE,
        NodeKind.BATCH_MEM_OP,
        NodeKind.OTHER,
    ],
)
def test_a_forbidden_node_is_refused_with_the_steps_name(kind):
    world = World()
    step = counted(world, "verify[4]")
    driver = RecordingDriver()
    captured = {step: driver.record_call("x", lambda: None, kinds=(NodeKind.KERNEL, kind))}
    with pytest.raises(GraphError, match=rf"step 'verify\[4\]' holds a {kind} node: "):
        build_loop_graph(driver, Program("p", While(world.state.running, step), world.state), captured)


def test_a_host_node_outside_of_bodies_is_allowed():
    world = World()
    step = counted(world)
    driver = RecordingDriver()
    captured = {step: driver.record_call("x", lambda: None, kinds=(NodeKind.HOST,))}
    build_loop_graph(driver, Program("p", step, world.state), captured)


def test_the_structure_is_shown():
    world = World()
    state: DecodeState = world.state
    body = Sequence(counted(world, "propose"), Switch(state.width_index, (counted(world, "v4"), counted(world, "v8"))))
    program = Program("round[1]", While(state.running, body), state)
    driver = RecordingDriver()
    text = str(build_loop_graph(driver, program, record_steps(driver, program)).report)
    assert text.splitlines() == [
        "round[1]: 11 nodes (3 child graph, 2 conditional, 6 kernel), 3 steps, conditional nodes nested 2 deep",
        "  set while",
        "  WHILE:",
        "      propose: 1 kernel",
        "      set switch of 2",
        "      SWITCH:",
        "        branch 0:",
        "          v4: 1 kernel",
        "        branch 1:",
        "          v8: 1 kernel",
        "      set while",
    ]
    plain = str(build_loop_graph(RecordingDriver(has_switch=False), program, record_steps(driver, program)).report)
    assert [line.strip() for line in plain.splitlines()[4:9]] == [
        "set if index is 0",
        "set if index is 1",
        "IF branch 0:",
        "v4: 1 kernel",
        "IF branch 1:",
    ]


def test_every_graph_is_one_chain():
    """Nodes run in one order only: the order in which they were added, whichever ready node a device takes first."""
    world = World()
    state = world.state
    switch = Switch(state.width_index, (counted(world, "a"), counted(world, "b")))
    program = Program("p", While(state.running, Sequence(counted(world, "c"), switch, counted(world, "d"))), state)
    for has_switch in (True, False):
        driver = RecordingDriver(has_switch=has_switch)
        graphs = [build_loop_graph(driver, program, record_steps(driver, program)).graph]
        while graphs:
            graph = graphs.pop()
            assert list(running_order(graph)) == graph.nodes
            assert [len(node.after) for node in graph.nodes] == [0] + [1] * (len(graph.nodes) - 1)
            graphs += [body for node in graph.nodes if node.conditional for body in node.conditional.bodies]
