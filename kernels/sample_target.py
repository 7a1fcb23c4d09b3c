"""The target's own token after every window token, and what the acceptance rules need of its distribution."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from .elementary import FloatArray, log, log_array, log_of_mass, log_of_mass_array, mass, mass_array
from .philox import TARGET, gumbel, gumbel_at, gumbel_row
from .registration import define_op
from .sample_target_triton import sample_target_triton

_LEAST_NORMAL = float(np.finfo(np.float32).tiny)


def sample_target_reference(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    cu_tokens: torch.Tensor,
    slot_of_row: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    sampled: torch.Tensor,
    log_normalizer: torch.Tensor,
    threshold: torch.Tensor,
    failed: torch.Tensor,
    stream: int = TARGET,
) -> None:
    """The specification of `sample_target`; reads nothing on the host.

    With z = logits / temperature in float32, a position keeps the tokens with z >= threshold:

    1. top-k keeps those at least as large as the k-th largest;
    2. top-p keeps, of the distribution over these, the fewest largest that have a mass of at least top_p
       together, and whatever ties with the last of them; at least one token;
    3. min-p keeps those with a probability of at least min_p times the largest.

    The token is `argmax(z + gumbel(seed, position + 1, stream, token))` over the kept ones, the lowest id on
    ties. A row of temperature 0 takes the argmax of its logits, and its distribution is that one token.
    Masses are those of `elementary.mass`, so every output is the same on every backend, and a position's
    depend only on its own logits and parameters. Positions past `cu_tokens[B]` are not touched.

    Args:
        logits: float32, float16 or bfloat16 [W, V]; -inf excludes a token.
        rows: int32 [W], the row of each position.
        positions: int32 [W], absolute position of each window token.
        cu_tokens: int32 [B + 1].
        slot_of_row: int32 [B].
        temperature: float32 [R1]; 0 is greedy.
        top_k: int32 [R1]; 0, or V and more, keeps every token.
        top_p: float32 [R1]; 1 keeps every token.
        min_p: float32 [R1]; 0 keeps every token.
        seed: int64 [R1].
        sampled: int32 [W], written; 0 where failed.
        log_normalizer: float32 [W], written: log-sum-exp of the kept z, so that a kept token's probability is
            exp(z - log_normalizer); the largest z where greedy, 0 where failed.
        threshold: float32 [W], written: the smallest kept z, -inf if nothing is filtered out; the largest z
            where greedy, -inf where failed.
        failed: bool [W], written: the largest z is not finite, which NaN counts as.
        stream: of the noise. A drafter that samples from its own logits takes `TARGET` to agree with the target as
            often as it can (coupled), and `DRAFT` where the two must be independent.
    """
    vocab = logits.shape[1]
    used = torch.arange(logits.shape[0], device=logits.device) < cu_tokens[-1:]
    slot = slot_of_row[rows.clamp_min(0).long()].long()
    heat, k, p = temperature[slot], top_k[slot], top_p[slot]
    greedy = heat <= 0.0
    z = logits.float() / torch.where(greedy, 1.0, heat)[:, None]
    top = z.amax(1)
    bad = ~top.isfinite()
    z, top = torch.where(bad[:, None], 0.0, z), torch.where(bad, 0.0, top)

    ordered = z.sort(dim=1, descending=True).values
    masses = mass(ordered - top[:, None])
    kth = torch.where((k <= 0) | (k > vocab), vocab, k).long()
    bound = ordered.gather(1, (kth - 1)[:, None])
    running = torch.where(ordered >= bound, masses, 0).cumsum(1)
    needed = (running[:, -1].double() * p.double()).ceil().long()
    last = (running < needed[:, None]).sum(1, keepdim=True).clamp_max(vocab - 1)
    bound = torch.where((p < 1.0)[:, None], ordered.gather(1, last), bound)
    least = min_p[slot]
    relative = top + log(least.clamp(_LEAST_NORMAL, 1.0))
    bound = torch.maximum(bound, torch.where(least > 0.0, relative, -torch.inf)[:, None])

    kept = z >= bound
    lowest = torch.where(kept.all(1), -torch.inf, torch.where(kept, z, torch.inf).amin(1))
    normalizer = top + log_of_mass(torch.where(ordered >= bound, masses, 0).sum(1))
    token = torch.arange(vocab, device=logits.device)
    noise = gumbel(seed[slot][:, None], positions[:, None] + 1, stream, token)
    noisy = torch.where(kept, z + noise, -torch.inf).argmax(1)
    choice = torch.where(greedy, z.argmax(1), noisy)

    def write(output: torch.Tensor, value: torch.Tensor) -> None:
        output.copy_(torch.where(used, value.to(output.dtype), output))

    write(sampled, torch.where(bad, 0, choice))
    write(log_normalizer, torch.where(greedy, top, torch.where(bad, 0.0, normalizer)))
    write(threshold, torch.where(bad, -torch.inf, torch.where(greedy, top, lowest)))
    write(failed, bad)


def _sample_target_cpu(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    cu_tokens: torch.Tensor,
    slot_of_row: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    sampled: torch.Tensor,
    log_normalizer: torch.Tensor,
    threshold: torch.Tensor,
    failed: torch.Tensor,
    stream: int = TARGET,
) -> None:
    ends = cu_tokens.tolist()
    sampled_at, failed_at = sampled.numpy(), failed.numpy()
    normalizer_at, threshold_at = log_normalizer.numpy(), threshold.numpy()
    for row, slot in enumerate(slot_of_row.tolist()):
        if ends[row] == ends[row + 1]:
            continue
        heat = float(temperature[slot])
        for at in range(ends[row], ends[row + 1]):
            # NumPy's argmax is ten times as fast as torch's; on NaN it gives the first of them.
            z: FloatArray = logits[at].float().numpy()
            if heat > 0.0:
                z = z / np.float32(heat)
            choice = int(z.argmax())
            top = z[choice]
            failed_at[at] = not math.isfinite(top)
            if failed_at[at]:
                sampled_at[at], normalizer_at[at], threshold_at[at] = 0, 0.0, -math.inf
            elif heat <= 0.0:
                sampled_at[at], normalizer_at[at], threshold_at[at] = choice, top, top
            else:
                filters = int(top_k[slot]), float(top_p[slot]), float(min_p[slot])
                key = int(seed[slot]), int(positions[at]) + 1, stream
                sampled_at[at], normalizer_at[at], threshold_at[at] = _sample_row(z, top, filters, key)


def _sample_row(
    z: FloatArray, top: np.float32, filters: tuple[int, float, float], key: tuple[int, int, int]
) -> tuple[int, np.float32, float]:
    """Token, log-normaliser and threshold of one position at a temperature above 0."""
    vocab = len(z)
    bound = _bound(z, top, *filters)
    kept = np.flatnonzero(z >= bound) if bound > -math.inf else None
    if kept is None or len(kept) == vocab:
        total = mass_array(z - top).sum()
        noisy = gumbel_row(*key, vocab)
        noisy += z
        return int(noisy.argmax()), top + log_of_mass_array(total), -math.inf
    values = z[kept]
    total = mass_array(values - top).sum()
    # One of four consecutive tokens costs as much as all four.
    noise = gumbel_at(*key, kept) if 4 * len(kept) < vocab else gumbel_row(*key, vocab)[kept]
    choice = int(kept[(values + noise).argmax()])
    return choice, top + log_of_mass_array(total), float(values.min())


def _bound(z: FloatArray, top: np.float32, top_k: int, top_p: float, min_p: float) -> np.float32:
    """A token is kept iff its z is not below this; -inf if no filter is active."""
    bound = np.float32(-math.inf)
    candidates = z
    if 0 < top_k < len(z):
        bound = np.float32(torch.from_numpy(z).topk(top_k, sorted=False).values.min().item())
        candidates = z[z >= bound]
    if top_p < 1.0:
        masses = mass_array(candidates - top)
        bound = _top_p_bound(candidates, masses, math.ceil(float(masses.sum()) * top_p), top)
    if min_p > 0.0:
        logarithm = log_array(np.array([min(max(min_p, _LEAST_NORMAL), 1.0)], dtype=np.float32))[0]
        bound = max(bound, top + logarithm)
    return bound


def _top_p_bound(values: FloatArray, masses: npt.NDArray[np.int64], needed: int, top: np.float32) -> np.float32:
    """The value at which the falling running sum of masses reaches `needed`.

    Only the head of the distribution is sorted: the values near the largest that hold the needed mass.
    """
    for reach in (4.0, 8.0, 16.0, math.inf):
        head = values >= top - np.float32(reach)
        head_masses = masses[head]
        if head_masses.sum() >= needed:
            break
    head_values = values[head]
    order = np.argsort(-head_values)
    last = int(np.searchsorted(np.cumsum(head_masses[order]), needed))
    return head_values[order[last]]


def _sample_target_fake(*args: torch.Tensor | int) -> None:
    return None


sample_target = define_op(
    "sample_target(Tensor logits, Tensor rows, Tensor positions, Tensor cu_tokens, Tensor slot_of_row, "
    "Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seed, Tensor(a!) sampled, "
    "Tensor(b!) log_normalizer, Tensor(c!) threshold, Tensor(d!) failed, int stream=0) -> ()",
    cpu=_sample_target_cpu,
    cuda=sample_target_triton,
    fake=_sample_target_fake,
)
"""`draftgraph::sample_target`; see `sample_target_reference`."""
