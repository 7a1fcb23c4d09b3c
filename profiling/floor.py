"""The floor: the bytes that a step must move and the products it must compute, and the least time they take.

Counted is what no implementation of the program at its shapes can avoid: weights once per pass, the keys and values
of what is committed, those that the window adds, the logits from verify to accept, and the decode state; of mixtures
of experts, those that the tokens of the window are expected to choose. Activations between the ops of a forward are not
counted: they can stay in caches and registers. Operations are those of matrix products, two per multiply-add; all
other arithmetic is bound by the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .device_rates import DeviceRates
from .sizes import ModelSizes as ModelSizes

_INT32, _INT64 = 4, 8


@dataclass(frozen=True, kw_only=True)
class RoundShape:
    """A round as it runs. `context` and `window` may be means over rounds: the counts are linear in them, but for
    sliding windows and the window's attention to itself.
    """

    rows: float
    """Live rows."""
    width: int
    """Token positions of the verify, padding included."""
    window: float
    """Tokens of one row that are verified: its anchor and its drafts."""
    context: float
    """Committed tokens of a row before its window, whose keys and values are read."""
    num_drafts: int = 0
    """`K`, the most drafts of a row."""
    emitted: float = 1.0
    """Tokens that a row commits in a round."""
    dtype: torch.dtype = torch.bfloat16
    """Of the weights and logits."""
    kv_dtype: torch.dtype | None = None
    """Of keys and values; None: `dtype`."""
    logprobs: int | None = None
    """Log-probabilities recorded per token beside its own; None: none are recorded."""

    def __post_init__(self) -> None:
        for name, least in (
            ("rows", 0),
            ("width", 1),
            ("window", 0),
            ("context", 0),
            ("num_drafts", 0),
            ("emitted", 0),
        ):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if self.rows * self.window > self.width:
            raise ValueError(f"{self.rows:g} windows of {self.window:g} tokens do not fit the width {self.width}")

    @property
    def tokens(self) -> float:
        """Token positions that are not padding."""
        return self.rows * self.window


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """What one call of a step must at least move and compute."""

    bytes_read: float = 0.0
    bytes_written: float = 0.0
    operations: float = 0.0
    """Of matrix products; a multiply-add is two."""
    dtype: torch.dtype = torch.float32
    """In which the products are computed."""

    @property
    def bytes(self) -> float:
        """Read and written."""
        return self.bytes_read + self.bytes_written

    def seconds(self, rates: DeviceRates) -> float:
        """The least time on a device: that of the bytes or that of the operations, whichever is longer.

        Raises `ValueError` when operations are counted and the device's rate for their dtype was not measured.
        """
        compute = self.operations / rates.operations_per_second(self.dtype) if self.operations else 0.0
        return max(self.bytes / rates.bandwidth, compute)

    def times(self, count: float) -> StepCost:
        """Of `count` calls together."""
        return StepCost(
            bytes_read=count * self.bytes_read,
            bytes_written=count * self.bytes_written,
            operations=count * self.operations,
            dtype=self.dtype,
        )

    def __add__(self, other: StepCost) -> StepCost:
        if self.operations and other.operations and self.dtype != other.dtype:
            raise ValueError(f"costs in {self.dtype} and {other.dtype} cannot be added: their rates differ")
        return StepCost(
            bytes_read=self.bytes_read + other.bytes_read,
            bytes_written=self.bytes_written + other.bytes_written,
            operations=self.operations + other.operations,
            dtype=self.dtype if self.operations else other.dtype,
        )


def forward_cost(
    sizes: ModelSizes,
    *,
    width: float,
    rows: float,
    window: float,
    context: float,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    head: bool = True,
    layers: tuple[int, int] | None = None,
) -> StepCost:
    """A pass of a decoder over packed windows; a drafter's passes are counted with it too.

    The embedding is a gather: `width` rows of the table are read. Matrix products run over all `width` positions,
    padding included; attention and experts over the `rows * window` tokens that are there. A window token sees the
    `context` before it, itself and the window tokens before it, or as many of those as a layer's sliding window lets
    it. Of a mixture the experts that the tokens choose are read, see `LayerSizes.distinct_experts`.

    Args:
        sizes: of the model.
        width: token positions.
        rows: windows.
        window: tokens of each.
        context: cached tokens before each window.
        dtype: of weights and logits.
        kv_dtype: of keys and values; None: `dtype`.
        head: whether logits are computed, for all positions; a prefill needs none.
        layers: the first layer that runs, and the one that does not any more; None: all of them.
    """
    first, last = (0, sizes.num_layers) if layers is None else layers
    element, kv_element, tokens = dtype.itemsize, (kv_dtype or dtype).itemsize, rows * window
    # The final norm, and the tables' rows of the tokens.
    read: float = (sizes.hidden_size + width * sizes.hidden_size) * element
    if sizes.layer_inputs and last > first:
        read += (sizes.input_matrices + sizes.layer_input_norm + width * sizes.layer_inputs) * element
    written = 0.0
    multiply_adds = width * sizes.input_matrices if last > first else 0.0
    for layer in sizes.layers[first:last]:
        sliding = layer.sliding
        reach = min(context, sliding - 1) if sliding else context
        seen = window * context + window * (window + 1) / 2
        if sliding:
            seen = min(seen, window * sliding)
        read += layer.weight_bytes(tokens, element) + rows * reach * layer.cached * kv_element
        written += tokens * layer.written * kv_element
        multiply_adds += layer.multiply_adds(width, tokens) + rows * seen * layer.pair_products
    if head:
        read += sizes.head * element
        written += width * sizes.vocab_size * element
        multiply_adds += width * sizes.head
    return StepCost(bytes_read=read, bytes_written=written, operations=2 * multiply_adds, dtype=dtype)


def prefill_cost(
    sizes: ModelSizes,
    *,
    width: int,
    tokens: float,
    context: float,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
) -> StepCost:
    """A prefill chunk of `tokens` prompt tokens, `width` with its padding, after `context` cached ones; no logits."""
    return forward_cost(
        sizes, width=width, rows=1, window=tokens, context=context, dtype=dtype, kv_dtype=kv_dtype, head=False
    )


def ngram_cost(shape: RoundShape, *, min_n: int, max_n: int) -> StepCost:
    """Prompt lookup over its index: enters the tokens of the last round, and looks one suffix up.

    Entering a token reads and writes one head and writes one link for each n, and reads the n-gram. The lookup reads
    one head, the suffix and one occurrence of it; then the drafts are copied.
    """
    sizes = max_n - min_n + 1
    entered = shape.emitted * (max_n + 3 * sizes)
    looked_up = 1 + 2 * max_n
    drafted = shape.window - 1
    return StepCost(
        bytes_read=shape.rows * _INT32 * (entered - 2 * sizes * shape.emitted + looked_up + drafted),
        bytes_written=shape.rows * _INT32 * (2 * sizes * shape.emitted + shape.num_drafts + 1),
    )


def suffix_cost(shape: RoundShape, *, depth: int) -> StepCost:
    """Suffix decoding: enters the tokens of the last round in an index, and looks at every match.

    Entering a token reads for each of `depth` lengths a head, the parent, a token and a parent to compare, the count,
    and the best child so far with its count; it writes the node, the count and the best child. A match is a node, its
    count and its best child, in the row's own tree and in the global one. A draft reads a token, a node, a count and a
    best child. Each row writes its drafts, their probabilities, how many they are, and how far its index reaches.
    """
    read = shape.emitted * (1 + 7 * depth) + 8 * depth + 4 * (shape.window - 1)
    written = shape.emitted * 3 * depth + 2 * shape.num_drafts + 2
    return StepCost(bytes_read=shape.rows * _INT32 * read, bytes_written=shape.rows * _INT32 * written)


def round_costs(
    sizes: ModelSizes, shape: RoundShape, propose: StepCost | None = None, *, first_layer: int = 0
) -> dict[str, StepCost]:
    """The cost of every step of a round, by phase.

    Args:
        sizes: of the target.
        shape: of the round.
        propose: what drafting costs; None where nothing drafts, and there is no such step.
        first_layer: with which verification begins, where drafting has run those before it.
    """
    element, rows = shape.dtype.itemsize, shape.rows
    costs: dict[str, StepCost] = {}
    if propose is not None:
        costs["propose"] = propose
    # draft_count, length, limit, draft_limit and finished in; cu_tokens, base and the width out.
    costs["budget"] = StepCost(bytes_read=rows * (4 * _INT32 + 1), bytes_written=(2 * rows + 2) * _INT32)
    packed = StepCost(bytes_read=shape.tokens * _INT32, bytes_written=shape.width * 4 * _INT32)
    costs["verify"] = packed + forward_cost(
        sizes,
        width=shape.width,
        rows=rows,
        window=shape.window,
        context=shape.context,
        dtype=shape.dtype,
        kv_dtype=shape.kv_dtype,
        layers=(first_layer, sizes.num_layers),
    )
    # The logits of every window token; the drafts and sampling parameters of every row. Out: the token, normaliser,
    # threshold and flag of every position, and what the row emits.
    costs["accept"] = StepCost(
        bytes_read=shape.tokens * sizes.vocab_size * element
        + rows * ((shape.window - 1) * _INT32 + 4 * _INT32 + _INT64),
        bytes_written=shape.tokens * (3 * _INT32 + 1) + rows * ((shape.emitted + 1) * _INT32 + 1),
    )
    if shape.logprobs is not None:
        emitted = rows * shape.emitted
        costs["logprobs"] = StepCost(
            bytes_read=emitted * sizes.vocab_size * element,
            bytes_written=emitted * (shape.logprobs + 1) * 2 * _INT32,
        )
    # The emitted tokens in; the same to the text and to the ring, and the counters read and written.
    costs["commit"] = StepCost(
        bytes_read=rows * (shape.emitted * _INT32 + 4 * _INT32 + 3 * _INT64),
        bytes_written=rows * (2 * shape.emitted * _INT32 + 2 * _INT32 + 1 + 3 * _INT64),
    )
    return costs


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """A speed beside its limit."""

    tokens_per_second: float
    bytes_per_second: float
    """Of the bytes that had to be moved; more may have been."""
    share_of_limit: float
    """The least time over the time taken: 1 is the limit."""

    def __str__(self) -> str:
        return (
            f"{self.tokens_per_second:.1f} tokens/s, {self.bytes_per_second / 1e9:.1f} GB/s, "
            f"{self.share_of_limit:.0%} of the limit"
        )


def efficiency(
    tokens: float, seconds: float, costs: Iterable[tuple[float, StepCost]], rates: DeviceRates
) -> Efficiency:
    """Compares a measured time with the floor.

    Args:
        tokens: made in that time.
        seconds: the time taken, positive.
        costs: how often each step was called, and its cost.
        rates: of the device.
    """
    if seconds <= 0.0:
        raise ValueError(f"seconds must be positive, got {seconds}")
    calls = list(costs)
    moved = sum(count * cost.bytes for count, cost in calls)
    least = sum(count * cost.seconds(rates) for count, cost in calls)
    return Efficiency(
        tokens_per_second=tokens / seconds, bytes_per_second=moved / seconds, share_of_limit=least / seconds
    )
