"""Random packed windows for the ops of a forward, and the comparison of two results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from draftgraph.kernels.float8 import FLOAT8
from draftgraph.kernels.window_attention import window_attention_reference


@dataclass
class WindowCase:
    """Windows of `counts[b]` tokens after `bases[b]` cached positions, then padding tokens up to `width`.

    Rows without tokens that come after all others are padding rows: they point to the reserved slot.
    """

    counts: list[int]
    bases: list[int]
    padding: int = 0
    context: int = 192
    seed: int = 0
    tree: bool = False
    parent_of: Callable[[int], int] | None = None
    """With `tree`, the parent of node j above 0, below j; random by default."""
    generator: torch.Generator = field(init=False)

    def __post_init__(self):
        self.generator = torch.Generator().manual_seed(self.seed)
        rows = len(self.counts)
        self.num_slots = rows + 2
        self.width = sum(self.counts) + self.padding
        self.base = torch.tensor(self.bases, dtype=torch.int32)
        self.cu_tokens = torch.tensor([0, *self.counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self.slot_of_row = torch.randperm(self.num_slots - 1, generator=self.generator)[:rows].int()
        live = rows
        while live and self.counts[live - 1] == 0:
            live -= 1
        self.slot_of_row[live:] = self.num_slots - 1
        self.rows = torch.full((self.width,), -1, dtype=torch.int32)
        self.positions = torch.zeros(self.width, dtype=torch.int32)
        self.slots = torch.full((self.width,), self.num_slots - 1, dtype=torch.int32)
        self.ancestors = torch.zeros(self.width, dtype=torch.int64) if self.tree else None
        for row, (count, base) in enumerate(zip(self.counts, self.bases, strict=True)):
            begin = int(self.cu_tokens[row])
            self.rows[begin : begin + count] = row
            self.slots[begin : begin + count] = self.slot_of_row[row]
            depths = list(range(count))
            if self.ancestors is not None:
                parents, depths = self.random_tree(count)
                for j, parent in enumerate(parents):
                    own = 1 << j if j < 63 else -(1 << 63)
                    self.ancestors[begin + j] = own | (int(self.ancestors[begin + parent]) if j else 0)
            self.positions[begin : begin + count] = base + torch.tensor(depths, dtype=torch.int32)

    def random_tree(self, count):
        """Parents and depths of a tree whose nodes come after their parents."""
        if self.parent_of is None:
            parents = [int(torch.randint(0, max(j, 1), (1,), generator=self.generator)) for j in range(count)]
        else:
            parents = [self.parent_of(j) if j else 0 for j in range(count)]
        depths = [0] * count
        for j in range(1, count):
            depths[j] = depths[parents[j]] + 1
        return parents, depths

    def normal(self, *shape, dtype=torch.float32):
        return torch.randn(*shape, generator=self.generator).to(dtype)


def rotary_arguments(
    case, *, heads, kv_heads, size, value_size, half, dtype, norm, unit_offset, interleaved, float8=False
):
    features = (heads + kv_heads) * size + kv_heads * value_size
    positions = case.context + 1
    kind = FLOAT8 if float8 else dtype
    scales = [torch.rand(kv_heads, generator=case.generator) + 0.5 for _ in range(2)] if float8 else [None, None]
    return [
        case.normal(case.width, features, dtype=dtype),
        case.normal(size, dtype=dtype) if norm else None,
        case.normal(size, dtype=dtype) if norm else None,
        case.normal(positions, half),
        case.normal(positions, half),
        case.positions,
        case.slots,
        case.rows,
        case.cu_tokens,
        case.base,
        case.normal(case.num_slots, kv_heads, case.context, size).to(kind),
        case.normal(case.num_slots, kv_heads, case.context, value_size).to(kind),
        heads,
        1e-6,
        unit_offset,
        interleaved,
        *scales,
    ]


def attention_arguments(
    case, *, heads=2, kv_heads=1, key_dim=16, value_dim=16, dtype=torch.float32, window=0, cap=0.0, float8=False
):
    """What is not the past or the window of a row is NaN in the caches."""
    kind = FLOAT8 if float8 else dtype
    caches = [case.normal(case.num_slots, kv_heads, case.context, dim) for dim in (key_dim, value_dim)]
    for cache in caches:
        written = torch.zeros(case.num_slots, case.context, dtype=torch.bool)
        for slot, base, count in zip(case.slot_of_row.tolist(), case.bases, case.counts, strict=True):
            written[slot, : base + count] = True
        cache.masked_fill_(~written[:, None, :, None], float("nan"))
    scales = [torch.rand(kv_heads, generator=case.generator) + 0.5 for _ in range(2)] if float8 else [None, None]
    return [
        case.normal(case.width, heads, key_dim, dtype=dtype),
        *(cache.to(kind) for cache in caches),
        case.positions,
        case.cu_tokens,
        case.base,
        case.slot_of_row,
        case.ancestors,
        key_dim**-0.5,
        window,
        cap,
        *scales,
    ]


def attention_expected(args):
    """The reference does not multiply NaN with zero weights on the side of the values; keys it masks after."""
    clean = [torch.nan_to_num(a.float()).to(a.dtype) if i in (1, 2) else a for i, a in enumerate(args)]
    return window_attention_reference(*clean)


def assert_close(ours, theirs, relative):
    """The largest difference is at most `relative` times the largest value expected."""
    ours, theirs = ours.float(), theirs.float()
    assert ours.shape == theirs.shape
    assert torch.isfinite(ours).all()
    difference = (ours - theirs).abs().max() if ours.numel() else torch.tensor(0.0)
    scale = theirs.abs().max().clamp(min=1e-3) if ours.numel() else torch.tensor(1.0)
    assert difference <= relative * scale, f"{difference / scale:.3g} relative, allowed {relative}"


TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Relative to the largest value: one rounding to the type may fall on the other side."""
