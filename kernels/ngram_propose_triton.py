"""The Triton kernel of `ngram_propose`, and the hash that it shares with the reference."""

from __future__ import annotations

import torch

from .triton_support import KernelSpec, check_some, check_tensor, constants_of, draft_range, jit, next_power_of_2, tl

MULTIPLIER = 0x9E3779B1

# The most entries of the kernel's tile of tables and new positions, except where tables are many.
_TILE = 128
_LONGEST = 64


def hash_shift(heads: torch.Tensor, min_n: int, max_n: int) -> int:
    """By how many bits a 32-bit hash is shifted to give a bucket of `heads` [R1, N, H].

    Raises:
        ValueError: sizes do not fit, or H is not a power of two.
    """
    buckets = heads.shape[2]
    if not 1 <= min_n <= max_n or heads.shape[1] != max_n - min_n + 1:
        raise ValueError(f"n-grams of {min_n} to {max_n} tokens do not fit {heads.shape[1]} tables")
    if buckets & (buckets - 1):
        raise ValueError(f"the number of buckets must be a power of two, got {buckets}")
    return 33 - buckets.bit_length()


@jit
def _bucket_of(value, shift, ONE_BUCKET: tl.constexpr):  # type: ignore[no-untyped-def]
    # A shift by all 32 bits is undefined.
    return (value * 0).to(tl.int32) if ONE_BUCKET else (value >> shift.to(tl.uint32)).to(tl.int32)


@jit(unspecialized=["context", "num_drafts", "buckets", "shift"])
def _ngram_propose_kernel(  # type: ignore[no-untyped-def]
    tokens,
    length,
    finished,
    slot_of_row,
    heads,
    links,
    indexed,
    draft_tokens,
    draft_count,
    context,
    num_drafts,
    buckets,
    shift,
    MIN_N: tl.constexpr,
    MAX_N: tl.constexpr,
    ONE_BUCKET: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    TABLES: tl.constexpr,
    SUFFIX: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_DRAFTS: tl.constexpr,
):
    # One program per row. All n at once: element i of a range of TABLES is n = MIN_N + i.
    slot = tl.load(slot_of_row + tl.program_id(0)).to(tl.int64)
    draft = tl.arange(0, BLOCK_DRAFTS)
    drafts = draft_tokens + slot * num_drafts + draft
    if tl.load(finished + slot).to(tl.int32) != 0:
        tl.store(drafts, tl.full([BLOCK_DRAFTS], -1, tl.int32), mask=draft < num_drafts)
        tl.store(draft_count + slot, 0)
        return
    row = tokens + slot * context
    row_length = tl.load(length + slot)
    table = tl.arange(0, TABLES)
    n = MIN_N + table
    real = n <= MAX_N
    table_heads = heads + (slot * (MAX_N - MIN_N + 1) + table) * buckets
    table_links = links + (slot * (MAX_N - MIN_N + 1) + table) * context

    # Index the new positions in blocks. Within a block a position's predecessor in its chain is the nearest before it
    # with the same bucket; else it is what the table held before the block.
    place = tl.arange(0, BLOCK)
    begin = tl.load(indexed + slot)
    while begin < row_length - 1:
        end = begin + place
        value = tl.zeros([BLOCK], dtype=tl.uint32)
        bucket = tl.zeros([TABLES, BLOCK], dtype=tl.int32)
        for back in tl.static_range(MAX_N):
            known = (end >= back) & (end < row_length - 1)
            token = tl.load(row + end - back, mask=known, other=0)
            value = (value ^ token.to(tl.uint32)) * MULTIPLIER
            bucket = tl.where((n == back + 1)[:, None], _bucket_of(value, shift, ONE_BUCKET)[None, :], bucket)
        valid = real[:, None] & (end[None, :] >= n[:, None] - 1) & (end < row_length - 1)[None, :]
        # What is not valid shares a bucket with nothing: neither with real ones nor with each other.
        bucket = tl.where(valid, bucket, -1 - place[None, :])
        head = tl.load(table_heads[:, None] + bucket, mask=valid, other=0)
        same = bucket[:, :, None] == bucket[:, None, :]
        before = same & (place[None, None, :] < place[None, :, None])
        previous = tl.max(tl.where(before, (end + 1)[None, None, :], 0), 2)
        after = same & (place[None, None, :] > place[None, :, None])
        is_last = tl.max(after.to(tl.int32), 2) == 0
        tl.store(table_links[:, None] + end[None, :], tl.where(previous > 0, previous, head), mask=valid)
        # All threads have read the table before any writes to it, and the other way round.
        tl.debug_barrier()
        tl.store(table_heads[:, None] + bucket, (end + 1)[None, :] + tl.zeros_like(bucket), mask=valid & is_last)
        tl.debug_barrier()
        begin += BLOCK
    tl.store(indexed + slot, row_length - 1)

    # Look the last n tokens up, for all n at once, and follow the chains until the longest match is certain.
    back_of = tl.arange(0, SUFFIX)
    known = (back_of < MAX_N) & (back_of < row_length)
    suffix = tl.load(row + row_length - 1 - back_of, mask=known, other=0)
    hashed = tl.zeros([TABLES], dtype=tl.uint32)
    bucket_of_n = tl.zeros([TABLES], dtype=tl.int32)
    for back in tl.static_range(MAX_N):
        token = tl.load(row + row_length - 1 - back, mask=back < row_length, other=0)
        hashed = (hashed ^ token.to(tl.uint32)) * MULTIPLIER
        bucket_of_n = tl.where(n == back + 1, _bucket_of(hashed, shift, ONE_BUCKET), bucket_of_n)
    follow = tl.load(table_heads + bucket_of_n, mask=real & (n < row_length), other=0)
    found = tl.zeros([TABLES], dtype=tl.int32)
    longest = 0
    while tl.max(follow, 0) > 0:
        compared = (follow > 0)[:, None] & (back_of[None, :] < n[:, None])
        earlier = tl.load(row + follow[:, None] - 1 - back_of[None, :], mask=compared, other=0)
        differ = tl.sum((compared & (earlier != suffix[None, :])).to(tl.int32), 1)
        found = tl.where((follow > 0) & (differ == 0), follow, found)
        longest = tl.max(tl.where(found > 0, n, 0), 0)
        go_on = (follow > 0) & (n > longest)
        follow = tl.load(table_links + follow - 1, mask=go_on, other=0)
    match = tl.sum(tl.where((n == longest) & (longest > 0), found, 0), 0)
    count = tl.where(match > 0, tl.minimum(row_length - match, num_drafts), 0)
    proposed = tl.load(row + match + draft, mask=draft < count, other=-1)
    tl.store(drafts, proposed, mask=draft < num_drafts)
    tl.store(draft_count + slot, count)


def _sizes(min_n: int, max_n: int, buckets: int, shift: int, num_drafts: int) -> dict[str, int]:
    """The constants of the kernel."""
    tables = next_power_of_2(max_n - min_n + 1)
    block = min(32, max(_TILE // tables, 4))
    return {
        "num_drafts": num_drafts,
        "MIN_N": min_n,
        "MAX_N": max_n,
        "buckets": buckets,
        "shift": shift,
        "ONE_BUCKET": buckets == 1,
        "MULTIPLIER": MULTIPLIER,
        "TABLES": tables,
        "SUFFIX": next_power_of_2(max_n),
        "BLOCK": block,
        "BLOCK_DRAFTS": draft_range(num_drafts),
    }


def ngram_propose_triton(
    tokens: torch.Tensor,
    length: torch.Tensor,
    finished: torch.Tensor,
    slot_of_row: torch.Tensor,
    heads: torch.Tensor,
    links: torch.Tensor,
    indexed: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_count: torch.Tensor,
    min_n: int,
    max_n: int,
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
    check_some("heads", "bucket", heads.shape[2])
    shift = hash_shift(heads, min_n, max_n)
    if max_n > _LONGEST:
        raise ValueError(f"max_n is {max_n}; accepted: at most {_LONGEST}")
    check_tensor("links", links, dtypes=int32, shape=(slots, heads.shape[1], context), device=device)
    for name, of_slot in (("length", length), ("indexed", indexed), ("draft_count", draft_count)):
        check_tensor(name, of_slot, dtypes=int32, shape=(slots,), device=device)
    check_tensor("finished", finished, dtypes=(torch.bool,), shape=(slots,), device=device)
    check_tensor("draft_tokens", draft_tokens, dtypes=int32, shape=(slots, None), device=device)
    check_tensor("slot_of_row", slot_of_row, dtypes=int32, shape=(None,), device=device)
    rows = slot_of_row.shape[0]
    if rows == 0:
        return
    _ngram_propose_kernel[(rows,)](
        tokens,
        length,
        finished,
        slot_of_row,
        heads,
        links,
        indexed,
        draft_tokens,
        draft_count,
        context,
        **_sizes(min_n, max_n, heads.shape[2], shift, draft_tokens.shape[1]),
        num_warps=4,
    )


def kernel_specs() -> list[KernelSpec]:
    """The usual n-grams, a single n, and many of them."""

    def spec(min_n: int, max_n: int, num_drafts: int, buckets: int = 8192) -> KernelSpec:
        pointers = ["tokens", "length", "slot_of_row", "heads", "links", "indexed", "draft_tokens", "draft_count"]
        tables, new = max_n - min_n + 1, num_drafts + 1
        # The new tokens, three numbers per table and new token, one chain entry and its tokens, the drafts twice.
        moved = 4 * (new + max_n + 3 * tables * new + tables * (2 + max_n) + 2 * num_drafts) + 21
        return KernelSpec(
            op="ngram_propose",
            variant=f"{min_n} to {max_n} tokens, {num_drafts} drafts, {buckets} buckets",
            kernel=_ngram_propose_kernel,
            arguments=dict.fromkeys(pointers, "*i32")
            | {"finished": "*u1"}
            | dict.fromkeys(["context", "num_drafts", "buckets", "shift"], "i32"),
            constants=constants_of(_sizes(min_n, max_n, buckets, 0, num_drafts)),
            num_stages=3,
            shape=f"1 row, {new} new tokens, 1 candidate per n",
            bytes_moved=moved,
            max_registers=168 if tables < 64 else 255,
        )

    return [spec(2, 4, 7), spec(1, 4, 7), spec(3, 3, 7), spec(1, 16, 15), spec(1, 64, 15), spec(2, 4, 7, 1)]
