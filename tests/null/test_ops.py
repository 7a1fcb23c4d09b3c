"""Each op of a forward on fake CUDA tensors: it can be captured, and its fake has the shapes of the real op."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from draftgraph.graphs.capture_guard import check_function, fake_cuda
from draftgraph.kernels.accept_block import accept_block
from draftgraph.kernels.accept_coupled import accept_coupled
from draftgraph.kernels.accept_standard import accept_standard
from draftgraph.kernels.accept_synthetic import accept_synthetic
from draftgraph.kernels.compact_path import compact_path
from draftgraph.kernels.draft_argmax import draft_argmax
from draftgraph.kernels.draft_distribution import draft_distribution
from draftgraph.kernels.embed_tokens import embed_tokens
from draftgraph.kernels.float8 import FLOAT8
from draftgraph.kernels.moe_experts import moe_experts
from draftgraph.kernels.project_logits import project_logits
from draftgraph.kernels.record_logprobs import record_logprobs
from draftgraph.kernels.rope_and_cache import rope_and_cache
from draftgraph.kernels.sample_target import sample_target
from draftgraph.kernels.window_attention import window_attention

pytestmark = pytest.mark.null

LAYERS, SLOTS, ROWS, WIDTH, HEADS, KV_HEADS, CONTEXT, SIZE, VALUE_SIZE = 2, 5, 4, 16, 8, 2, 128, 24, 16

DRAFTS, VOCAB = 3, 70

Make = Callable[..., torch.Tensor]


def makers(device: torch.device | str) -> tuple[Make, Make]:
    """Functions that make a tensor of bfloat16, or of a type given, and one of int32."""

    def floats(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, device=device).to(dtype)

    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    return floats, ints


def attend(device: torch.device | str, *, tree: bool, float8: bool) -> torch.Tensor:
    floats, ints = makers(device)
    kind = FLOAT8 if float8 else torch.bfloat16
    scale = floats(KV_HEADS, dtype=torch.float32) if float8 else None
    cu_tokens = ints(ROWS + 1)
    cu_tokens[1:] = WIDTH
    return window_attention(
        floats(WIDTH, HEADS, SIZE),
        floats(SLOTS, KV_HEADS, CONTEXT, SIZE, dtype=kind),
        floats(SLOTS, KV_HEADS, CONTEXT, VALUE_SIZE, dtype=kind),
        ints(WIDTH),
        cu_tokens,
        ints(ROWS),
        ints(ROWS),
        ints(WIDTH).long() + 1 if tree else None,
        0.25,
        32 if tree else 0,
        50.0 if tree else 0.0,
        scale,
        scale,
    )


def rotate(device: torch.device | str, *, norm: bool, float8: bool) -> torch.Tensor:
    floats, ints = makers(device)
    kind = FLOAT8 if float8 else torch.bfloat16
    scale = floats(KV_HEADS, dtype=torch.float32) + 1 if float8 else None
    return rope_and_cache(
        floats(WIDTH, (HEADS + KV_HEADS) * SIZE + KV_HEADS * VALUE_SIZE),
        floats(SIZE) if norm else None,
        floats(SIZE) if norm else None,
        floats(CONTEXT, SIZE // 2, dtype=torch.float32),
        floats(CONTEXT, SIZE // 2, dtype=torch.float32),
        ints(WIDTH),
        ints(WIDTH),
        ints(WIDTH),
        ints(ROWS + 1),
        ints(ROWS),
        floats(SLOTS, KV_HEADS, CONTEXT, SIZE, dtype=kind),
        floats(SLOTS, KV_HEADS, CONTEXT, VALUE_SIZE, dtype=kind),
        HEADS,
        1e-6,
        False,
        norm,
        scale,
        scale,
    )


def compact(device: torch.device | str, *, float8: bool) -> None:
    floats, ints = makers(device)
    kind = FLOAT8 if float8 else torch.bfloat16
    compact_path(
        floats(LAYERS, SLOTS, KV_HEADS, CONTEXT, SIZE, dtype=kind),
        floats(LAYERS, SLOTS, KV_HEADS, CONTEXT, VALUE_SIZE, dtype=kind),
        ints(ROWS, 6),
        ints(ROWS),
        ints(ROWS),
        ints(ROWS),
    )


def sample(device: torch.device | str) -> None:
    floats, ints = makers(device)
    parameters = [floats(SLOTS, dtype=torch.float32) + 0.5 for _ in range(3)]
    cu_tokens = ints(ROWS + 1)
    cu_tokens[1:] = WIDTH
    sample_target(
        floats(WIDTH, VOCAB),
        ints(WIDTH),
        ints(WIDTH),
        cu_tokens,
        ints(ROWS),
        parameters[0],
        ints(SLOTS),
        *parameters[1:],
        ints(SLOTS).long(),
        ints(WIDTH),
        floats(WIDTH, dtype=torch.float32),
        floats(WIDTH, dtype=torch.float32),
        ints(WIDTH).bool(),
    )


def accept(op: Callable[..., None], device: torch.device | str, *, full: bool) -> None:
    floats, ints = makers(device)
    single = torch.float32
    op(
        floats(WIDTH, VOCAB),
        ints(WIDTH),
        floats(WIDTH, dtype=single),
        floats(WIDTH, dtype=single),
        ints(WIDTH).bool(),
        ints(WIDTH),
        ints(SLOTS, DRAFTS),
        floats(SLOTS, DRAFTS, VOCAB, dtype=single) if full else None,
        floats(SLOTS, dtype=single) + 1,
        ints(SLOTS).long(),
        ints(ROWS + 1),
        ints(ROWS),
        ints(SLOTS),
        ints(SLOTS, DRAFTS + 1),
        ints(SLOTS).bool(),
    )


def accept_by_token(device: torch.device | str) -> None:
    _, ints = makers(device)
    accept_coupled(
        ints(WIDTH),
        ints(WIDTH).bool(),
        ints(SLOTS, DRAFTS),
        ints(ROWS + 1),
        ints(ROWS),
        ints(SLOTS),
        ints(SLOTS, DRAFTS + 1),
        ints(SLOTS).bool(),
    )


def accept_at_rates(device: torch.device | str) -> None:
    floats, ints = makers(device)
    accept_synthetic(
        ints(WIDTH),
        ints(WIDTH).bool(),
        ints(WIDTH),
        ints(SLOTS, DRAFTS),
        floats(DRAFTS, dtype=torch.float32),
        ints(SLOTS).long(),
        ints(ROWS + 1),
        ints(ROWS),
        ints(SLOTS),
        ints(SLOTS, DRAFTS + 1),
        ints(SLOTS).bool(),
    )


def record(device: torch.device | str, *, count: int) -> None:
    floats, ints = makers(device)
    record_logprobs(
        floats(WIDTH, VOCAB),
        ints(SLOTS, DRAFTS + 1),
        ints(SLOTS),
        ints(SLOTS).bool(),
        ints(ROWS + 1),
        ints(ROWS),
        ints(SLOTS) + 1,
        floats(SLOTS, CONTEXT, count + 1, dtype=torch.float32),
        ints(SLOTS, CONTEXT, count + 1),
    )


def mix(device: torch.device | str) -> torch.Tensor:
    floats, ints = makers(device)
    weights = floats(WIDTH, 2, dtype=torch.float32)
    experts = floats(6, 32, SIZE), floats(6, SIZE, 16)
    return moe_experts(floats(WIDTH, SIZE), ints(WIDTH, 2), weights, ints(WIDTH), *experts, "silu")


def choose(device: torch.device | str) -> None:
    floats, ints = makers(device)
    allowed, chosen = ints(VOCAB).bool(), ints(ROWS)
    draft_argmax(floats(ROWS, VOCAB), allowed, None, chosen, floats(ROWS, dtype=torch.float32), ints(ROWS).bool())


def keep_distribution(device: torch.device | str) -> None:
    floats, ints = makers(device)
    single = torch.float32
    draft_distribution(
        floats(ROWS, VOCAB),
        ints(ROWS),
        floats(ROWS, dtype=single),
        floats(ROWS, dtype=single),
        floats(SLOTS, dtype=single) + 1,
        ints(SLOTS).bool(),
        ints(ROWS),
        1,
        floats(SLOTS, DRAFTS, VOCAB, dtype=single),
    )


def embed(device: torch.device | str) -> torch.Tensor:
    floats, ints = makers(device)
    return embed_tokens(ints(WIDTH), floats(VOCAB, SIZE), 5.5)


def project(device: torch.device | str, *, cap: float) -> None:
    floats, _ = makers(device)
    project_logits(floats(WIDTH, SIZE), floats(VOCAB, SIZE), cap, floats(WIDTH, VOCAB))


CASES = {
    "moe_experts": mix,
    "embed_tokens": embed,
    "project_logits": lambda device: project(device, cap=0.0),
    "project_logits, soft cap": lambda device: project(device, cap=30.0),
    "window_attention of a chain": lambda device: attend(device, tree=False, float8=False),
    "window_attention of a tree, sliding": lambda device: attend(device, tree=True, float8=False),
    "window_attention, float8": lambda device: attend(device, tree=False, float8=True),
    "rope_and_cache": lambda device: rotate(device, norm=False, float8=False),
    "rope_and_cache with norms, interleaved": lambda device: rotate(device, norm=True, float8=False),
    "rope_and_cache, float8": lambda device: rotate(device, norm=False, float8=True),
    "compact_path": lambda device: compact(device, float8=False),
    "compact_path, float8": lambda device: compact(device, float8=True),
    "sample_target": sample,
    "record_logprobs": lambda device: record(device, count=0),
    "record_logprobs of 20": lambda device: record(device, count=20),
    "accept_coupled": accept_by_token,
    "draft_argmax": choose,
    "draft_distribution": keep_distribution,
    "accept_synthetic": accept_at_rates,
    "accept_standard": lambda device: accept(accept_standard, device, full=False),
    "accept_standard, draft distributions": lambda device: accept(accept_standard, device, full=True),
    "accept_block": lambda device: accept(accept_block, device, full=False),
    "accept_block, draft distributions": lambda device: accept(accept_block, device, full=True),
}


@pytest.mark.parametrize("name", CASES)
def test_the_op_can_be_captured_and_its_fake_is_right(name):
    real = CASES[name]("cpu")
    results = []
    with fake_cuda() as device:
        check_function(name, lambda: results.append(CASES[name](device)))
        assert results[0] is real or results[0].device.type == "cuda"
    if real is not None:
        assert results[0].shape == real.shape
        assert results[0].dtype == real.dtype
