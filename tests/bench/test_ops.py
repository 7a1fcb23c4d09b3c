"""Every op of kernels/ at one shape, next to the time that an H200 cannot beat: one row of 8 tokens of an 8B model.

pytest tests/bench/test_ops.py --benchmark-enable -s

With a CUDA device the op is replayed from a graph, as in a round, and the share of the limit is printed too.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest
import torch
from moving_timings import MOVING, moving
from op_shapes import (
    CHUNK,
    CONTEXT,
    DEVICE,
    DRAFTS,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    REPEATS,
    SIZE,
    VOCAB,
    WIDTH,
    OpCase,
    halves,
    ints,
    state,
)

from draftgraph.kernels.accept_block import accept_block
from draftgraph.kernels.accept_coupled import accept_coupled
from draftgraph.kernels.accept_standard import accept_standard
from draftgraph.kernels.accept_synthetic import accept_synthetic
from draftgraph.kernels.advance_draft import advance_draft
from draftgraph.kernels.budget_topk import budget_topk
from draftgraph.kernels.choose_budget import choose_budget
from draftgraph.kernels.commit import commit
from draftgraph.kernels.compact_path import compact_path
from draftgraph.kernels.compile_report import BANDWIDTH, LAUNCH_SECONDS, all_specs
from draftgraph.kernels.draft_argmax import draft_argmax
from draftgraph.kernels.draft_distribution import draft_distribution
from draftgraph.kernels.embed_tokens import embed_tokens
from draftgraph.kernels.estimate_acceptance import estimate_acceptance
from draftgraph.kernels.keep_drafting import keep_drafting
from draftgraph.kernels.learn_acceptance import learn_acceptance
from draftgraph.kernels.linear import linear
from draftgraph.kernels.merge_drafts import merge_drafts
from draftgraph.kernels.moe_experts import moe_experts
from draftgraph.kernels.ngram_propose import ngram_propose
from draftgraph.kernels.pack_block import pack_block
from draftgraph.kernels.pack_tail import pack_tail
from draftgraph.kernels.pack_unseen import pack_unseen
from draftgraph.kernels.pack_window import pack_prefill, pack_window
from draftgraph.kernels.plan_window import plan_window
from draftgraph.kernels.project_logits import project_logits
from draftgraph.kernels.record_logprobs import record_logprobs
from draftgraph.kernels.rope_and_cache import rope_and_cache
from draftgraph.kernels.sample_target import sample_target
from draftgraph.kernels.suffix_propose import draft_budget, suffix_propose
from draftgraph.kernels.window_attention import window_attention
from draftgraph.kernels.workspace import WorkspacePool

pytestmark = pytest.mark.bench

ROUNDS = 30


def planning() -> dict[str, OpCase]:
    s = state()
    cu_tokens, base, index, budget = ints(2), ints(1), ints(1), ints(1) + 5
    widths = torch.tensor([1, 2, 4, 8, 16, 32], dtype=torch.int32).to(DEVICE)
    rows = [s.slot_of_row[slot : slot + 1] for slot in range(REPEATS)]
    common = (s.finished, s.length, s.limit, s.draft_count, s.draft_limit)
    window = (s.window_tokens, s.window_positions, s.window_slots, s.window_rows)
    chunk, place = [ints(CHUNK) for _ in range(4)], (ints(2), ints(1), ints(1))
    chunk_range = torch.tensor([CHUNK, CHUNK], dtype=torch.int32).to(DEVICE)
    return {
        "plan_window": OpCase(
            lambda slot: plan_window(*common, rows[slot], widths, cu_tokens, base, index),
            specs=["1 row"],
            written=[s.draft_count],
        ),
        "budget_topk": OpCase(
            lambda slot: budget_topk(*common, rows[slot], widths, s.confidence, budget, cu_tokens, base, index),
            specs=["1 row, 7 drafts"],
            written=[s.draft_count],
        ),
        "pack_window": OpCase(
            lambda slot: pack_window(s.tokens, s.length, s.draft_tokens, s.cu_tokens[:2], rows[slot], *window),
            specs=["1 row, 7 drafts"],
        ),
        "pack_prefill": OpCase(
            lambda slot: pack_prefill(s.tokens, rows[slot], chunk_range, *chunk, *place), specs=["a chunk"]
        ),
    }


def adapting() -> dict[str, OpCase]:
    s = state()
    widths = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.int32).to(DEVICE)
    rows = [s.slot_of_row[slot : slot + 1] for slot in range(REPEATS)]
    likely, ones = s.confidence + 0.5, torch.ones(16, device=DEVICE)
    known = [likely.clone() for _ in range(3)]
    weights, sums = ones[: DRAFTS + 1].clone(), ints(7, DRAFTS).long()
    rounds, budget, stop, rate = ints(1), ints(1), ints(1), ones[:1].clone()
    common = (s.finished, s.length, s.limit)
    costs = (ones[:8].clone(), ones[: DRAFTS + 1].clone())
    steps = (likely, widths, *costs, rounds, DRAFTS // 2, stop)
    judged = (s.accepted, s.failed, s.finished, s.cu_tokens[:2])
    kept = (s.running, likely.clone(), rounds, sums, weights)
    more = (s.draft_count, s.draft_limit)
    return {
        "choose_budget": OpCase(
            lambda slot: choose_budget(*common, *more, rows[slot], widths, likely, *costs, rounds, budget, rate),
            specs=["1 row, 7 drafts"],
        ),
        "keep_drafting": OpCase(
            lambda slot: keep_drafting(*common, s.draft_limit, rows[slot], *steps), specs=["1 row, 7 drafts"]
        ),
        "estimate_acceptance": OpCase(
            lambda slot: estimate_acceptance(s.confidence, s.draft_count, rows[slot], weights, likely, *known),
            specs=["8 drafts, learned"],
        ),
        "learn_acceptance": OpCase(
            lambda slot: learn_acceptance(s.confidence, likely, *judged, rows[slot], *kept), specs=["1 row, 7 drafts"]
        ),
    }


def ending() -> dict[str, OpCase]:
    s = state()
    rows = [s.slot_of_row[slot : slot + 1] for slot in range(REPEATS)]
    cu_tokens = s.cu_tokens[:2]
    heads, links, indexed = ints(REPEATS + 1, 3, 8192), ints(REPEATS + 1, 3, CONTEXT), ints(REPEATS + 1)
    # All but a round's tokens are indexed already.
    s.length.sub_(WIDTH)
    lookup = (s.tokens, s.length, s.finished)
    tables = (heads, links, indexed, s.draft_tokens, s.draft_count)
    ngram_propose(*lookup, s.slot_of_row, *tables, 2, 4)
    s.length.add_(WIDTH)
    grown, tree, counted = ints(REPEATS + 1, 24, 8192), ints(REPEATS + 1, 4, 24, CONTEXT), ints(REPEATS + 1)
    others = (ints(65536), ints(24, 65536), ints(4, 24, 65536))
    budget = torch.tensor(draft_budget(24, DRAFTS, 1.0), dtype=torch.int32).to(DEVICE)
    follow = (grown, tree, counted, *others, budget, s.draft_tokens, s.draft_count, s.confidence, 0.1)
    s.length.sub_(WIDTH)
    suffix_propose(*lookup, s.slot_of_row, *follow)
    s.length.add_(WIDTH)
    s.running.fill_(True)
    s.rounds_left.fill_(2**30)
    flags = (s.cancel, s.pause, s.leave_on_finish, s.taken)
    finishing = (s.stop_token_ids, s.limit, *flags, s.tokens, s.length, s.finished, s.finish_reason)
    counters = (s.ring_tokens, s.ring_count, s.published, s.rounds, s.histogram, None, s.rounds_left, s.running)
    return {
        "commit": OpCase(
            lambda slot: commit(s.emitted, s.accepted, s.failed, cu_tokens, rows[slot], *finishing, *counters),
            specs=["1 row, 7 drafts"],
            written=[s.length, s.finished, s.running],
        ),
        "ngram_propose": OpCase(
            lambda slot: ngram_propose(*lookup, rows[slot], *tables, 2, 4),
            specs=["2 to 4 tokens, 7 drafts, 8192 buckets"],
            written=[indexed, heads],
        ),
        "suffix_propose": OpCase(
            lambda slot: suffix_propose(*lookup, rows[slot], *follow),
            specs=["depth 24, 7 drafts, 8192 and 65536 buckets"],
            written=[counted, grown, tree],
        ),
    }


def sampling() -> dict[str, OpCase]:
    s = state()
    rows = [s.slot_of_row[slot : slot + 1] for slot in range(REPEATS)]
    cu_tokens, positions = s.cu_tokens[:2], s.window_positions
    parameters = (s.temperature, s.top_k, s.top_p, s.min_p, s.seed)
    found = (s.sampled, s.log_normalizer, s.threshold, s.token_failed)
    outcome = (s.accepted, s.emitted, s.failed)
    heat = (s.temperature, s.seed)
    rates = torch.full((DRAFTS,), 0.8, device=DEVICE)
    records = [torch.zeros(REPEATS + 1, CONTEXT, 6, device=DEVICE), ints(REPEATS + 1, CONTEXT, 6)]
    return {
        "sample_target": OpCase(
            lambda slot: sample_target(s.logits, s.window_rows, positions, cu_tokens, rows[slot], *parameters, *found),
            bytes_moved=WIDTH * (2 * VOCAB + 21),
        ),
        "accept_coupled": OpCase(
            lambda slot: accept_coupled(s.sampled, s.token_failed, s.draft_tokens, cu_tokens, rows[slot], *outcome),
            bytes_moved=4 * (2 * WIDTH + DRAFTS + 4) + WIDTH,
        ),
        "accept_synthetic": OpCase(
            lambda slot: accept_synthetic(
                s.sampled, s.token_failed, positions, s.draft_tokens, rates, s.seed, cu_tokens, rows[slot], *outcome
            ),
            bytes_moved=4 * (4 * WIDTH + 2 * DRAFTS + 6) + WIDTH,
        ),
        # One position's logits for the residual sample, one of each other for its draft.
        "accept_standard": OpCase(
            lambda slot: accept_standard(
                s.logits, *found, positions, s.draft_tokens, None, *heat, cu_tokens, rows[slot], *outcome
            ),
            bytes_moved=2 * VOCAB + WIDTH * 30,
        ),
        "accept_block": OpCase(
            lambda slot: accept_block(
                s.logits, *found, positions, s.draft_tokens, None, *heat, cu_tokens, rows[slot], *outcome
            ),
            bytes_moved=2 * VOCAB + WIDTH * 30,
        ),
        "record_logprobs": OpCase(
            lambda slot: record_logprobs(
                s.logits, s.emitted, s.accepted, s.failed, cu_tokens, rows[slot], s.length, *records
            ),
            bytes_moved=WIDTH * (2 * VOCAB + 48),
        ),
    }


def forward() -> dict[str, OpCase]:
    s = state()
    features = (HEADS + 2 * KV_HEADS) * SIZE
    qkv, hidden, weight = halves(WIDTH, features), halves(WIDTH, HIDDEN), halves(features, HIDDEN)
    query = halves(WIDTH, HEADS, SIZE)
    keys, values = (halves(2, KV_HEADS, CONTEXT, SIZE) for _ in range(2))
    angles = torch.rand(CONTEXT, SIZE // 2, device=DEVICE)
    projected, packed = (qkv, None, None, angles, angles), (s.cu_tokens[:2], s.base[:1])
    window = (s.window_positions, s.window_slots, s.window_rows)
    row = s.slot_of_row[:1]
    table = torch.zeros(VOCAB, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
    all_keys, all_values = (halves(LAYERS, 2, KV_HEADS, 64, SIZE) for _ in range(2))
    path = (torch.arange(1, 6, dtype=torch.int32).to(DEVICE)[None], ints(1) + 5, ints(1) + 16, row)
    return {
        "linear": OpCase(
            lambda slot: linear(hidden, weight), bytes_moved=2 * (weight.numel() + hidden.numel() + qkv.numel())
        ),
        "embed_tokens": OpCase(lambda slot: embed_tokens(s.window_tokens, table, 1.0), specs=["bf16"]),
        "project_logits": OpCase(
            lambda slot: project_logits(hidden, table, 0.0, s.logits),
            bytes_moved=2 * (table.numel() + hidden.numel() + s.logits.numel()),
        ),
        "rope_and_cache": OpCase(
            lambda slot: rope_and_cache(*projected, *window, *packed, keys, values, HEADS, 1e-5, False, False),
            specs=["bf16"],
        ),
        "window_attention": OpCase(
            lambda slot: window_attention(
                query, keys, values, s.window_positions, *packed, row, None, SIZE**-0.5, 0, 0.0
            ),
            specs=["128, bf16", "128, bf16: combine"],
        ),
        "compact_path": OpCase(lambda slot: compact_path(all_keys, all_values, *path), specs=["bf16, depth 8"]),
    }


def drafting() -> dict[str, OpCase]:
    """What a draft model's step does beside its forward; its logits are those of four rows."""
    s = state()
    rows = [s.slot_of_row[slot : slot + 1] for slot in range(REPEATS)]
    logits, width = halves(4, VOCAB), 4
    chosen, confidence, failed = ints(width), torch.zeros(width, device=DEVICE), ints(width).bool()
    window = [ints(width) for _ in range(4)]
    cu_tokens, base, last = ints(2), ints(1), ints(width)
    draft, limits = (chosen, confidence, failed), (s.length, s.limit, s.finished)
    normalizer, threshold = logits.float().logsumexp(1), torch.full((width,), -1.0, device=DEVICE)
    probabilities = torch.zeros(REPEATS + 1, 1, VOCAB, device=DEVICE)
    outcome = (s.draft_tokens, s.confidence, s.draft_count)
    block, size, mask = [ints(2 * WIDTH) for _ in range(4)], 2 * WIDTH, 7
    members = (s.draft_tokens.expand(2, -1, -1).contiguous(), s.draft_count.expand(2, -1).contiguous())
    confidences = s.confidence.expand(2, -1, -1).contiguous()
    # A head that has not read the last eight tokens.
    seen, start, pairs, owner = s.length - 1 - WIDTH, ints(REPEATS + 1), [ints(WIDTH) for _ in range(5)], ints(1)
    return {
        "pack_unseen": OpCase(
            lambda slot: pack_unseen(
                *(s.tokens, s.length, s.limit, s.finished, rows[slot], seen, start, 0, 0, 0, 0),
                *(*pairs[:4], cu_tokens, base, owner, pairs[4], last),
            ),
            specs=["1 row"],
        ),
        "pack_tail": OpCase(
            lambda slot: pack_tail(s.tokens, s.length, s.finished, rows[slot], None, 2, *window, cu_tokens, base, last),
            specs=["1 row"],
        ),
        "pack_block": OpCase(
            lambda slot: pack_block(
                s.tokens, s.length, s.finished, rows[slot], size, mask, *block, base, cu_tokens[1:]
            ),
            specs=["1 row"],
        ),
        "draft_argmax": OpCase(
            lambda slot: draft_argmax(logits, None, None, chosen, confidence, failed),
            specs=[f"bf16, 128256: {part}" for part in ("scan", "mass", "finish")],
        ),
        "draft_distribution": OpCase(
            lambda slot: draft_distribution(
                logits, chosen, normalizer, threshold, s.temperature, s.finished, rows[slot], 0, probabilities
            ),
            specs=["bf16, 128256"],
        ),
        "advance_draft": OpCase(
            lambda slot: advance_draft(*draft, *limits, rows[slot], None, 0, 0, 0, *outcome, *window, base, last[:1]),
            specs=["1 row"],
        ),
        "merge_drafts": OpCase(
            lambda slot: merge_drafts(
                *members, confidences, s.finished, rows[slot], s.draft_tokens, s.draft_count, s.confidence
            ),
            bytes_moved=2 * (8 * DRAFTS + 4) + 8 * DRAFTS + 9,
        ),
    }


def mixtures() -> dict[str, OpCase]:
    """Eight tokens, each with 8 of 128 experts of 2048 x 768: a layer of Qwen3-30B-A3B."""
    hidden, inner, experts, top = 2048, 768, 128, 8
    choices = [torch.randperm(experts)[:top] for _ in range(WIDTH)]
    chosen, weights = torch.stack(choices).int().to(DEVICE), torch.rand(WIDTH, top, device=DEVICE)
    gate_up, down = halves(experts, 2 * inner, hidden), halves(experts, hidden, inner)
    x, rows = halves(WIDTH, hidden), ints(WIDTH)
    parts = ("sort", "gate, up", "down", "sum")
    return {
        "moe_experts": OpCase(
            lambda slot: moe_experts(x, chosen, weights, rows, gate_up, down, "silu"),
            specs=[f"2048 x 768, bf16: {part}" for part in parts],
        )
    }


GROUPS = {
    **dict.fromkeys(MOVING, moving),
    "moe_experts": mixtures,
    "plan_window": planning,
    "budget_topk": planning,
    "choose_budget": adapting,
    "keep_drafting": adapting,
    "estimate_acceptance": adapting,
    "learn_acceptance": adapting,
    "pack_window": planning,
    "pack_prefill": planning,
    "commit": ending,
    "ngram_propose": ending,
    "suffix_propose": ending,
    "pack_block": drafting,
    "pack_tail": drafting,
    "pack_unseen": drafting,
    "draft_argmax": drafting,
    "draft_distribution": drafting,
    "advance_draft": drafting,
    "merge_drafts": drafting,
    "sample_target": sampling,
    "accept_coupled": sampling,
    "accept_synthetic": sampling,
    "accept_standard": sampling,
    "accept_block": sampling,
    "record_logprobs": sampling,
    "linear": forward,
    "embed_tokens": forward,
    "project_logits": forward,
    "rope_and_cache": forward,
    "window_attention": forward,
    "compact_path": forward,
}


def floor_seconds(name: str, case: OpCase) -> float:
    """What the op takes on an H200 at least: its bytes at full bandwidth, and its launches inside a graph."""
    specs = {spec.variant: spec for spec in all_specs() if spec.op == name}
    launches = [specs[variant].bytes_moved for variant in case.specs] or [case.bytes_moved]
    assert all(launches), f"{name} has no bytes to move"
    return sum(moved / BANDWIDTH + LAUNCH_SECONDS for moved in launches)


def graph_of(run: Callable[[int], object]) -> torch.cuda.CUDAGraph:
    """`REPEATS` calls, each on its slot."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for slot in range(REPEATS):
            run(slot)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for slot in range(REPEATS):
            run(slot)
    return graph


@pytest.fixture(autouse=True)
def _pool():
    with WorkspacePool():
        yield


@pytest.mark.parametrize("name", GROUPS)
def test_op(benchmark, name):
    case = GROUPS[name]()[name]
    if DEVICE == "cuda" and name != "linear" and not has_cuda(name):
        pytest.skip(f"{name} has no CUDA implementation")
    before = [tensor.clone() for tensor in case.written]

    def restore() -> None:
        for tensor, content in zip(case.written, before, strict=True):
            tensor.copy_(content)
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    floor = floor_seconds(name, case)
    if DEVICE == "cpu":
        case.run(0)
        benchmark.pedantic(lambda: case.run(0), setup=restore, rounds=ROUNDS)
        seconds = statistics.median(benchmark.stats.stats.data)
        share = ""
    else:
        graph = graph_of(case.run)

        def replay() -> None:
            graph.replay()
            torch.cuda.synchronize()

        benchmark.pedantic(replay, setup=restore, rounds=ROUNDS, warmup_rounds=3)
        # The graph's own launch and the wait for it are in the time, shared by the calls.
        seconds = statistics.median(benchmark.stats.stats.data) / REPEATS
        share = f", {floor / seconds:.0%} of the limit"
        benchmark.extra_info["share"] = floor / seconds
    benchmark.extra_info["floor_us"] = 1e6 * floor
    print(f"\n{name}: {1e6 * seconds:.1f} us on {DEVICE}; at least {1e6 * floor:.1f} us on an H200{share}")


def has_cuda(name: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"draftgraph::{name}", "CUDA")
