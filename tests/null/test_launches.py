"""What the engine's programs launch, recorded: the wrappers take its tensors, and nothing else launches."""

from __future__ import annotations

import pytest
import torch

from draftgraph.graphs import verify_widths
from draftgraph.graphs.capture_guard import fake_cuda
from draftgraph.kernels.accept_coupled import accept_coupled
from draftgraph.kernels.launch_recorder import Pointer, record_launches
from draftgraph.kernels.sample_target import sample_target
from draftgraph.kernels.triton_support import triton
from draftgraph.kernels.workspace import WorkspacePool

pytestmark = [pytest.mark.null, pytest.mark.skipif(triton is None, reason="Triton has no build for this machine")]

SIZES = {"slots": 3, "drafts": 5, "width": 8}


def accept(device, **changes):
    """Calls `accept_coupled` on two rows; `changes` replaces arguments by position."""

    def ints(*shape):
        return torch.zeros(shape, dtype=torch.int32, device=device)

    slots, drafts, width = SIZES.values()
    args = [ints(width), ints(width).bool(), ints(slots, drafts), ints(3), ints(2), ints(slots)]
    args += [ints(slots, drafts + 1), ints(slots).bool()]
    for index, change in changes.items():
        args[int(index[1:])] = change(args[int(index[1:])])
    accept_coupled(*args)


def test_a_launch_tells_all_that_it_is_compiled_for():
    with fake_cuda() as device, record_launches() as launches:
        accept(device)
    (launch,) = launches
    assert (launch.op, launch.name, launch.grid) == ("accept_coupled", "accept_coupled_kernel", (2,))
    assert launch.options == {"num_warps": 1, "maxnreg": 255}
    assert launch.constants == {"COLUMNS": 8}
    assert launch.arguments["sampled"] == Pointer(torch.int32, 0, 4 * SIZES["width"])
    assert launch.arguments["num_drafts"] == 5
    assert launch.signature == dict.fromkeys(
        ["sampled", "draft_tokens", "cu_tokens", "slot_of_row", "accepted", "emitted"], "*i32:16"
    ) | {"token_failed": "*u1:16", "row_failed": "*u1:16", "num_drafts": "i32"}


def test_only_what_a_kernel_is_compiled_for_tells_specialisations_apart():
    with fake_cuda() as device, record_launches() as launches:
        accept(device)
        accept(device)
        accept(device, _2=lambda x: x.new_zeros(3, 4), _6=lambda x: x.new_zeros(3, 5))
        accept(device, _4=lambda x: x.new_zeros(3)[1:])  # no multiple of 16 bytes
    first, second, fewer, unaligned = [launch.specialization for launch in launches]
    assert first == second == fewer
    assert hash(first) == hash(second)
    assert unaligned != first
    assert launches[3].signature["slot_of_row"] == "*i32"


def test_on_amd_small_tensors_are_marked_and_registers_are_not_limited():
    def sample(device):
        def ints(*shape):
            return torch.zeros(shape, dtype=torch.int32, device=device)

        def floats(*shape):
            return torch.zeros(shape, device=device)

        rows = (ints(8), ints(8), ints(2), ints(1))
        parameters = (floats(2), ints(2), floats(2), floats(2), ints(2).long())
        sample_target(floats(8, 100), *rows, *parameters, ints(8), floats(8), floats(8), ints(8).bool())

    with fake_cuda() as device, WorkspacePool():
        with record_launches() as on_nvidia:
            sample(device)
        with record_launches(amd=True) as on_amd:
            sample(device)
    assert len(on_nvidia) == len(on_amd) == 14
    assert all(launch.options["maxnreg"] == 255 for launch in on_nvidia)
    assert not any("maxnreg" in launch.options for launch in on_amd)
    assert {marks for _, kind, marks in on_amd[0].specialization.signature if kind.startswith("*")} == {"DS"}


def test_the_wrappers_checks_run():
    with fake_cuda() as device, record_launches() as launches:
        with pytest.raises(ValueError, match="sampled has dtype int64; accepted: int32"):
            accept(device, _0=lambda x: x.long())
        with pytest.raises(ValueError, match="draft_tokens has strides"):
            accept(device, _2=lambda x: x.new_zeros(5, 3).t())
    assert launches == []


def test_outside_nothing_is_recorded_and_the_fakes_run():
    with fake_cuda() as device:
        with record_launches() as launches:
            pass
        accept(device)
    assert launches == []


@pytest.mark.parametrize("rule", ["standard", "block", "coupled"])
def test_every_step_of_an_engine_launches_what_its_ops_need(rule):
    from fake_engines import CONTEXT, fake_builder

    from draftgraph.runtime.rounds import LogprobBuffers
    from draftgraph.runtime.speculative_config import SpeculativeConfig

    spec = SpeculativeConfig(method="ngram", num_speculative_tokens=5, rejection_sample_method=rule)
    by_step = {}
    with fake_cuda() as device:
        builder, state = fake_builder(spec, device)
        buffers = LogprobBuffers(
            torch.zeros((5, CONTEXT, 4), device=device), torch.zeros((5, CONTEXT, 4), dtype=torch.int32, device=device)
        )
        for program in (builder.round(4, verify_widths(4, 5), buffers), builder.prefill(16)):
            for step in program.steps():
                with torch.inference_mode(), record_launches() as launches:
                    step.fn(state)
                by_step[step.name] = {launch.op for launch in launches}
        held = builder.workspaces.num_bytes
    forward = {"rope_and_cache", "window_attention"}
    assert by_step.pop("prefill[16]") >= forward | {"pack_prefill"}
    assert all(by_step.pop(f"verify[{width}]") >= forward | {"pack_window"} for width in verify_widths(4, 5))
    assert by_step["propose"] == {"ngram_propose"}
    assert by_step["budget"] == {"plan_window"}
    assert by_step["accept"] == {"sample_target", f"accept_{rule}"}
    assert by_step["logprobs"] == {"record_logprobs"}
    assert "commit" in by_step["commit"]
    assert held > 0
