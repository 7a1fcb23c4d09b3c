"""The decode state: every static device tensor that the steps of a round read and write."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from .host_memory import shared

FINISH_NONE = 0
FINISH_STOP = 1
FINISH_LENGTH = 2
FINISH_CANCELLED = 3
FINISH_ERROR = 4

REASON_SHIFT = 56
"""`published` holds a `FINISH_*` code from this bit on, and the count of tokens below it."""


@dataclass(frozen=True, kw_only=True)
class StateShape:
    """The sizes from which a `DecodeState` is allocated, all positive unless said otherwise."""

    slots: int
    """`R`, the sequences that can be resident; one more slot is reserved for padding rows."""
    context: int
    """`C`, the most tokens, prompt and output together, that a sequence may have."""
    num_drafts: int
    """`K`, the most drafts of one row in one round; 0 without speculation."""
    vocab_size: int
    max_bucket: int
    """The largest batch bucket."""
    max_width: int
    """The most token positions of one verify."""
    max_stop_tokens: int = 8
    """Stop tokens of one row."""
    ring: int = 0
    """Tokens that the output ring of a row holds until the host takes them, K + 1 at least; 0 stands for the
    context. A row whose ring could not hold another round's tokens ends the loop of rounds."""
    keeps_draft_probs: bool = False
    """Whether drafts are sampled and verification needs the distributions that they were sampled from."""

    def __post_init__(self) -> None:
        if self.ring == 0:
            object.__setattr__(self, "ring", max(self.context, self.num_drafts + 1))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "keeps_draft_probs":
                continue
            least = 0 if field.name == "num_drafts" else 1
            if value < least:
                raise ValueError(f"{field.name} must be at least {least}, got {value}")
        if self.max_bucket > self.slots:
            raise ValueError(f"max_bucket ({self.max_bucket}) must not exceed slots ({self.slots})")
        if self.ring <= self.num_drafts:
            raise ValueError(f"ring must hold the {self.num_drafts + 1} tokens of one round, got {self.ring}")


@dataclass(frozen=True, kw_only=True, eq=False)
class HostView:
    """The host's side of the tensors that it shares with the device; each is a field of `DecodeState` too.

    The host may read and write these at any time, also while a loop of rounds runs, and no others.
    """

    ring_tokens: torch.Tensor
    """int32 [R1, ring]; the device writes."""
    published: torch.Tensor
    """int64 [R1]; the device writes."""
    taken: torch.Tensor
    """int64 [R1]; the host writes."""
    cancel: torch.Tensor
    """bool [R1]; the host writes."""
    pause: torch.Tensor
    """bool [1]; the host writes."""
    leave_on_finish: torch.Tensor
    """bool [1]; the host writes."""


@dataclass(frozen=True, kw_only=True)
class DecodeState:
    """Static tensors, allocated once per engine; steps mutate them in place and the host reads none in a round.

    `R1 = slots + 1`: the last slot is the reserved one, which padding rows point to and nobody reads.
    A *slot* tensor is indexed by slot, a *row* tensor by the row of the bucket in use.
    """

    shape: StateShape
    host: HostView
    """What the host sees of the tensors marked as shared; on the CPU they are the same tensors."""

    # Sequences, by slot.
    tokens: torch.Tensor
    """int32 [R1, C]: prompt and output."""
    length: torch.Tensor
    """int32 [R1]: committed tokens. `tokens[slot, length - 1]` is the anchor, whose KV is not yet written."""
    limit: torch.Tensor
    """int32 [R1]: the length at which the row finishes with reason `length`."""
    finished: torch.Tensor
    """bool [R1]: the row takes no part in rounds. True for free slots and for the reserved one."""
    finish_reason: torch.Tensor
    """int32 [R1]: one of the `FINISH_*` codes."""
    cancel: torch.Tensor
    """bool [R1], shared, written by the host: the row ends with reason `cancelled` after its next round."""
    stop_token_ids: torch.Tensor
    """int32 [R1, S], padded with -1."""

    # Sampling parameters, by slot.
    temperature: torch.Tensor
    """float32 [R1]; 0 is greedy."""
    top_k: torch.Tensor
    """int32 [R1]; 0 keeps every token."""
    top_p: torch.Tensor
    """float32 [R1]; 1 keeps every token."""
    min_p: torch.Tensor
    """float32 [R1]; 0 keeps every token."""
    seed: torch.Tensor
    """int64 [R1]: key of the row's random numbers."""

    # The round, by slot.
    draft_tokens: torch.Tensor
    """int32 [R1, K]."""
    draft_count: torch.Tensor
    """int32 [R1]: drafts the speculator made."""
    confidence: torch.Tensor
    """float32 [R1, K]: the drafter's estimate that draft k is accepted given that those before it are."""
    draft_probs: torch.Tensor
    """float32 [R1, K, V]: the distribution that each draft was sampled from; [R1, K, 0] where nobody asks for it."""
    accepted: torch.Tensor
    """int32 [R1]: drafts accepted in the last round."""
    emitted: torch.Tensor
    """int32 [R1, K + 1]: the accepted drafts and one more token; `accepted + 1` of them are valid."""
    failed: torch.Tensor
    """bool [R1]: the target's logits were not finite."""

    # The bucket and its packed windows.
    slot_of_row: torch.Tensor
    """int32 [max_bucket]: which slot a row of the bucket works for; the reserved slot for padding rows."""
    cu_tokens: torch.Tensor
    """int32 [max_bucket + 1]: row b's window is packed positions `cu_tokens[b]` to `cu_tokens[b + 1]`."""
    base: torch.Tensor
    """int32 [max_bucket]: the absolute position of the first token of the row's window."""
    draft_limit: torch.Tensor
    """int32 [max_bucket + 1]: the most drafts per row when that many rows are live (dynamic speculation)."""
    window_tokens: torch.Tensor
    """int32 [max_width]: token ids of the packed windows; 0 in padding."""
    window_positions: torch.Tensor
    """int32 [max_width]: absolute positions; 0 in padding."""
    window_slots: torch.Tensor
    """int32 [max_width]: slots; the reserved slot in padding."""
    window_rows: torch.Tensor
    """int32 [max_width]: rows of the bucket; -1 in padding."""
    width_index: torch.Tensor
    """int32 [1]: which verify width the budget step chose."""
    running: torch.Tensor
    """bool [1]: the loop of rounds goes on; see `kernels.commit` for when it does not."""
    rounds_left: torch.Tensor
    """int32 [1]: rounds that the loop may still run before it returns to the host."""
    pause: torch.Tensor
    """bool [1], shared, written by the host: leave the loop after this round."""
    leave_on_finish: torch.Tensor
    """bool [1], shared, written by the host: leave the loop when a row finishes; others wait for its slot."""

    # What verify left for accept.
    logits: torch.Tensor
    """model dtype [max_width, V]."""
    sampled: torch.Tensor
    """int32 [max_width]: the target's token after each window token: its argmax, or its Gumbel-max sample."""
    log_normalizer: torch.Tensor
    """float32 [max_width]: log-sum-exp of the kept, temperature-scaled logits."""
    threshold: torch.Tensor
    """float32 [max_width]: temperature-scaled logits below it are filtered out."""
    token_failed: torch.Tensor
    """bool [max_width]: this position's logits were not finite."""

    # Prefill.
    prefill_slot: torch.Tensor
    """int32 [1]: the slot whose prompt is being written."""
    prefill_range: torch.Tensor
    """int32 [2]: first position of the chunk, and its token count."""

    # The output ring, by slot.
    ring_tokens: torch.Tensor
    """int32 [R1, ring], shared: emitted tokens at index `count % ring`."""
    ring_count: torch.Tensor
    """int64 [R1]: tokens ever emitted by the row's request."""
    published: torch.Tensor
    """int64 [R1], shared: `ring_count | finish_reason << REASON_SHIFT`, written after the tokens themselves. One word
    carries both, so that a host that sees a row finished has seen all its tokens."""
    taken: torch.Tensor
    """int64 [R1], shared, written by the host: how many of the row's tokens it has taken from the ring."""

    # Metrics, by slot.
    rounds: torch.Tensor
    """int64 [R1]: rounds in which the row took part."""
    histogram: torch.Tensor
    """int64 [R1, K + 1, K + 1]: rounds by (drafts verified, drafts accepted)."""
    round_pairs: torch.Tensor
    """int32 [R1, C, 2]: (drafts verified, drafts accepted) of each round, for detailed metrics."""

    @classmethod
    def allocate(cls, shape: StateShape, *, dtype: torch.dtype, device: torch.device | str) -> DecodeState:
        """Allocates every tensor: all slots free, all rows padding.

        Args:
            shape: the sizes.
            dtype: of the logits.
            device: of every tensor; those that the host shares are in its memory.
        """
        r1, context, k = shape.slots + 1, shape.context, shape.num_drafts
        both = {
            "ring_tokens": shared((r1, shape.ring), torch.int32, device),
            "published": shared((r1,), torch.int64, device),
            "taken": shared((r1,), torch.int64, device),
            "cancel": shared((r1,), torch.bool, device),
            "pause": shared((1,), torch.bool, device),
            "leave_on_finish": shared((1,), torch.bool, device),
        }

        def full(size: tuple[int, ...], value: float | bool, kind: torch.dtype) -> torch.Tensor:
            return torch.full(size, value, dtype=kind, device=device)

        def zeros(size: tuple[int, ...], kind: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=kind, device=device)

        return cls(
            shape=shape,
            host=HostView(**{name: pair.host for name, pair in both.items()}),
            **{name: pair.device for name, pair in both.items()},
            tokens=zeros((r1, context)),
            length=full((r1,), 1, torch.int32),
            limit=zeros((r1,)),
            finished=full((r1,), True, torch.bool),
            finish_reason=zeros((r1,)),
            stop_token_ids=full((r1, shape.max_stop_tokens), -1, torch.int32),
            temperature=zeros((r1,), torch.float32),
            top_k=zeros((r1,)),
            top_p=full((r1,), 1.0, torch.float32),
            min_p=zeros((r1,), torch.float32),
            seed=zeros((r1,), torch.int64),
            draft_tokens=zeros((r1, k)),
            draft_count=zeros((r1,)),
            confidence=zeros((r1, k), torch.float32),
            draft_probs=zeros((r1, k, shape.vocab_size if shape.keeps_draft_probs else 0), torch.float32),
            accepted=zeros((r1,)),
            emitted=zeros((r1, k + 1)),
            failed=full((r1,), False, torch.bool),
            slot_of_row=full((shape.max_bucket,), shape.slots, torch.int32),
            cu_tokens=zeros((shape.max_bucket + 1,)),
            base=zeros((shape.max_bucket,)),
            draft_limit=full((shape.max_bucket + 1,), k, torch.int32),
            window_tokens=zeros((shape.max_width,)),
            window_positions=zeros((shape.max_width,)),
            window_slots=full((shape.max_width,), shape.slots, torch.int32),
            window_rows=full((shape.max_width,), -1, torch.int32),
            width_index=zeros((1,)),
            running=full((1,), False, torch.bool),
            rounds_left=zeros((1,)),
            logits=zeros((shape.max_width, shape.vocab_size), dtype),
            sampled=zeros((shape.max_width,)),
            log_normalizer=zeros((shape.max_width,), torch.float32),
            threshold=zeros((shape.max_width,), torch.float32),
            token_failed=full((shape.max_width,), False, torch.bool),
            prefill_slot=full((1,), shape.slots, torch.int32),
            prefill_range=zeros((2,)),
            ring_count=zeros((r1,), torch.int64),
            rounds=zeros((r1,), torch.int64),
            histogram=zeros((r1, k + 1, k + 1), torch.int64),
            round_pairs=zeros((r1, context, 2)),
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor by its field name, the device's side of those that are shared."""
        fields: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}

    @property
    def draft_distributions(self) -> torch.Tensor | None:
        """`draft_probs`, or None where each draft is the only token that its drafter would have made."""
        return self.draft_probs if self.shape.keeps_draft_probs else None

    @property
    def reserved_slot(self) -> int:
        """The slot that padding rows point to."""
        return self.shape.slots

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""
        return self.tokens.device
