"""The Triton kernel of `suffix_propose`: one program per row, one lane per length of the match."""

from __future__ import annotations

from typing import Any

import torch

from .suffix_index import LONGEST, PLANES, SPREAD, STEP, hash_shift
from .triton_support import (
    UNFUSED,
    KernelSpec,
    check_some,
    check_tensor,
    constants_of,
    draft_range,
    jit,
    next_power_of_2,
    tl,
)


@jit
def _buckets(token, power, shift, ONE_BUCKET: tl.constexpr, SPREAD: tl.constexpr):  # type: ignore[no-untyped-def]
    # Element d - 1 of `token` is the d-th token from the end, and of the result the bucket of the last d tokens.
    term = (token.to(tl.uint32) * power).to(tl.int64)
    value = (tl.cumsum(term, 0) & 0xFFFFFFFF).to(tl.uint32) * SPREAD
    # A shift by all 32 bits is undefined.
    return (value * 0).to(tl.int32) if ONE_BUCKET else (value >> shift.to(tl.uint32)).to(tl.int32)


@jit
def _follow_best(tree, width, plane, depth, node, live, budget, least, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    # Planes: 1 the node by position, 2 the count by node, 3 the best child by node. `depth` counts from 1.
    score = tl.zeros([LANES], dtype=tl.float32)
    made = tl.zeros([LANES], dtype=tl.int32)
    probability = tl.full([LANES], 1.0, dtype=tl.float32)
    goes_on = live & (budget > 0)
    at = (depth - 1).to(tl.int64) * width
    count = tl.load(tree + 2 * plane + at + node, mask=goes_on, other=1)
    after = tl.load(tree + 3 * plane + at + node, mask=goes_on, other=0)
    while tl.max(after, 0) > 0:
        at += width
        child = tl.load(tree + plane + at + after - 1, mask=after > 0, other=0)
        child_count = tl.load(tree + 2 * plane + at + child, mask=after > 0, other=1)
        probability = probability * tl.div_rn(child_count.to(tl.float32), count.to(tl.float32))
        stands = (after > 0) & (probability >= least)
        score = tl.where(stands, score + probability, score)
        made += stands.to(tl.int32)
        count = child_count
        after = tl.load(tree + 3 * plane + at + child, mask=stands & (made < budget), other=0)
    return score, made


@jit
def _write_drafts(tokens, tree, width, plane, depth, node, made, drafts, confidence):  # type: ignore[no-untyped-def]
    at = (depth - 1).to(tl.int64) * width
    count = tl.load(tree + 2 * plane + at + node)
    for place in range(made):
        after = tl.load(tree + 3 * plane + at + node)
        at += width
        node = tl.load(tree + plane + at + after - 1)
        child_count = tl.load(tree + 2 * plane + at + node)
        tl.store(drafts + place, tl.load(tokens + after - 1))
        tl.store(confidence + place, tl.div_rn(child_count.to(tl.float32), count.to(tl.float32)))
        count = child_count


@jit(
    unspecialized=[
        "context",
        "global_context",
        "num_drafts",
        "depth",
        "buckets",
        "shift",
        "global_buckets",
        "global_shift",
    ]
)
def _suffix_propose_kernel(  # type: ignore[no-untyped-def]
    tokens,
    length,
    finished,
    slot_of_row,
    heads,
    tree,
    indexed,
    global_tokens,
    global_heads,
    global_tree,
    budget,
    draft_tokens,
    draft_count,
    confidence,
    context,
    global_context,
    least,
    num_drafts,
    depth,
    buckets,
    shift,
    global_buckets,
    global_shift,
    ONE_BUCKET: tl.constexpr,
    ONE_GLOBAL_BUCKET: tl.constexpr,
    STEP: tl.constexpr,
    SPREAD: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_DRAFTS: tl.constexpr,
):
    slot = tl.load(slot_of_row + tl.program_id(0)).to(tl.int64)
    draft = tl.arange(0, BLOCK_DRAFTS)
    drafts = draft_tokens + slot * num_drafts
    chances = confidence + slot * num_drafts
    tl.store(drafts + draft, tl.full([BLOCK_DRAFTS], -1, tl.int32), mask=draft < num_drafts)
    tl.store(chances + draft, tl.zeros([BLOCK_DRAFTS], tl.float32), mask=draft < num_drafts)
    tl.store(draft_count + slot, 0)
    if tl.load(finished + slot).to(tl.int32) != 0:
        return
    row = tokens + slot * context
    row_length = tl.load(length + slot)
    lane = tl.arange(0, LANES)
    real = lane < depth
    plane = slot * 0 + context * depth
    own = tree + slot * plane * 4
    own_heads = heads + (slot * depth + lane) * buckets
    links = own + lane * context
    nodes = own + plane + lane * context
    counts = own + 2 * plane + lane * context
    best = own + 3 * plane + lane * context
    # STEP to the power of the lane, by repeated squaring.
    power = tl.full([LANES], 1, tl.uint32)
    square = tl.full([LANES], STEP, tl.uint32)
    for bit in tl.static_range(6):
        power = tl.where(((lane >> bit) & 1) != 0, power * square, power)
        square = square * square

    # Enter the new tokens one after another, all depths at once.
    for end in range(tl.load(indexed + slot), row_length):
        valid = real & (lane <= end)
        recent = tl.load(row + end - lane, mask=valid, other=0)
        token = tl.load(row + end)
        bucket = _buckets(recent, power, shift, ONE_BUCKET, SPREAD)
        has_parent = valid & (lane > 0)
        parent = tl.load(nodes - context + end - 1, mask=has_parent, other=0)
        head = tl.load(own_heads + bucket, mask=valid, other=0)
        follow = head
        found = tl.zeros([LANES], dtype=tl.int32)
        while tl.max(follow, 0) > 0:
            last = tl.load(row + follow - 1, mask=follow > 0, other=-1)
            above = tl.load(nodes - context + follow - 2, mask=(follow > 0) & (lane > 0), other=0)
            same = (follow > 0) & (last == token) & ((lane == 0) | (above == parent))
            found = tl.where(same, follow, found)
            follow = tl.load(links + follow - 1, mask=(follow > 0) & (found == 0), other=0)
        is_new = valid & (found == 0)
        node = tl.where(found > 0, found - 1, end)
        count = tl.load(counts + node, mask=valid & (found > 0), other=0) + 1
        # The entries of the positions before, and those read above, are not written below; what is written here may
        # be read by other threads from the barrier on.
        tl.debug_barrier()
        tl.store(links + end, head, mask=is_new)
        tl.store(best + end, tl.zeros([LANES], tl.int32), mask=is_new)
        tl.store(own_heads + bucket, tl.zeros([LANES], tl.int32) + end + 1, mask=is_new)
        tl.store(nodes + end, node, mask=valid)
        tl.store(counts + node, count, mask=valid)
        tl.debug_barrier()
        rival = tl.load(best - context + parent, mask=has_parent, other=0)
        rival_node = tl.load(nodes + rival - 1, mask=rival > 0, other=0)
        rival_count = tl.load(counts + rival_node, mask=rival > 0, other=0)
        tl.debug_barrier()
        wins = has_parent & (rival_count <= count)
        tl.store(best - context + parent, tl.zeros([LANES], tl.int32) + end + 1, mask=wins)
        tl.debug_barrier()
    tl.store(indexed + slot, row_length)

    # The nodes of the last tokens: the row's own are entered, the others' are looked up, compared token by token.
    known = real & (lane < row_length)
    recent = tl.load(row + row_length - 1 - lane, mask=known, other=0)
    own_node = tl.load(nodes + row_length - 1, mask=known, other=0)
    bucket = _buckets(recent, power, global_shift, ONE_GLOBAL_BUCKET, SPREAD)
    follow = tl.load(global_heads + lane * global_buckets + bucket, mask=known, other=0)
    found = tl.zeros([LANES], dtype=tl.int32)
    while tl.max(follow, 0) > 0:
        compared = (follow > 0)[:, None] & (lane[None, :] <= lane[:, None])
        there = tl.load(global_tokens + follow[:, None] - 1 - lane[None, :], mask=compared, other=0)
        differ = tl.sum((compared & (there != recent[None, :])).to(tl.int32), 1)
        found = tl.where((follow > 0) & (differ == 0), follow, found)
        follow = tl.load(global_tree + lane * global_context + follow - 1, mask=(follow > 0) & (found == 0), other=0)
    most = tl.minimum(tl.load(budget + lane, mask=real, other=0), num_drafts)
    own_score, own_made = _follow_best(own, context, plane, lane + 1, own_node, known, most, least, LANES)
    global_plane = slot * 0 + global_context * depth
    node = tl.maximum(found - 1, 0)
    score, made = _follow_best(global_tree, global_context, global_plane, lane + 1, node, found > 0, most, least, LANES)

    # The highest score, then the longest match, then the row's own tree.
    own_highest, highest = tl.max(own_score, 0), tl.max(score, 0)
    own_lane = tl.max(tl.where(own_score == own_highest, lane, 0), 0)
    global_lane = tl.max(tl.where(score == highest, lane, 0), 0)
    own_wins = (own_highest > highest) | ((own_highest == highest) & (own_lane >= global_lane))
    count = 0
    if own_wins:
        chosen = lane == own_lane
        count = tl.sum(tl.where(chosen, own_made, 0), 0)
        start = tl.sum(tl.where(chosen, own_node, 0), 0)
        # The drafts' places were cleared above.
        tl.debug_barrier()
        _write_drafts(row, own, context, plane, own_lane + 1, start, count, drafts, chances)
    else:
        chosen = lane == global_lane
        count = tl.sum(tl.where(chosen, made, 0), 0)
        start = tl.sum(tl.where(chosen, node, 0), 0)
        tl.debug_barrier()
        _write_drafts(
            global_tokens, global_tree, global_context, global_plane, global_lane + 1, start, count, drafts, chances
        )
    tl.store(draft_count + slot, count)


def _sizes(depth: int, num_drafts: int, buckets: int, global_buckets: int) -> dict[str, int]:
    """The sizes and constants of the kernel."""
    return {
        "num_drafts": num_drafts,
        "depth": depth,
        "buckets": buckets,
        "shift": hash_shift(buckets),
        "global_buckets": global_buckets,
        "global_shift": hash_shift(global_buckets),
        "ONE_BUCKET": buckets == 1,
        "ONE_GLOBAL_BUCKET": global_buckets == 1,
        "STEP": STEP,
        "SPREAD": SPREAD,
        "LANES": max(32, next_power_of_2(depth)),
        "BLOCK_DRAFTS": draft_range(num_drafts),
    }


_NUM_WARPS = 1
"""A lane's entries are read again by the thread that wrote them, and a barrier of one warp costs next to nothing."""


def suffix_propose_triton(
    tokens: torch.Tensor,
    length: torch.Tensor,
    finished: torch.Tensor,
    slot_of_row: torch.Tensor,
    heads: torch.Tensor,
    tree: torch.Tensor,
    indexed: torch.Tensor,
    global_tokens: torch.Tensor,
    global_heads: torch.Tensor,
    global_tree: torch.Tensor,
    budget: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_count: torch.Tensor,
    confidence: torch.Tensor,
    min_probability: float,
) -> None:
    """The launch for CUDA tensors, or for CPU tensors under the interpreter.

    Raises:
        ValueError: an argument that the kernel could not take.
    """
    device, int32 = tokens.device, (torch.int32,)
    check_tensor("tokens", tokens, dtypes=int32, shape=(None, None), device=device)
    slots, context = tokens.shape
    check_some("tokens", "slot", slots)
    check_some("tokens", "position", context)
    check_tensor("heads", heads, dtypes=int32, shape=(slots, None, None), device=device)
    depth, buckets = heads.shape[1:]
    check_some("heads", "bucket", buckets)
    if not 1 <= depth <= LONGEST:
        raise ValueError(f"the tree must be 1 to {LONGEST} tokens deep, got {depth}")
    check_tensor("tree", tree, dtypes=int32, shape=(slots, PLANES, depth, context), device=device)
    for name, of_slot in (("length", length), ("indexed", indexed), ("draft_count", draft_count)):
        check_tensor(name, of_slot, dtypes=int32, shape=(slots,), device=device)
    check_tensor("finished", finished, dtypes=(torch.bool,), shape=(slots,), device=device)
    check_tensor("global_tokens", global_tokens, dtypes=int32, shape=(None,), device=device)
    check_tensor("global_heads", global_heads, dtypes=int32, shape=(depth, None), device=device)
    global_context, global_buckets = global_tokens.shape[0], global_heads.shape[1]
    check_some("global_tokens", "position", global_context)
    check_some("global_heads", "bucket", global_buckets)
    check_tensor("global_tree", global_tree, dtypes=int32, shape=(PLANES, depth, global_context), device=device)
    check_tensor("budget", budget, dtypes=int32, shape=(depth,), device=device)
    check_tensor("draft_tokens", draft_tokens, dtypes=int32, shape=(slots, None), device=device)
    num_drafts = draft_tokens.shape[1]
    check_tensor("confidence", confidence, dtypes=(torch.float32,), shape=(slots, num_drafts), device=device)
    check_tensor("slot_of_row", slot_of_row, dtypes=int32, shape=(None,), device=device)
    rows = slot_of_row.shape[0]
    if rows == 0:
        return
    _suffix_propose_kernel[(rows,)](
        tokens,
        length,
        finished,
        slot_of_row,
        heads,
        tree,
        indexed,
        global_tokens,
        global_heads,
        global_tree,
        budget,
        draft_tokens,
        draft_count,
        confidence,
        context,
        global_context,
        min_probability,
        **_sizes(depth, num_drafts, buckets, global_buckets),
        num_warps=_NUM_WARPS,
        **UNFUSED,
    )


def kernel_specs() -> list[KernelSpec]:
    """The usual tree, without and with few drafts, and the deepest."""

    def spec(depth: int, num_drafts: int, buckets: int, global_buckets: int) -> KernelSpec:
        names = "tokens length slot_of_row heads tree indexed global_tokens global_heads global_tree budget"
        integers = (*names.split(), "draft_tokens", "draft_count")
        new, sizes = num_drafts + 1, _sizes(depth, num_drafts, buckets, global_buckets)
        arguments: dict[str, Any] = dict.fromkeys(integers, "*i32") | {"finished": "*u1", "confidence": "*fp32"}
        return KernelSpec(
            op="suffix_propose",
            variant=f"depth {depth}, {num_drafts} drafts, {buckets} and {global_buckets} buckets",
            kernel=_suffix_propose_kernel,
            arguments=arguments
            | dict.fromkeys(("context", "global_context", *(name for name in sizes if name.islower())), "i32")
            | {"least": "fp32"},
            constants=constants_of(sizes),
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,
            shape=f"1 row, {new} new tokens, every match without a child",
            bytes_moved=suffix_bytes(depth, num_drafts, new),
        )

    return [spec(24, 7, 8192, 65536), spec(24, 24, 8192, 65536), spec(24, 7, 8192, 1), spec(64, 15, 32768, 65536)]


def suffix_bytes(depth: int, num_drafts: int, new: int) -> int:
    """What a row must move at least: per new token and depth a head, the parent, the count and the rival in, the node,
    the count, the link and the best child out; per match the nodes, counts and best children of both trees; the drafts.
    """
    return 4 * (new * (1 + 10 * depth) + 8 * depth + 5 * num_drafts + 4) + 1
