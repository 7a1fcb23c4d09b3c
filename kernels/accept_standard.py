"""Accepts drafts by rejection sampling, which keeps the target's distribution exactly."""

from __future__ import annotations

import numpy as np
import torch

from .accept_standard_triton import accept_standard_triton
from .elementary import FloatArray, exp, exp_array, log, log_array
from .philox import ACCEPT, RESIDUAL, gumbel, gumbel_at, gumbel_row, uniform, uniform_at
from .registration import define_op

_LEAST_NORMAL = float(np.finfo(np.float32).tiny)


def accept_standard_reference(
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
    """The specification of `accept_standard`; reads nothing on the host.

    Speculative sampling (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML
    2023, algorithm 1). With p the target's distribution at a position and q the one that the draft x was
    drawn from, x is accepted iff u < p(x) / q(x), u uniform. After the first rejection the row emits one
    token of max(p - q, 0), normalised; after no rejection, one of p.

    p(x) is exp(z - log_normalizer) with z = logits / temperature, or 0 where z < threshold; at temperature
    0 it is 1 at `sampled` and 0 elsewhere, which makes the rule greedy. u comes from stream ACCEPT and the
    residual's Gumbel noise from RESIDUAL, both at the draft's absolute position, so they are independent of
    each other and of the noise behind `sampled` (stream TARGET), which is the token of p.

    A draft with p >= q is accepted whatever u, so p = q never enters the residual. A draft of -1 is not a
    proposal: the row emits `sampled` in its place. So it does where rounding leaves a residual without mass,
    which is possible only where p and q agree to rounding.

    Args:
        logits: float32, float16 or bfloat16 [W, V].
        sampled: int32 [W].
        log_normalizer: float32 [W].
        threshold: float32 [W].
        token_failed: bool [W]; all four as `sample_target` wrote them.
        positions: int32 [W], absolute position of each window token.
        draft_tokens: int32 [R1, K].
        draft_probs: float32 [R1, K, V], the q that each draft was drawn from; None where drafts are not sampled:
            q is 1 at the draft, and the residual is p without it.
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

    z = logits[at[:, :-1], token].float() / divisor
    p = _probability(z, log_normalizer[at[:, :-1]], threshold[at[:, :-1]])
    p = torch.where(greedy[:, None], (sampled[at[:, :-1]] == token).float(), p)
    q = torch.ones_like(p)
    if draft_probs is not None:
        q = draft_probs[slots[:, None], column[:-1], token]
    u = uniform(key, positions[at[:, :-1]] + 1, ACCEPT, torch.zeros_like(token))
    accepts = is_proposal & (p > 0.0) & ((p >= q) | (u * q < p) | greedy[:, None])
    count = accepts.long().cumprod(1).sum(1)

    # The position after the accepted drafts, and what it emits.
    final = at.gather(1, count[:, None])[:, 0]
    last_token = sampled[final]
    if num_drafts > 0:
        index = count.clamp_max(num_drafts - 1)[:, None]
        rejected = (count < num_drafts) & is_proposal.gather(1, index)[:, 0]
        final_token = token.gather(1, index)
        z = logits[final].float() / divisor
        weight = _probability(z, log_normalizer[final][:, None], threshold[final][:, None])
        if draft_probs is None:
            everything = torch.arange(vocab, device=logits.device)
            score = torch.where((everything != final_token) & (weight > 0.0), z, -torch.inf)
        else:
            weight = weight - draft_probs[slots, index[:, 0]]
            score = torch.where(weight > 0.0, log(weight.clamp_min(_LEAST_NORMAL)), -torch.inf)
        has_mass = score.amax(1) > -torch.inf
        noise = gumbel(key, positions[final][:, None] + 1, RESIDUAL, torch.arange(vocab, device=logits.device))
        residual = (score + noise).argmax(1)
        last_token = torch.where(rejected & has_mass & ~greedy, residual.int(), last_token)

    padded = torch.cat([proposal, proposal.new_zeros(proposal.shape[0], 1)], 1)
    content = torch.where(column < count[:, None], padded, last_token[:, None])
    emits = (column <= count[:, None]) & live[:, None]
    accepted[slots] = count.int()
    emitted[slots] = torch.where(emits, content, emitted[slots])
    row_failed[slots] = torch.where(live, (token_failed[at] & emits).any(1), row_failed[slots])


def _probability(z: torch.Tensor, log_normalizer: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """P of tokens, from their z; 1 at most, also where logits failed and nothing holds."""
    # Rounding may leave z a little above the normaliser.
    below = (z - log_normalizer).nan_to_num(nan=0.0).clamp_max(0.0)
    return torch.where(z >= threshold, exp(below), 0.0)


def _accept_standard_cpu(
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
    for row, slot in enumerate(slot_of_row.tolist()):
        begin, end = ends[row], ends[row + 1]
        if begin == end:
            accepted_of[slot] = 0
            continue
        heat, key = float(temperature[slot]), int(seed[slot])
        count = 0
        last_token = None
        for draft in drafts_of[slot, : end - begin - 1].tolist():
            at = begin + count
            if draft < 0:
                break
            if heat <= 0.0:
                if draft != sampled_at[at]:
                    break
                count += 1
                continue
            position = int(positions[at]) + 1
            normalizer, least = log_normalizer.numpy()[at], threshold.numpy()[at]
            q_row = None if draft_probs is None else draft_probs[slot, count].numpy()
            z_draft = _scaled(logits[at, draft : draft + 1], heat)
            p = _probability_array(z_draft, normalizer, least)[0]
            q = np.float32(1.0) if q_row is None else q_row[draft]
            if p > 0.0 and (p >= q or np.float32(uniform_at(key, position, ACCEPT)) * q < p):
                count += 1
                continue
            z = _scaled(logits[at], heat)
            last_token = _residual_token(z, normalizer, least, draft, q_row, key, position)
            break
        accepted_of[slot] = count
        emitted_of[slot, :count] = drafts_of[slot, :count]
        emitted_of[slot, count] = sampled_at[begin + count] if last_token is None else last_token
        row_failed[slot] = bool(token_failed_at[begin : begin + count + 1].any())


def _scaled(logits: torch.Tensor, temperature: float) -> FloatArray:
    values: FloatArray = logits.float().numpy()
    return values / np.float32(temperature)


def _probability_array(z: FloatArray, log_normalizer: np.float32, threshold: np.float32) -> FloatArray:
    below = z - log_normalizer
    np.nan_to_num(below, copy=False, nan=0.0)
    np.minimum(below, np.float32(0.0), out=below)
    p = exp_array(below)
    p[~(z >= threshold)] = 0.0
    return p


def _residual_token(
    z: FloatArray,
    log_normalizer: np.float32,
    threshold: np.float32,
    draft: int,
    q: FloatArray | None,
    key: int,
    position: int,
    scale: np.float32 | None = None,
) -> int | None:
    """One token of the residual distribution max(scale * p - q, 0); None where rounding leaves it without mass."""
    weight = _probability_array(z, log_normalizer, threshold)
    if scale is not None:
        weight *= scale
    if q is None:
        weight[draft] = 0.0
    else:
        weight -= q
    kept = np.flatnonzero(weight > 0.0)
    if len(kept) == 0:
        return None
    score = z[kept] if q is None else log_array(np.maximum(weight[kept], np.float32(_LEAST_NORMAL)))
    if 4 * len(kept) < len(z):
        noise = gumbel_at(key, position, RESIDUAL, kept)
    else:
        noise = gumbel_row(key, position, RESIDUAL, len(z))[kept]
    return int(kept[(score + noise).argmax()])


def _accept_standard_fake(*args: torch.Tensor | None) -> None:
    return None


accept_standard = define_op(
    "accept_standard(Tensor logits, Tensor sampled, Tensor log_normalizer, Tensor threshold, "
    "Tensor token_failed, Tensor positions, Tensor draft_tokens, Tensor? draft_probs, Tensor temperature, "
    "Tensor seed, Tensor cu_tokens, Tensor slot_of_row, Tensor(a!) accepted, Tensor(b!) emitted, "
    "Tensor(c!) row_failed) -> ()",
    cpu=_accept_standard_cpu,
    cuda=accept_standard_triton,
    fake=_accept_standard_fake,
)
"""`draftgraph::accept_standard`; see `accept_standard_reference`."""
