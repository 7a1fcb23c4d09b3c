"""The guard itself: each thing that a graph cannot hold is caught when planted, and ordinary steps pass."""

from __future__ import annotations

import pytest
import torch

from draftgraph.graphs import DecodeState, Sequence, StateShape, Step, Switch, While
from draftgraph.graphs.capture_guard import CaptureError, check_program, check_step, fake_cuda
from draftgraph.graphs.program import Program

pytestmark = pytest.mark.null

SHAPE = StateShape(slots=2, context=32, num_drafts=3, vocab_size=11, max_bucket=2, max_width=8)


def planted_item(s: DecodeState) -> None:
    s.length[0].item()


def planted_bool(s: DecodeState) -> None:
    if s.running:
        s.length.add_(1)


def planted_int(s: DecodeState) -> None:
    s.tokens[:, : int(s.length[0])].zero_()


def planted_tolist(s: DecodeState) -> None:
    s.length.tolist()


def planted_numpy(s: DecodeState) -> None:
    s.length.cpu().numpy()


def planted_cpu(s: DecodeState) -> None:
    s.length.cpu()


def planted_copy_to_host(s: DecodeState) -> None:
    torch.empty(3, dtype=torch.int32).copy_(s.length)


def planted_copy_from_host(s: DecodeState) -> None:
    s.length.copy_(torch.tensor([1, 2, 3], dtype=torch.int32))


def planted_tensor_from_list(s: DecodeState) -> None:
    s.length.add_(torch.tensor([1, 2, 3], dtype=torch.int32).to(s.length.device))


def planted_nonzero(s: DecodeState) -> None:
    s.finished.nonzero()


def planted_boolean_index(s: DecodeState) -> None:
    s.length[s.finished]


def planted_boolean_store(s: DecodeState) -> None:
    s.length[s.finished] = s.limit[s.finished]


def planted_masked_select(s: DecodeState) -> None:
    torch.masked_select(s.length, s.finished)


def planted_unique(s: DecodeState) -> None:
    torch.unique(s.length)


def planted_repeat_interleave(s: DecodeState) -> None:
    torch.repeat_interleave(s.length, s.limit.long())


def planted_where_without_values(s: DecodeState) -> None:
    torch.where(s.finished)


PLANTED = [value for name, value in sorted(globals().items()) if name.startswith("planted_")]


@pytest.mark.parametrize("fn", PLANTED, ids=lambda fn: fn.__name__)
def test_a_planted_fault_is_caught_and_named(fn):
    with fake_cuda() as device:
        state = DecodeState.allocate(SHAPE, dtype=torch.float32, device=device)
        with pytest.raises(CaptureError, match=f"step '{fn.__name__}' cannot be captured"):
            check_step(Step(fn.__name__, fn), state)


def test_an_ordinary_step_passes():
    def fine(s: DecodeState) -> None:
        slots = s.slot_of_row.long()
        s.length[slots] = torch.where(s.finished[slots], s.length[slots], s.length[slots] + 1)
        s.cu_tokens[1:] = torch.cumsum(s.base, 0)
        s.logits.copy_(s.logits @ s.logits.T @ s.logits)

    with fake_cuda() as device:
        state = DecodeState.allocate(SHAPE, dtype=torch.float32, device=device)
        check_step(Step("fine", fine), state)


def test_every_branch_of_a_program_is_checked():
    with fake_cuda() as device:
        state = DecodeState.allocate(SHAPE, dtype=torch.float32, device=device)
        good = Step("good", lambda s: s.base.zero_())
        bad = Step("second branch", lambda s: s.base[0].item())
        body = Sequence(good, Switch(state.width_index, (good, good)))
        assert check_program(Program("fine", While(state.running, body), state)) == 3
        body = Sequence(good, Switch(state.width_index, (good, bad)))
        with pytest.raises(CaptureError, match="second branch"):
            check_program(Program("broken", While(state.running, body), state))


def test_the_message_says_where():
    with fake_cuda() as device:
        state = DecodeState.allocate(SHAPE, dtype=torch.float32, device=device)
        with pytest.raises(CaptureError, match=r"copies between cpu and cuda.*test_capture_guard\.py"):
            check_step(Step("copy", planted_cpu), state)


@pytest.mark.parametrize(
    "index",
    [
        (0,),
        (slice(1, 3),),
        (slice(None, None, 2), 1),
        (Ellipsis, 0),
        (None, slice(None), None),
        (slice(None), "pick"),
        ("pick", 1),
        (Ellipsis, "pick"),
        (slice(-2, None),),
        (-1, Ellipsis, slice(0, 2)),
    ],
    ids=str,
)
def test_fake_indexing_has_the_shapes_of_real_indexing(index):
    def resolve(device):
        return tuple(torch.tensor([0, 1, 1], device=device) if i == "pick" else i for i in index)

    real = torch.arange(4 * 3 * 5).reshape(4, 3, 5)
    expected = real[resolve("cpu")]
    with fake_cuda() as device:
        fake = torch.zeros(4, 3, 5, dtype=torch.int64, device=device)
        assert fake[resolve(device)].shape == expected.shape
        fake[resolve(device)] = 7
        fake[resolve(device)] = torch.zeros(expected.shape, dtype=torch.int64, device=device)
