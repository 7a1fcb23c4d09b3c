"""Random rounds for the acceptance rules that read distributions."""

from __future__ import annotations

import torch
from op_checks import random_round, set_sampling_parameters

from draftgraph.kernels.sample_target import sample_target_reference


def sample(state, bucket):
    sample_target_reference(
        state.logits,
        state.window_rows,
        state.window_positions,
        state.cu_tokens[: bucket + 1],
        state.slot_of_row[:bucket],
        state.temperature,
        state.top_k,
        state.top_p,
        state.min_p,
        state.seed,
        state.sampled,
        state.log_normalizer,
        state.threshold,
        state.token_failed,
    )


def arguments(state, bucket, draft_probs):
    return [
        state.logits,
        state.sampled,
        state.log_normalizer,
        state.threshold,
        state.token_failed,
        state.window_positions,
        state.draft_tokens,
        draft_probs,
        state.temperature,
        state.seed,
        state.cu_tokens[: bucket + 1],
        state.slot_of_row[:bucket],
        state.accepted,
        state.emitted,
        state.failed,
    ]


def random_arguments(seed, *, vocab, num_drafts, dtype, kind, spoil):
    """Arguments of an acceptance rule: `kind` is "one-hot", "random", or "near" for a q close to p."""
    state, bucket = random_round(seed, vocab=vocab, num_drafts=num_drafts, dtype=dtype)
    set_sampling_parameters(state, seed)
    generator = torch.Generator().manual_seed(seed)
    if spoil:
        state.logits[torch.rand(state.logits.shape, generator=generator) < 0.05] = torch.nan
        state.logits[torch.rand(state.logits.shape, generator=generator) < 0.1] = -torch.inf
    sample(state, bucket)
    if kind == "one-hot":
        # Likely drafts, so that some are accepted.
        for row in range(bucket):
            begin, end = int(state.cu_tokens[row]), int(state.cu_tokens[row + 1])
            for column in range(end - begin - 1):
                if torch.rand(1, generator=generator) < 0.5:
                    state.draft_tokens[state.slot_of_row[row], column] = state.sampled[begin + column]
        return arguments(state, bucket, None)
    draft_probs = torch.randn((*state.draft_tokens.shape, vocab), generator=generator).softmax(2)
    if kind == "near":
        for row in range(bucket):
            slot, begin, end = int(state.slot_of_row[row]), int(state.cu_tokens[row]), int(state.cu_tokens[row + 1])
            window = slice(begin, max(end - 1, begin))
            z = state.logits[window].float() / state.temperature[slot].clamp_min(1e-3)
            kept = z >= state.threshold[window, None]
            p = torch.where(kept, (z - state.log_normalizer[window, None]).exp(), 0.0).nan_to_num(0.0)
            draft_probs[slot, : p.shape[0]] = p + 0.05 * draft_probs[slot, : p.shape[0]]
            if p.shape[0]:
                drawn = torch.multinomial(draft_probs[slot, : p.shape[0]], 1, generator=generator)
                state.draft_tokens[slot, : p.shape[0]] = drawn[:, 0].int()
    return arguments(state, bucket, draft_probs)


REFUSED = [
    (0, lambda x: x.double(), "logits has dtype float64; accepted: float32 or bfloat16 or float16"),
    (0, lambda x: x.t().contiguous().t(), "logits has strides"),
    (1, lambda x: x.long(), "sampled has dtype int64; accepted: int32"),
    (2, lambda x: x.double(), "log_normalizer has dtype float64"),
    (3, lambda x: x[1:], "threshold has shape"),
    (4, lambda x: x.int(), "token_failed has dtype int32; accepted: bool"),
    (5, lambda x: x[1:], "positions has shape"),
    (6, lambda x: x[:, ::2], "draft_tokens has strides"),
    (7, lambda x: x[:, :, 1:].contiguous(), "draft_probs has shape"),
    (7, lambda x: x.bfloat16(), "draft_probs has dtype bfloat16; accepted: float32"),
    (8, lambda x: x[1:], "temperature has shape"),
    (9, lambda x: x.int(), "seed has dtype int32; accepted: int64"),
    (10, lambda x: x[1:], "cu_tokens has shape"),
    (11, lambda x: x.to("meta"), "slot_of_row is on meta"),
    (13, lambda x: x[:, 1:].contiguous(), "emitted has shape"),
]
"""Changes of one argument that the wrappers refuse, with the message."""
