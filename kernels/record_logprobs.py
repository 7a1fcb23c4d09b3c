"""Log-probabilities of the emitted tokens, and of the likeliest tokens at their positions."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from .elementary import FloatArray, log_of_mass, log_of_mass_array, mass, mass_array
from .record_logprobs_triton import record_logprobs_triton
from .registration import define_op


def record_logprobs_reference(
    logits: torch.Tensor,
    emitted: torch.Tensor,
    accepted: torch.Tensor,
    row_failed: torch.Tensor,
    cu_tokens: torch.Tensor,
    slot_of_row: torch.Tensor,
    length: torch.Tensor,
    logprobs: torch.Tensor,
    logprob_tokens: torch.Tensor,
) -> None:
    """The specification of `record_logprobs`; reads nothing on the host.

    Runs between accept and commit. For each token that the round emitted, at the absolute position that
    commit will give it: entry 0 is that token, entries 1 to N are the N likeliest tokens by falling
    probability (the lower id first among equals), each with its log-probability under the float32
    log-softmax of the target's logits as they are: without temperature and filters. Rows that failed, rows
    with an empty window and positions past the context record nothing. Entries at or past a row's length
    after commit mean nothing.

    Args:
        logits: float32, float16 or bfloat16 [W, V].
        emitted: int32 [R1, K + 1].
        accepted: int32 [R1].
        row_failed: bool [R1].
        cu_tokens: int32 [B + 1].
        slot_of_row: int32 [B].
        length: int32 [R1], at least 1, before commit.
        logprobs: float32 [R1, C, N + 1], written; N is at most V, and may be 0.
        logprob_tokens: int32 [R1, C, N + 1], written.
    """
    context, entries = logprobs.shape[1:]
    # A row has at least one committed token, so `context` columns are more than it can append.
    columns = min(emitted.shape[1], context)
    slots = slot_of_row.long()
    live = (cu_tokens[1:] > cu_tokens[:-1]) & ~row_failed[slots]
    column = torch.arange(columns, device=logits.device)
    at = (cu_tokens[:-1, None] + column).clamp_max(logits.shape[0] - 1)
    position = length[slots][:, None] + column
    records = live[:, None] & (column <= accepted[slots][:, None]) & (position < context)

    z = torch.where(records[:, :, None], logits[at].float(), 0.0)
    ordered = z.sort(dim=2, descending=True, stable=True)
    top = ordered.values[:, :, :1]
    normalizer = top + log_of_mass(mass(z - top).sum(2, keepdim=True))
    token = emitted[slots, :columns].long().clamp_min(0)[:, :, None]
    token = torch.where(records[:, :, None], token, 0)
    tokens = torch.cat([token, ordered.indices[:, :, : entries - 1]], 2)
    # Adding 0 makes the one zero that there may be positive, whatever the sign of the logit's.
    values = z.gather(2, tokens) - normalizer + 0.0

    # What is not recorded writes back what is there; the modulo keeps a row's positions apart.
    row, place = slots[:, None], position % context
    write = records[:, :, None]
    logprobs[row, place] = torch.where(write, values, logprobs[row, place])
    logprob_tokens[row, place] = torch.where(write, tokens.int(), logprob_tokens[row, place])


def _record_logprobs_cpu(
    logits: torch.Tensor,
    emitted: torch.Tensor,
    accepted: torch.Tensor,
    row_failed: torch.Tensor,
    cu_tokens: torch.Tensor,
    slot_of_row: torch.Tensor,
    length: torch.Tensor,
    logprobs: torch.Tensor,
    logprob_tokens: torch.Tensor,
) -> None:
    context, entries = logprobs.shape[1:]
    ends = cu_tokens.tolist()
    logprobs_of, tokens_of, emitted_of = logprobs.numpy(), logprob_tokens.numpy(), emitted.numpy()
    for row, slot in enumerate(slot_of_row.tolist()):
        if ends[row] == ends[row + 1] or row_failed[slot]:
            continue
        first = int(length[slot])
        for column in range(min(int(accepted[slot]) + 1, context - first)):
            z: FloatArray = logits[ends[row] + column].float().numpy()
            top = z.max()
            normalizer = top + log_of_mass_array(mass_array(z - top).sum())
            tokens = np.append(max(int(emitted_of[slot, column]), 0), _likeliest(z, entries - 1))
            tokens_of[slot, first + column] = tokens
            logprobs_of[slot, first + column] = z[tokens] - normalizer + np.float32(0.0)


def _likeliest(z: FloatArray, count: int) -> npt.NDArray[np.int64]:
    """The ids of the `count` largest, falling, the lower id first among equals."""
    if count == 0:
        return np.empty(0, dtype=np.int64)
    least = torch.from_numpy(z).topk(count, sorted=False).values.min().item()
    candidates = np.flatnonzero(z >= np.float32(least))
    order = np.argsort(-z[candidates], kind="stable")
    return candidates[order[:count]]


def _record_logprobs_fake(*args: torch.Tensor) -> None:
    return None


record_logprobs = define_op(
    "record_logprobs(Tensor logits, Tensor emitted, Tensor accepted, Tensor row_failed, Tensor cu_tokens, "
    "Tensor slot_of_row, Tensor length, Tensor(a!) logprobs, Tensor(b!) logprob_tokens) -> ()",
    cpu=_record_logprobs_cpu,
    cuda=record_logprobs_triton,
    fake=_record_logprobs_fake,
)
"""`draftgraph::record_logprobs`; see `record_logprobs_reference`."""
