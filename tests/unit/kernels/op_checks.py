"""What every op of a round is held to, and random rounds to hold it to that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from draftgraph.graphs.capture_guard import check_function, fake_cuda
from draftgraph.graphs.state import DecodeState, StateShape


def clone(args: Sequence[Any]) -> list[Any]:
    """Copies of the tensors, so that an op under test cannot change those of another."""
    return [copied(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]


def copied(tensor: torch.Tensor, device: str | torch.device | None = None) -> torch.Tensor:
    """A copy with the same strides, unlike torch's of a part of wider rows; what lies between its own numbers is 99."""
    device = tensor.device if device is None else device
    strided = not tensor.is_contiguous() and 0 not in (*tensor.stride(), tensor.numel())
    if not strided or torch.device(device).type == "meta":
        return tensor.to(device, copy=True)
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    place = torch.full((1 + sum((size - 1) * stride for size, stride in steps),), 99.0, device=device)
    return place.to(tensor.dtype).as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def assert_same_effect(op: Callable[..., Any], reference: Callable[..., Any], args: Sequence[Any]) -> None:
    """Runs both on copies of `args` and compares every tensor bit by bit."""
    ours, theirs = clone(args), clone(args)
    op(*ours)
    reference(*theirs)
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if isinstance(a, torch.Tensor):
            assert torch.equal(bits(a), bits(b)), f"argument {index}: {a} against {b}"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Integers that differ when the tensor's bits do: also for NaN and the two zeros."""
    return (
        tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()]) if tensor.is_floating_point() else tensor
    )


def check_registration(op: Any, args: Sequence[Any]) -> None:
    """Schema and fake of the op by torch's own checks."""
    torch.library.opcheck(op, tuple(clone(args)), test_utils=("test_schema", "test_faketensor"))


class _OneDevice(TorchDispatchMode):
    """Refuses any tensor of another device, also one that is never copied."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        flat, _ = torch.utils._pytree.tree_flatten((args, kwargs, result))
        kinds = {leaf.device.type for leaf in flat if isinstance(leaf, torch.Tensor)}
        assert kinds <= {"cuda"}, f"{func} touches {kinds}"
        return result


def check_capture_safe(reference: Callable[..., Any], args: Sequence[Any]) -> None:
    """Traces the function on fake CUDA tensors: a host read, a host tensor or a data-dependent shape raises."""
    with fake_cuda() as device:
        fake = [
            torch.empty(arg.shape, dtype=arg.dtype, device=device) if isinstance(arg, torch.Tensor) else arg
            for arg in args
        ]
        with _OneDevice():
            check_function(getattr(reference, "__name__", "op"), lambda: reference(*fake))


def random_round(
    seed: int,
    *,
    rows: int = 3,
    num_drafts: int = 3,
    context: int = 24,
    vocab: int = 7,
    dtype: torch.dtype = torch.float32,
) -> tuple[DecodeState, int]:
    """A state in the middle of a round, with windows that agree with its lengths, and the bucket's size.

    The bucket has up to two padding rows, and some of its rows are finished. Draft ids include -1.
    """
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, size: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, size, generator=generator, dtype=torch.int32)

    padding = int(integers(0, 3, (1,)))
    bucket = rows + padding
    width = bucket * (num_drafts + 1) + int(integers(0, 4, (1,)))
    shape = StateShape(
        slots=max(rows + 2, bucket),
        context=context,
        num_drafts=num_drafts,
        vocab_size=vocab,
        max_bucket=bucket,
        max_width=width,
        max_stop_tokens=2,
    )
    state = DecodeState.allocate(shape, dtype=dtype, device="cpu")
    slots = torch.randperm(shape.slots, generator=generator)[:rows]
    state.slot_of_row[:rows] = slots.int()
    state.finished[slots] = torch.rand(rows, generator=generator) < 0.2
    state.tokens.copy_(integers(0, vocab, (shape.slots + 1, context)))
    state.length[:-1] = integers(1, context - 1, (shape.slots,))
    state.limit[:-1] = torch.minimum(
        state.length[:-1] + integers(1, num_drafts + 4, (shape.slots,)), torch.tensor(context)
    ).int()
    state.draft_tokens.copy_(integers(-1, vocab, tuple(state.draft_tokens.shape)))
    state.draft_count.copy_(integers(0, num_drafts + 1, (shape.slots + 1,)))
    state.draft_limit.copy_(integers(0, num_drafts + 1, (bucket + 1,)))
    state.stop_token_ids.copy_(integers(-1, vocab, tuple(state.stop_token_ids.shape)))
    state.cancel[slots] = torch.rand(rows, generator=generator) < 0.1
    state.pause[0] = bool(torch.rand(1, generator=generator) < 0.2)
    state.ring_count[:-1] = torch.randint(0, 10 * context, (shape.slots,), generator=generator)
    state.taken[:-1] = state.ring_count[:-1] - integers(0, max(1, context - num_drafts), (shape.slots,))
    state.leave_on_finish[0] = bool(torch.rand(1, generator=generator) < 0.5)
    state.rounds_left[0] = integers(0, 6, (1,))[0]
    state.running[0] = seed % 8 != 0
    state.rounds.copy_(integers(0, context + 2, (shape.slots + 1,)))
    state.seed.copy_(torch.randint(-(2**62), 2**62, (shape.slots + 1,), generator=generator))

    live = ~state.finished[state.slot_of_row.long()]
    drafts = integers(0, num_drafts + 1, (bucket,))
    state.cu_tokens[1:] = torch.cumsum((drafts + 1) * live, 0)
    state.base.copy_(state.length[state.slot_of_row.long()] - 1)
    for row in range(bucket):
        begin, end = int(state.cu_tokens[row]), int(state.cu_tokens[row + 1])
        state.window_rows[begin:end] = row
        state.window_positions[begin:end] = torch.arange(end - begin).int() + state.base[row]
    state.sampled.copy_(integers(0, vocab, (width,)))
    state.token_failed.copy_(torch.rand(width, generator=generator) < 0.05)
    state.failed[slots] = torch.rand(rows, generator=generator) < 0.1
    state.emitted.copy_(integers(0, vocab, tuple(state.emitted.shape)))
    for row in range(bucket):
        verified = int(state.cu_tokens[row + 1] - state.cu_tokens[row]) - 1
        accepted = int(integers(0, verified + 1, (1,))) if verified >= 0 else 0
        state.accepted[state.slot_of_row[row]] = accepted
    state.logits.copy_(3 * torch.randn(width, vocab, generator=generator))
    return state, bucket


def set_sampling_parameters(state: DecodeState, seed: int) -> None:
    """Random sampling parameters, many of them at the value that disables them."""
    rng = np.random.default_rng(seed)
    for slot in range(state.temperature.shape[0]):
        state.temperature[slot] = rng.choice([0.0, 1.0, rng.uniform(0.1, 3)])
        state.top_k[slot] = int(rng.choice([0, 1, 2, 5, state.shape.vocab_size, 1000]))
        state.top_p[slot] = rng.choice([1.0, 0.0, rng.uniform(0.01, 0.99)])
        state.min_p[slot] = rng.choice([0.0, 1.0, rng.uniform(0.001, 0.9)])
