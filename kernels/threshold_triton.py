"""The Triton kernels that find the thresholds of top-k and top-p, without a sort.

A key is the logit's own bit pattern (16 bits for 16-bit types) made to order as numbers do. Dividing by the temperature
keeps that order, so the k-th largest logit is the k-th largest z; logits that become equal by it are compared as z.

The threshold's key is narrowed down digit by digit from the top: each part of the vocabulary counts, or weighs, how
many of its keys have each value of the next digit, and the launch after adds the parts up and fixes that digit.
"""

from __future__ import annotations

from .elementary_triton import mass, ranked, value_of_rank
from .triton_support import jit, tl

MASS_BLOCK = 256
"""Numbers that `mass_kernel` takes at once."""
STATE = 5
"""int64 numbers of a position: prefix and need, twice, since a launch reads one pair and writes the other; the k-th
key."""


@jit
def select_key(x):  # type: ignore[no-untyped-def]
    """uint32 that orders as x does, in as many bits as x has; the two zeros are equal."""
    if x.dtype == tl.float32:
        bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
        key = bits ^ tl.where((bits >> 31) != 0, 0xFFFFFFFF, 0x80000000).to(tl.uint32)
    else:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32)
        bits = tl.where(bits == 0x8000, 0, bits)
        key = bits ^ tl.where((bits >> 15) != 0, 0xFFFF, 0x8000).to(tl.uint32)
    return key


@jit
def selected_value(key, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 of a `select_key` in int64."""
    if kind == tl.float32:
        bits = key ^ tl.where((key >> 31) != 0, 0x80000000, 0xFFFFFFFF)
        value = bits.to(tl.uint32).to(tl.float32, bitcast=True)
    else:
        bits = key ^ tl.where((key >> 15) != 0, 0x8000, 0xFFFF)
        value = bits.to(tl.uint16).to(kind, bitcast=True).to(tl.float32)
    return value


@jit
def digit_sums(sums, at, parts, PARTS_2: tl.constexpr, BINS: tl.constexpr):  # type: ignore[no-untyped-def]
    """int64 [BINS]: the parts' histograms of a position added up."""
    part = tl.arange(0, PARTS_2)
    place = (at.to(tl.int64) * parts + part)[:, None] * BINS + tl.arange(0, BINS)[None, :]
    return tl.sum(tl.load(sums + place, mask=(part < parts)[:, None], other=0), 0).to(tl.int64)


@jit
def descend(digits, prefix, need, BINS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bin in which the sum from the largest bin down reaches `need`: the prefix with it, and what is left of it."""
    bins = tl.arange(0, BINS)
    above = tl.sum(digits, 0) - tl.cumsum(digits, 0)
    digit = tl.max(tl.where(above + digits >= need, bins, 0), 0)
    return prefix * BINS + digit, need - tl.sum(tl.where(bins > digit, digits, 0), 0)


@jit
def slot_of(at, rows, slot_of_row):  # type: ignore[no-untyped-def]
    """The slot of a position of the packed windows."""
    return tl.load(slot_of_row + tl.maximum(tl.load(rows + at), 0))


@jit
def largest_rank(best, at, parts, PARTS_2: tl.constexpr):  # type: ignore[no-untyped-def]
    """The `ranked` of a position's largest logit."""
    part = tl.arange(0, PARTS_2)
    return tl.max(tl.load(best + at.to(tl.int64) * parts + part, mask=part < parts, other=-0x8000000000000000), 0)


@jit(unspecialized=["num_rows", "parts"])
def scan_kernel(  # type: ignore[no-untyped-def]
    logits,
    rows,
    cu_tokens,
    slot_of_row,
    temperature,
    top_k,
    best,
    counts,
    num_rows,
    vocab,
    logits_stride,
    parts,
    PART: tl.constexpr,
):
    """Of each part the largest logit, `ranked`, and the histogram of the top digits: int32 [W, parts, 256]."""
    at = tl.program_id(0)
    part = tl.program_id(1)
    if at >= tl.load(cu_tokens + num_rows):
        return
    token = part * PART + tl.arange(0, PART)
    inside = token < vocab
    x = tl.load(logits + at.to(tl.int64) * logits_stride + token, mask=inside, other=0.0)
    place = at.to(tl.int64) * parts + part
    tl.store(best + place, tl.max(ranked(x.to(tl.float32), token, inside), 0))
    slot = slot_of(at, rows, slot_of_row)
    k = tl.load(top_k + slot)
    if (k > 0) & (k < vocab) & (tl.load(temperature + slot) > 0.0):
        digit = select_key(x) >> (x.dtype.primitive_bitwidth - 8)
        tl.store(counts + place * 256 + tl.arange(0, 256), tl.histogram(digit.to(tl.int32), 256, mask=inside))


@jit(unspecialized=["num_rows", "shift", "parity", "parts"])
def count_kernel(  # type: ignore[no-untyped-def]
    logits,
    rows,
    cu_tokens,
    slot_of_row,
    temperature,
    top_k,
    counts_before,
    counts,
    state,
    num_rows,
    vocab,
    logits_stride,
    shift,
    parity,
    STAGE: tl.constexpr,
    parts,
    PARTS_2: tl.constexpr,
    PART: tl.constexpr,
):
    """Fixes the next digit of the k-th largest key, and counts the one after it among the keys that agree so far.

    Stage 1 fixes the first digit, stage 2 any later one. `shift` is where the counted digit begins, `parity` where the
    state is written.
    """
    at = tl.program_id(0)
    part = tl.program_id(1)
    if at >= tl.load(cu_tokens + num_rows):
        return
    slot = slot_of(at, rows, slot_of_row)
    k = tl.load(top_k + slot)
    if (k <= 0) | (k >= vocab) | (tl.load(temperature + slot) <= 0.0):
        return
    own = state + at * 5
    prefix = tl.zeros((), tl.int64)
    need = k.to(tl.int64)
    if STAGE > 1:
        prefix = tl.load(own + (1 - parity) * 2)
        need = tl.load(own + (1 - parity) * 2 + 1)
    prefix, need = descend(digit_sums(counts_before, at, parts, PARTS_2, 256), prefix, need, 256)
    if part == 0:
        tl.store(own + parity * 2, prefix)
        tl.store(own + parity * 2 + 1, need)
    token = part * PART + tl.arange(0, PART)
    x = tl.load(logits + at.to(tl.int64) * logits_stride + token, mask=token < vocab, other=0.0)
    key = select_key(x)
    member = (token < vocab) & ((key >> (shift + 8).to(tl.uint32)) == prefix.to(tl.uint32))
    digit = (key >> shift.to(tl.uint32)) & 0xFF
    place = (at.to(tl.int64) * parts + part) * 256
    tl.store(counts + place + tl.arange(0, 256), tl.histogram(digit.to(tl.int32), 256, mask=member))


@jit(unspecialized=["num_rows", "shift", "parity", "parts"])
def mass_kernel(  # type: ignore[no-untyped-def]
    logits,
    rows,
    cu_tokens,
    slot_of_row,
    temperature,
    top_k,
    top_p,
    best,
    counts_before,
    masses_before,
    masses,
    state,
    num_rows,
    vocab,
    logits_stride,
    shift,
    parity,
    STAGE: tl.constexpr,
    parts,
    PARTS_2: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fixes the next digit of the smallest key that top-p keeps, and adds up the masses of the one after it.

    Stage 0 fixes the last digit of top-k's key instead, stage 1 the first one of top-p's, stage 2 any later one. The
    masses are int64 [W, parts, 16]. `shift` is where their digit begins, `parity` where the state is written.
    """
    at = tl.program_id(0)
    part = tl.program_id(1)
    if at >= tl.load(cu_tokens + num_rows):
        return
    slot = slot_of(at, rows, slot_of_row)
    heat = tl.load(temperature + slot)
    if heat <= 0.0:
        return
    KIND: tl.constexpr = logits.dtype.element_ty  # noqa: N806
    LAST: tl.constexpr = KIND.primitive_bitwidth // 8 - 1  # noqa: N806
    k = tl.load(top_k + slot)
    own = state + at * 5
    bound = -float("inf")
    if (k > 0) & (k < vocab):
        if STAGE == 0:
            digits = digit_sums(counts_before, at, parts, PARTS_2, 256)
            kth, _ = descend(digits, tl.load(own + LAST % 2 * 2), tl.load(own + LAST % 2 * 2 + 1), 256)
            if part == 0:
                tl.store(own + 4, kth)
        else:
            kth = tl.load(own + 4)
        bound = tl.div_rn(selected_value(kth, KIND), heat)
    p = tl.load(top_p + slot)
    # Not `p >= 1`: top-p is off where p is NaN.
    if (p < 1.0) == 0:
        return
    top = tl.div_rn(value_of_rank(largest_rank(best, at, parts, PARTS_2)), heat)
    prefix = tl.zeros((), tl.int64)
    if STAGE > 0:
        sums = digit_sums(masses_before, at, parts, PARTS_2, 16)
        if STAGE == 1:
            # At least the largest one is kept.
            share = tl.ceil(tl.sum(sums, 0).to(tl.float64) * p.to(tl.float64))
            need = tl.maximum(share.to(tl.int64), 1)
        else:
            prefix = tl.load(own + (1 - parity) * 2)
            need = tl.load(own + (1 - parity) * 2 + 1)
        prefix, need = descend(sums, prefix, need, 16)
        if part == 0:
            tl.store(own + parity * 2, prefix)
            tl.store(own + parity * 2 + 1, need)
    bins = tl.arange(0, 16)
    total = tl.zeros((BLOCK, 16), tl.int64)
    for start in range(0, PART, BLOCK):
        token = part * PART + start + tl.arange(0, BLOCK)
        x = tl.load(logits + at.to(tl.int64) * logits_stride + token, mask=token < vocab, other=0.0)
        key = select_key(x)
        z = tl.div_rn(x.to(tl.float32), heat)
        member = (token < vocab) & (z >= bound)
        if STAGE > 0:
            member = member & ((key >> (shift + 4).to(tl.uint32)) == prefix.to(tl.uint32))
        weight = tl.where(member, mass(z - top), 0)
        digit = ((key >> shift.to(tl.uint32)) & 0xF).to(tl.int32)
        total += tl.where(digit[:, None] == bins[None, :], weight[:, None], 0)
    tl.store(masses + (at.to(tl.int64) * parts + part) * 16 + bins, tl.sum(total, 0))
