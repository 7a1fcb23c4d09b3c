"""Suffix decoding: drafts follow the most frequent continuation of the last tokens, here and in earlier requests.

After Oliaro et al. 2024 (arXiv 2411.04975) and its use in vLLM. Each slot has an index of its own sequence, extended by
what each round commits, and all share a snapshot of one over finished requests; see `suffix_index`.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from .registration import define_op
from .suffix_index import (
    BEST,
    COUNT,
    LINK,
    LONGEST,
    NODE,
    PLANES,
    SPREAD,
    STEP,
    IntArray,
    Tree,
    extend,
    hash_shift,
    match_suffix,
)
from .suffix_propose_triton import kernel_specs, suffix_propose_triton

__all__ = [
    "draft_budget",
    "kernel_specs",
    "reset_suffix",
    "suffix_propose",
    "suffix_propose_reference",
    "suffix_propose_triton",
]

_MASK = 0xFFFFFFFF


def draft_budget(depth: int, num_drafts: int, factor: float, offset: float = 0.0) -> tuple[int, ...]:
    """The most drafts after a match of 1, 2, ... `depth` tokens: `floor(m * factor + offset)`, at least 0.

    Never more than `num_drafts`, nor than the tree is deep below the match.
    """
    allowed = (math.floor(min(num_drafts, match * factor + offset)) for match in range(1, depth + 1))
    return tuple(max(0, min(depth - match, most)) for match, most in enumerate(allowed, start=1))


def suffix_propose_reference(
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
    """The specification of `suffix_propose`, in plain Python on the host.

    A row first enters the tokens committed since its last round, positions `indexed` to `length - 1`, into its index.
    Then for every m from 1 to D that the sequence is long enough for, and for both its own tree and the global one,
    a candidate starts at the node of its last m tokens and follows the most frequent child: the probability, 1 at
    first, is multiplied by `count(child) / count(node)`, and where it falls below `min_probability`, after
    `budget[m - 1]` tokens, or where there is no child, the candidate ends. Its score is the sum of the probabilities.
    The highest score wins, among equal ones the longer match, and then the row's own tree. Among equally frequent
    children the one that occurred last is followed. The last m tokens count as an occurrence, though nothing follows.

    All arithmetic is float32: exact counts, one division and one product per token, sums in order.

    Args:
        tokens: int32 [R1, C].
        length: int32 [R1].
        finished: bool [R1].
        slot_of_row: int32 [B], distinct but for finished rows.
        heads: int32 [R1, D, H], updated; H is a power of two.
        tree: int32 [R1, 4, D, C], updated; its planes are those of `suffix_index`.
        indexed: int32 [R1], updated: how many positions are entered. `reset_suffix` clears a slot.
        global_tokens: int32 [G], the tokens of finished requests.
        global_heads: int32 [D, H2], all 0 where there are none.
        global_tree: int32 [4, D, G].
        budget: int32 [D], see `draft_budget`; at most D - m for a match of m.
        draft_tokens: int32 [R1, K], written for all rows of the bucket; -1 after the drafts.
        draft_count: int32 [R1], written; 0 without a draft, and for finished rows.
        confidence: float32 [R1, K], written: `count(child) / count(node)` of each draft; 0 after the drafts.
        min_probability: rounded to float32.

    Raises:
        ValueError: sizes do not fit.
    """
    _check_sizes(tokens, heads, tree, global_tokens, global_heads, global_tree, budget, confidence, draft_tokens)
    shift, global_shift = hash_shift(heads.shape[2]), hash_shift(global_heads.shape[1])
    own_depth, num_drafts = heads.shape[1], draft_tokens.shape[1]
    everywhere = global_tokens.tolist()
    for slot in slot_of_row.tolist():
        draft_tokens[slot], draft_count[slot], confidence[slot] = -1, 0, 0.0
        if finished[slot]:
            continue
        row = tokens[slot, : int(length[slot])].tolist()
        for end in range(int(indexed[slot]), len(row)):
            for depth in range(1, min(own_depth, end + 1) + 1):
                _enter(row, end, depth, heads[slot], tree[slot], shift)
        indexed[slot] = len(row)
        best_score, best_drafts = np.float32(0), list[tuple[int, np.float32]]()
        for match in range(1, min(own_depth, len(row)) + 1):
            suffix = row[-match:]
            own = (row, heads[slot], tree[slot], shift)
            others = (everywhere, global_heads, global_tree, global_shift)
            # Later candidates must beat the global tree's, and only equal those of shorter matches.
            found = [
                _candidate(suffix, *where, min(int(budget[match - 1]), num_drafts), min_probability)
                for where in (others, own)
            ]
            for score, drafts in found:
                if drafts and score >= best_score:
                    best_score, best_drafts = score, drafts
        draft_count[slot] = len(best_drafts)
        for index, (token, probability) in enumerate(best_drafts):
            draft_tokens[slot, index] = token
            confidence[slot, index] = float(probability)


def _bucket(suffix: list[int], shift: int) -> int:
    total = sum(token * pow(STEP, back, 2**32) for back, token in enumerate(reversed(suffix)))
    return ((total * SPREAD) & _MASK) >> shift


def _find(text: list[int], suffix: list[int], heads: torch.Tensor, tree: torch.Tensor, shift: int) -> int:
    """The node of `suffix` plus 1, or 0."""
    lane = len(suffix) - 1
    after = int(heads[lane, _bucket(suffix, shift)])
    while after > 0 and text[after - len(suffix) : after] != suffix:
        after = int(tree[LINK, lane, after - 1])
    return after


def _enter(row: list[int], end: int, depth: int, heads: torch.Tensor, tree: torch.Tensor, shift: int) -> None:
    """One more occurrence of the `depth` tokens that end at `end`."""
    suffix, lane = row[end + 1 - depth : end + 1], depth - 1
    node = _find(row, suffix, heads, tree, shift) - 1
    if node < 0:
        node, bucket = end, _bucket(suffix, shift)
        tree[LINK, lane, node] = heads[lane, bucket]
        tree[BEST, lane, node] = 0
        tree[COUNT, lane, node] = 0
        heads[lane, bucket] = end + 1
    tree[NODE, lane, end] = node
    tree[COUNT, lane, node] += 1
    if depth > 1:
        parent = tree[NODE, lane - 1, end - 1]
        rival = int(tree[BEST, lane - 1, parent])
        if rival == 0 or tree[COUNT, lane, tree[NODE, lane, rival - 1]] <= tree[COUNT, lane, node]:
            tree[BEST, lane - 1, parent] = end + 1


def _candidate(
    suffix: list[int],
    text: list[int],
    heads: torch.Tensor,
    tree: torch.Tensor,
    shift: int,
    most: int,
    min_probability: float,
) -> tuple[np.float32, list[tuple[int, np.float32]]]:
    """The score of following `suffix` in one tree, and the drafts with the probability of each given those before."""
    score, probability, drafts = np.float32(0), np.float32(1), list[tuple[int, np.float32]]()
    depth, node = len(suffix), _find(text, suffix, heads, tree, shift) - 1
    while node >= 0 and len(drafts) < most and (after := int(tree[BEST, depth - 1, node])) > 0:
        child = int(tree[NODE, depth, after - 1])
        ratio = np.float32(int(tree[COUNT, depth, child])) / np.float32(int(tree[COUNT, depth - 1, node]))
        probability = probability * ratio
        if probability < np.float32(min_probability):
            break
        score = score + probability
        drafts.append((text[after - 1], ratio))
        depth, node = depth + 1, child
    return score, drafts


def reset_suffix(heads: torch.Tensor, indexed: torch.Tensor, slot: int) -> None:
    """Forgets what is entered of a slot; to be called when it gets another sequence.

    Args:
        heads: int32 [R1, D, H].
        indexed: int32 [R1].
        slot: which.
    """
    heads[slot].zero_()
    indexed[slot] = 0


def _check_sizes(
    tokens: torch.Tensor,
    heads: torch.Tensor,
    tree: torch.Tensor,
    global_tokens: torch.Tensor,
    global_heads: torch.Tensor,
    global_tree: torch.Tensor,
    budget: torch.Tensor,
    confidence: torch.Tensor,
    draft_tokens: torch.Tensor,
) -> None:
    depth = heads.shape[1]
    if not 1 <= depth <= LONGEST:
        raise ValueError(f"the tree must be 1 to {LONGEST} tokens deep, got {depth}")
    wanted = (
        ("tree", tree, (tokens.shape[0], PLANES, depth, tokens.shape[1])),
        ("global_heads", global_heads, (depth, global_heads.shape[-1])),
        ("global_tree", global_tree, (PLANES, depth, global_tokens.shape[0])),
        ("budget", budget, (depth,)),
        ("confidence", confidence, tuple(draft_tokens.shape)),
    )
    for name, tensor, shape in wanted:
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}; accepted: {list(shape)}")


def _suffix_propose_cpu(
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
    _check_sizes(tokens, heads, tree, global_tokens, global_heads, global_tree, budget, confidence, draft_tokens)
    tokens_of, heads_of, tree_of = tokens.numpy(), heads.numpy(), tree.numpy()
    drafts_of, count_of, confidence_of = draft_tokens.numpy(), draft_count.numpy(), confidence.numpy()
    others = Tree(global_tokens.numpy(), global_heads.numpy(), global_tree.numpy())
    deepest, most = heads.shape[1], np.minimum(budget.numpy(), draft_tokens.shape[1])
    least = np.float32(min_probability)
    for slot in slot_of_row.tolist():
        drafts_of[slot], count_of[slot], confidence_of[slot] = -1, 0, 0.0
        if finished[slot]:
            continue
        row_length = int(length[slot])
        own = Tree(tokens_of[slot], heads_of[slot], tree_of[slot])
        extend(own, int(indexed[slot]), row_length)
        indexed[slot] = row_length
        longest = min(deepest, row_length)
        recent = own.tokens[row_length - longest : row_length][::-1]
        own_nodes = own.tree[NODE, :longest, row_length - 1] + 1
        chosen: tuple[np.float32, int, int, Tree, int] | None = None
        # The row's own tree last, since it wins ties; within a tree the longest match does.
        for index, nodes in ((others, match_suffix(others, recent)), (own, own_nodes)):
            scores, made = _follow_best(index, nodes, most[:longest], least)
            lane = longest - 1 - int(np.argmax(scores[::-1]))
            if made[lane] and (chosen is None or (scores[lane], lane) >= chosen[:2]):
                chosen = (scores[lane], lane, int(nodes[lane]) - 1, index, int(made[lane]))
        if chosen is not None:
            _, lane, node, index, count = chosen
            count_of[slot] = count
            _write_drafts(index, lane, node, drafts_of[slot, :count], confidence_of[slot, :count])


def _follow_best(
    index: Tree, nodes: IntArray, budget: IntArray, least: np.float32
) -> tuple[npt.NDArray[np.float32], IntArray]:
    """The score and the number of drafts of every match, whose nodes plus 1 are given for 1, 2, ... tokens."""
    scores, made = np.zeros(len(nodes), dtype=np.float32), np.zeros(len(nodes), dtype=np.int32)
    lanes = np.flatnonzero((nodes > 0) & (budget > 0))
    node = nodes[lanes] - 1
    depth = lanes.copy()
    after = index.tree[BEST, depth, node]
    counts = index.tree[COUNT, depth, node]
    probability = np.ones(len(lanes), dtype=np.float32)
    goes_on = after > 0
    while goes_on.any():
        lanes, depth, after = lanes[goes_on], depth[goes_on] + 1, after[goes_on]
        node = index.tree[NODE, depth, after - 1]
        child_counts = index.tree[COUNT, depth, node]
        ratio = child_counts.astype(np.float32) / counts[goes_on].astype(np.float32)
        probability = probability[goes_on] * ratio
        counts, stands = child_counts, probability >= least
        scores[lanes[stands]] += probability[stands]
        made[lanes[stands]] += 1
        goes_on = stands & (made[lanes] < budget[lanes])
        after = index.tree[BEST, depth, node]
        goes_on &= after > 0
    return scores, made


def _write_drafts(index: Tree, depth: int, node: int, drafts: IntArray, confidence: npt.NDArray[np.float32]) -> None:
    """Follows one match again and writes what it drafts."""
    _, nodes, counts, best = index.tree
    for place in range(len(drafts)):
        last = int(best[depth, node]) - 1
        child = int(nodes[depth + 1, last])
        drafts[place] = index.tokens[last]
        confidence[place] = np.float32(counts[depth + 1, child]) / np.float32(counts[depth, node])
        depth, node = depth + 1, child


def _suffix_propose_fake(*args: torch.Tensor | float) -> None:
    return None


suffix_propose = define_op(
    "suffix_propose(Tensor tokens, Tensor length, Tensor finished, Tensor slot_of_row, Tensor(a!) heads, "
    "Tensor(b!) tree, Tensor(c!) indexed, Tensor global_tokens, Tensor global_heads, Tensor global_tree, "
    "Tensor budget, Tensor(d!) draft_tokens, Tensor(e!) draft_count, Tensor(f!) confidence, float min_probability) "
    "-> ()",
    cpu=_suffix_propose_cpu,
    fake=_suffix_propose_fake,
    cuda=suffix_propose_triton,
)
"""`draftgraph::suffix_propose`; see `suffix_propose_reference`."""
