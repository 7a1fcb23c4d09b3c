"""Accepts drafts as a block, which keeps the target's distribution and accepts at least as many as one by one."""

from __future__ import annotations

import numpy as np
import torch

from .accept_block_triton import accept_block_triton
from .accept_standard import _probability, _probability_array, _residual_token, _scaled
from .elementary import FloatArray, log
from .philox import ACCEPT, RESIDUAL, gumbel, uniform, uniform_at
from .registration import define_op

_LEAST_NORMAL = float(np.finfo(np.float32).tiny)
_MASS_SCALE = 2.0**40


def accept_block_reference(
    logits: torch.Tensor,
    sampled: torch.Tensor,
    log_normalizer: torch.Tensor,
    threshold: torch.Tensor,
    token_failed: torch.Tensor,
    positions: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    cu_tokens: torch.Tensor,
    slot_of_row: torch.Tensor,
    accepted: torch.Tensor,
    emitted: torch.Tensor,
    row_failed: torch.Tensor,
) -> None:
    """The specification of `accept_block`; reads nothing on the host.

    Block verification (Sun et al., "Block Verification Accelerates Speculative Decoding", arXiv 2403.10444,
    algorithm 2). P and Q are the target's and the drafter's distributions along the n drafts x of a row:

    - w_0 = 1, w_i = min(1, w_(i-1) P(x_i) / Q(x_i));
    - h_n = w_n, and for i < n, with R_i the sum of max(w_i P - Q, 0) over the tokens after draft i,
      h_i = R_i / (R_i + 1 - w_i), or 1 where that is 0 / 0;
    - accepted are as many drafts as the largest i with u_i <= h_i says, or none;
    - the next token is one of P if all n are accepted, else one of max(w_i P - Q, 0), normalised.

    P, the uniform numbers, one for each draft, and the residual's noise are those of `accept_standard`. So is
    temperature 0, where the rule is greedy, and what happens at a draft of -1, which ends the block, or where
    rounding leaves a residual without mass. R_i is a sum of integers in units of 2**-40 of what each token
    adds, rounded down, so that it does not depend on the order. Without `draft_probs` it is w_i (1 - P(x_(i+1))).

    Args:
        logits: float32, float16 or bfloat16 [W, V].
        sampled: int32 [W].
        log_normalizer: float32 [W].
        threshold: float32 [W].
        token_failed: bool [W]; all four as `sample_target` wrote them.
        positions: int32 [W], absolute position of each window token.
        draft_tokens: int32 [R1, K].
        draft_probs: float32 [R1, K, V], the Q that each draft was drawn from; None where drafts are not sampled:
            Q is 1 at the draft, and the residual is P without it.
        temperature: float32 [R1].
        seed: int64 [R1].
        cu_tokens: int32 [B + 1].
        slot_of_row: int32 [B].
        accepted: int32 [R1], written; 0 for rows with an empty window, which are not touched otherwise.
        emitted: int32 [R1, K + 1], written up to `accepted`.
        row_failed: bool [R1], written: a token that the row emits comes from logits that were not finite.
    """
    width, vocab = logits.shape
    num_drafts = draft_tokens.shape[1]
    slots = slot_of_row.long()
    begin, drafts = cu_tokens[:-1].long(), cu_tokens[1:] - cu_tokens[:-1] - 1
    live = drafts >= 0
    column = torch.arange(num_drafts + 1, device=logits.device)
    at = (begin[:, None] + column).clamp_max(width - 1)
    heat = temperature[slots]
    greedy = heat <= 0.0
    divisor = torch.where(greedy, 1.0, heat)[:, None]
    proposal, key = draft_tokens[slots], seed[slots][:, None]
    is_proposal = (column[:-1] < drafts[:, None]) & (proposal >= 0)
    token = proposal.clamp_min(0).long()
    block = is_proposal.long().cumprod(1).sum(1)

    z = logits[at[:, :-1], token].float() / divisor
    p = _probability(z, log_normalizer[at[:, :-1]], threshold[at[:, :-1]])
    p = torch.where(greedy[:, None], (sampled[at[:, :-1]] == token).float(), p)
    q = torch.ones_like(p)
    if draft_probs is not None:
        q = torch.where(greedy[:, None], 1.0, draft_probs[slots[:, None], column[:-1], token])
    weights = [torch.ones_like(heat)]
    for j in range(num_drafts):
        ratio = weights[-1] * p[:, j] / q[:, j].clamp_min(_LEAST_NORMAL)
        weights.append(torch.where(p[:, j] > 0.0, ratio.clamp_max(1.0), 0.0))
    weight = torch.stack(weights, 1)

    excess = weight[:, :-1] * (1.0 - p)
    if draft_probs is not None:
        z = logits[at[:, :-1]].float() / divisor[:, :, None]
        everywhere = _probability(z, log_normalizer[at[:, :-1], None], threshold[at[:, :-1], None])
        units = (weight[:, :-1, None] * everywhere - draft_probs[slots]).clamp_min(0.0) * _MASS_SCALE
        excess = units.long().sum(2).float() * (1.0 / _MASS_SCALE)
    total = excess + (1.0 - weight[:, :-1])
    partial = torch.where(total > 0.0, excess / torch.where(total > 0.0, total, 1.0), 1.0)
    partial = torch.where(greedy[:, None], weight[:, :-1], partial)
    partial = torch.cat([partial, partial.new_zeros(partial.shape[0], 1)], 1)
    chance = torch.where(column < block[:, None], partial, weight)
    u = uniform(key, positions[(at - 1).clamp_min(0)] + 1, ACCEPT, torch.zeros_like(at))
    holds = (column >= 1) & (column <= block[:, None]) & (u <= chance)
    count = torch.where(holds, column, 0).amax(1)

    # The position after the accepted drafts, and what it emits.
    final = at.gather(1, count[:, None])[:, 0]
    last_token = sampled[final]
    if num_drafts > 0:
        index = count.clamp_max(num_drafts - 1)[:, None]
        rejected = count < block
        z = logits[final].float() / divisor
        residual = _probability(z, log_normalizer[final][:, None], threshold[final][:, None])
        everything = torch.arange(vocab, device=logits.device)
        if draft_probs is None:
            score = torch.where((everything != token.gather(1, index)) & (residual > 0.0), z, -torch.inf)
        else:
            residual = residual * weight.gather(1, count[:, None]) - draft_probs[slots, index[:, 0]]
            score = torch.where(residual > 0.0, log(residual.clamp_min(_LEAST_NORMAL)), -torch.inf)
        has_mass = score.amax(1) > -torch.inf
        noise = gumbel(key, positions[final][:, None] + 1, RESIDUAL, everything)
        choice = (score + noise).argmax(1)
        last_token = torch.where(rejected & has_mass & ~greedy, choice.int(), last_token)

    padded = torch.cat([proposal, proposal.new_zeros(proposal.shape[0], 1)], 1)
    content = torch.where(column < count[:, None], padded, last_token[:, None])
    emits = (column <= count[:, None]) & live[:, None]
    accepted[slots] = count.int()
    emitted[slots] = torch.where(emits, content, emitted[slots])
    row_failed[slots] = torch.where(live, (token_failed[at] & emits).any(1), row_failed[slots])


def _accept_block_cpu(
    logits: torch.Tensor,
    sampled: torch.Tensor,
    log_normalizer: torch.Tensor,
    threshold: torch.Tensor,
    token_failed: torch.Tensor,
    positions: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    cu_tokens: torch.Tensor,
    slot_of_row: torch.Tensor,
    accepted: torch.Tensor,
    emitted: torch.Tensor,
    row_failed: torch.Tensor,
) -> None:
    ends = cu_tokens.tolist()
    sampled_at, token_failed_at = sampled.numpy(), token_failed.numpy()
    drafts_of, accepted_of, emitted_of = draft_tokens.numpy(), accepted.numpy(), emitted.numpy()
    one, least_normal = np.float32(1.0), np.float32(_LEAST_NORMAL)
    for row, slot in enumerate(slot_of_row.tolist()):
        begin, end = ends[row], ends[row + 1]
        if begin == end:
            accepted_of[slot] = 0
            continue
        heat, key = float(temperature[slot]), int(seed[slot])
        block = []
        for draft in drafts_of[slot, : end - begin - 1].tolist():
            if draft < 0:
                break
            block.append(draft)
        count, last_token = 0, None
        if heat <= 0.0:
            while count < len(block) and block[count] == sampled_at[begin + count]:
                count += 1
        else:
            normalizer, least = log_normalizer.numpy(), threshold.numpy()
            weights = [one]
            for j, draft in enumerate(block):
                at = begin + j
                q_row = None if draft_probs is None else draft_probs[slot, j].numpy()
                z_draft = _scaled(logits[at, draft : draft + 1], heat)
                p = _probability_array(z_draft, normalizer[at], least[at])[0]
                if j > 0:
                    chance = _partial_chance(weights[-1], p, logits[at], heat, normalizer[at], least[at], q_row)
                    if np.float32(uniform_at(key, int(positions[at - 1]) + 1, ACCEPT)) <= chance:
                        count = j
                q = one if q_row is None else q_row[draft]
                ratio = weights[-1] * p / max(q, least_normal)
                weights.append(min(ratio, one) if p > 0.0 else np.float32(0.0))
            at = begin + len(block) - 1
            if block and np.float32(uniform_at(key, int(positions[at]) + 1, ACCEPT)) <= weights[-1]:
                count = len(block)
            if count < len(block):
                at = begin + count
                q_row = None if draft_probs is None else draft_probs[slot, count].numpy()
                last_token = _residual_token(
                    _scaled(logits[at], heat),
                    normalizer[at],
                    least[at],
                    block[count],
                    q_row,
                    key,
                    int(positions[at]) + 1,
                    None if q_row is None else weights[count],
                )
        accepted_of[slot] = count
        emitted_of[slot, :count] = drafts_of[slot, :count]
        emitted_of[slot, count] = sampled_at[begin + count] if last_token is None else last_token
        row_failed[slot] = bool(token_failed_at[begin : begin + count + 1].any())


def _partial_chance(
    weight: np.float32,
    p: np.float32,
    logits: torch.Tensor,
    heat: float,
    log_normalizer: np.float32,
    threshold: np.float32,
    q: FloatArray | None,
) -> np.float32:
    """h_i for a draft that is not the block's last; p is that of the draft after it."""
    one = np.float32(1.0)
    if q is None:
        excess = weight * (one - p)
    else:
        units = weight * _probability_array(_scaled(logits, heat), log_normalizer, threshold)
        units -= q
        np.maximum(units, np.float32(0.0), out=units)
        units *= np.float32(_MASS_SCALE)
        # Not `np.float32(sum)`, which rounds twice: to float64 first.
        scaled = np.array([units.astype(np.int64).sum()], dtype=np.int64).astype(np.float32)
        excess = scaled[0] * np.float32(1.0 / _MASS_SCALE)
    total = excess + (one - weight)
    return np.float32(excess / total) if total > 0.0 else one


def _accept_block_fake(*args: torch.Tensor | None) -> None:
    return None


accept_block = define_op(
    "accept_block(Tensor logits, Tensor sampled, Tensor log_normalizer, Tensor threshold, "
    "Tensor token_failed, Tensor positions, Tensor draft_tokens, Tensor? draft_probs, Tensor temperature, "
    "Tensor seed, Tensor cu_tokens, Tensor slot_of_row, Tensor(a!) accepted, Tensor(b!) emitted, "
    "Tensor(c!) row_failed) -> ()",
    cpu=_accept_block_cpu,
    cuda=accept_block_triton,
    fake=_accept_block_fake,
)
"""`draftgraph::accept_block`; see `accept_block_reference`."""
